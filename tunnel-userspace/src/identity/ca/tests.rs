use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
};

use x509_parser::prelude::{FromDer as _, ParsedExtension, X509Certificate};

use super::{
    super::tests::{TestCa, assert_has, both_cas, copy, days, first_certificate, fixed_time},
    *,
};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("there").permissions().mode() & 0o777
}

fn names(dir: &Path) -> BTreeSet<String> {
    let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let entries = fs::read_dir(dir).expect("a directory").map(name);
    entries.map(|it| it.into_string().expect("UTF-8")).collect()
}

#[test]
fn init_creates_a_ca_in_a_new_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let directory = dir.path().join("new").join("ca");

    let created = init(&directory, DEFAULT_CA_DAYS, fixed_time()).expect("a CA");

    assert_eq!(
        names(&directory),
        ["ca-key.pem", "ca.pem"].map(str::to_owned).into()
    );
    assert_eq!(
        (mode(&directory), mode(&created.key), mode(&created.cert)),
        (0o700, 0o600, 0o644)
    );
    assert_ne!(
        mode(&dir.path().join("new")),
        0o700,
        "what is above is not closed"
    );
    assert_eq!(created.expires, fixed_time() + days(3650));
}

#[test]
fn init_never_overwrites_a_ca_nor_a_part_of_one() {
    let test_ca = TestCa::at(fixed_time());
    let before = fs::read(test_ca.path("ca.pem")).expect("read");
    let refused =
        init(test_ca.dir.path(), DEFAULT_CA_DAYS, fixed_time()).expect_err("there is one");
    assert_has(&refused.to_string(), "CA is never overwritten");
    assert_eq!(fs::read(test_ca.path("ca.pem")).expect("read"), before);

    for part in ["ca.pem", "ca-key.pem"] {
        let dir = tempfile::tempdir().expect("a directory");
        symlink("/nowhere", dir.path().join(part)).expect("linked");
        let refused = init(dir.path(), DEFAULT_CA_DAYS, fixed_time());
        assert!(
            matches!(refused, Err(CaError::Exists { .. })),
            "{refused:?}"
        );
        assert_eq!(names(dir.path()).len(), 1);
    }
}

#[test]
fn concurrent_inits_create_one_ca() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().expect("a directory");
        let created = AtomicUsize::new(0);
        let start = Barrier::new(8);
        let one = || {
            start.wait();
            if init(dir.path(), DEFAULT_CA_DAYS, fixed_time()).is_ok() {
                created.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(one);
            }
        });

        assert_eq!(created.into_inner(), 1);
        issue_gateway(dir.path(), None, DEFAULT_DAYS, fixed_time()).expect("its key is its own");
    }
}

#[test]
fn issue_writes_three_files_that_only_their_owner_can_use() {
    let test_ca = TestCa::at(fixed_time());

    let issued = issue_agent(
        test_ca.dir.path(),
        "edge-1",
        None,
        DEFAULT_DAYS,
        fixed_time(),
    )
    .expect("issued");

    let directory = test_ca.path("agents/edge-1");
    assert_eq!(
        names(&directory),
        ["ca.pem", "cert.pem", "key.pem"].map(str::to_owned).into()
    );
    assert_eq!((mode(&directory), mode(&issued.files.key)), (0o700, 0o600));
    assert_eq!(
        first_certificate(&issued.files.ca),
        first_certificate(&test_ca.path("ca.pem"))
    );
    assert_eq!(
        (issued.expires, issued.is_shortened),
        (fixed_time() + days(365), false)
    );
}

#[test]
fn a_key_file_is_private_from_its_creation() {
    // The file is created with its final mode; the umask can only remove bits from it.
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("key.pem");
    fs::write(&path, "old").expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("changed");
    symlink("/nowhere", dir.path().join(".key.pem.new")).expect("linked");

    let temp = key_directory::TempFile::write(&path, b"new", KEY_MODE).expect("written");
    assert_eq!(mode(&dir.path().join(".key.pem.new")), 0o600);
    assert_eq!(
        fs::read(&path).expect("read"),
        b"old",
        "not touched until it is renamed"
    );
    temp.rename().expect("renamed");

    assert_eq!(
        (fs::read(&path).expect("read"), mode(&path)),
        (b"new".to_vec(), 0o600)
    );
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn a_failed_write_changes_no_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, two) = (dir.path().join("one"), dir.path().join("missing/two"));
    fs::write(&one, "old").expect("written");

    let refused = replace_files(&[
        (one.clone(), b"new".to_vec(), CERT_MODE),
        (two, b"new".to_vec(), CERT_MODE),
    ]);

    assert!(matches!(refused, Err(CaError::Io { .. })), "{refused:?}");
    assert_eq!(fs::read(&one).expect("read"), b"old");
    assert_eq!(names(dir.path()).len(), 1, "no temporary file is left");
}

#[test]
fn the_certificate_of_another_owner_is_not_replaced() {
    let test_ca = TestCa::at(fixed_time());
    let (dir, out) = (test_ca.dir.path(), test_ca.path("out"));
    let to = Some(&*out);
    issue_agent(dir, "edge-1", to, DEFAULT_DAYS, fixed_time()).expect("issued");

    let other = issue_agent(dir, "edge-2", to, DEFAULT_DAYS, fixed_time()).expect_err("taken");
    let gateway = issue_gateway(dir, to, DEFAULT_DAYS, fixed_time()).expect_err("taken");

    assert_has(&other.to_string(), "is the certificate of node edge-1");
    assert_has(&gateway.to_string(), "not replaced by that of a gateway");
    fs::write(out.join("cert.pem"), "damaged").expect("written");
    issue_agent(dir, "edge-2", to, DEFAULT_DAYS, fixed_time())
        .expect("a damaged certificate has no owner");
}

#[test]
fn names_that_no_node_can_have_are_refused_before_anything_is_written() {
    let test_ca = TestCa::at(fixed_time());
    for name in ["", "../../etc", "Edge", "a b", &"a".repeat(65)] {
        let refused = issue_agent(test_ca.dir.path(), name, None, DEFAULT_DAYS, fixed_time());
        assert!(matches!(refused, Err(CaError::Name(_))), "{refused:?}");
    }
    test_ca.agent(&"a".repeat(64));
    assert_eq!(names(&test_ca.path("agents")).len(), 1);
}

#[test]
fn no_certificate_outlives_the_ca_and_an_expired_ca_issues_none() {
    let dir = tempfile::tempdir().expect("a directory");
    init(dir.path(), 10, fixed_time()).expect("a CA");

    let issued = issue_gateway(dir.path(), None, DEFAULT_DAYS, fixed_time()).expect("issued");
    let late = issue_gateway(dir.path(), None, DEFAULT_DAYS, fixed_time() + days(11))
        .expect_err("expired");
    let early = issue_gateway(dir.path(), None, DEFAULT_DAYS, fixed_time() - days(1))
        .expect_err("too early");

    assert_eq!(
        (issued.expires, issued.is_shortened),
        (fixed_time() + days(10), true)
    );
    for refused in [late, early] {
        assert!(matches!(refused, CaError::NotValid { .. }), "{refused}");
    }
}

#[test]
fn days_have_bounds() {
    let dir = tempfile::tempdir().expect("a directory");
    for days in [0, MAX_DAYS + 1, u32::MAX] {
        let refused = init(dir.path(), days, fixed_time());
        assert!(matches!(refused, Err(CaError::Days { .. })), "{refused:?}");
    }
    init(dir.path(), MAX_DAYS, fixed_time()).expect("the most");
    assert!(matches!(
        issue_gateway(dir.path(), None, 0, fixed_time()),
        Err(CaError::Days { .. })
    ));
}

#[test]
fn a_directory_without_ca_and_a_key_of_another_ca_are_errors() {
    let empty = tempfile::tempdir().expect("a directory");
    let refused = issue_gateway(empty.path(), None, DEFAULT_DAYS, fixed_time()).expect_err("no CA");
    assert_has(&refused.to_string(), "culvert ca init --dir");

    let (test_ca, other) = (TestCa::at(fixed_time()), TestCa::at(fixed_time()));
    copy(&other.path("ca-key.pem"), &test_ca.path("ca-key.pem"));
    let refused =
        issue_gateway(test_ca.dir.path(), None, DEFAULT_DAYS, fixed_time()).expect_err("another's");
    assert!(matches!(refused, CaError::OtherKey { .. }), "{refused}");
}

#[test]
fn a_ca_that_replaces_another_issues_both_ca_certificates() {
    let (old, new) = (TestCa::at(fixed_time()), TestCa::at(fixed_time()));
    let both = both_cas(&old, &new);
    fs::write(new.path("ca.pem"), &both).expect("written");

    let issued = new.gateway();

    assert_eq!(fs::read_to_string(&issued.ca).expect("read"), both);
    let views = read_certificates(&issued.cert, fixed_time()).expect("shown");
    let issuers = read_certificates(&new.path("ca.pem"), fixed_time()).expect("shown");
    assert_eq!(views[0].issuer, issuers[1].subject);
}

/// Returns the key identifiers in a certificate: its subject's, then its issuer's.
fn key_ids<'a>(cert: &'a X509Certificate<'_>) -> [Option<&'a [u8]>; 2] {
    let [mut own, mut issuer] = [None; 2];
    for extension in cert.extensions() {
        if let ParsedExtension::SubjectKeyIdentifier(id) = extension.parsed_extension() {
            own = Some(id.0);
        }
        if let ParsedExtension::AuthorityKeyIdentifier(id) = extension.parsed_extension() {
            issuer = id.key_identifier.as_ref().map(|id| id.0);
        }
    }
    [own, issuer]
}

#[test]
fn certificates_have_the_extensions_that_x509_requires() {
    let test_ca = TestCa::at(fixed_time());
    let (agent, gateway) = (test_ca.agent("edge-1"), test_ca.gateway());
    let ders = [&agent.ca, &agent.cert, &gateway.cert].map(|path| first_certificate(path));
    let parsed = ders.each_ref().map(|der| X509Certificate::from_der(der));
    let [ca, agent, gateway] = &parsed.map(|it| it.expect("a certificate").1);

    let constraints = ca.basic_constraints().expect("sound").expect("there");
    assert!(constraints.critical && constraints.value.ca);
    assert_eq!(constraints.value.path_len_constraint, Some(0));
    let usage = ca.key_usage().expect("sound").expect("there");
    assert!(usage.critical && usage.value.key_cert_sign() && !usage.value.digital_signature());
    for leaf in [agent, gateway] {
        let constraints = leaf.basic_constraints().expect("sound").expect("there");
        assert!(!constraints.value.ca);
        let usage = leaf.key_usage().expect("sound").expect("there");
        assert!(usage.critical && usage.value.digital_signature());
        assert!(!usage.value.key_cert_sign());
        let ([of_ca, _], [own, issuer]) = (key_ids(ca), key_ids(leaf));
        assert!(own.is_some() && of_ca.is_some() && own != of_ca);
        assert_eq!(issuer, of_ca);
    }
    let serials = BTreeSet::from([ca, agent, gateway].map(|it| it.raw_serial()));
    assert_eq!(serials.len(), 3);
    assert!(serials.iter().all(|serial| serial.len() == 16));
    assert_eq!(agent.subject().to_string(), "O=culvert:agents, CN=edge-1");
    assert_eq!(
        gateway.subject().to_string(),
        "O=culvert:gateways, CN=gateway"
    );
    assert!(agent.subject_alternative_name().expect("sound").is_none());
}

#[test]
fn views_have_the_kind_node_and_days_left() {
    let test_ca = TestCa::at(fixed_time());
    test_ca.agent("edge-2");
    issue_agent(test_ca.dir.path(), "edge-1", None, 1, fixed_time()).expect("issued");
    test_ca.gateway();

    let files = certificate_files(test_ca.dir.path()).expect("a CA");
    let views: Vec<_> = files
        .iter()
        .flat_map(|file| read_certificates(file, fixed_time() + days(2)).expect("shown"))
        .collect();

    let summary: Vec<_> = views
        .iter()
        .map(|view| (view.role, view.node.as_deref(), view.days_left))
        .collect();
    assert_eq!(
        summary,
        [
            (CertificateKind::Ca, None, 3648),
            (CertificateKind::Gateway, None, 363),
            (CertificateKind::Agent, Some("edge-1"), -1),
            (CertificateKind::Agent, Some("edge-2"), 363),
        ]
    );
    assert_eq!(views[1].issuer, views[0].subject);
    let fingerprints: BTreeSet<_> = views.iter().map(|view| &view.fingerprint).collect();
    assert_eq!(fingerprints.len(), 4);
    assert!(fingerprints.iter().all(|digits| digits.len() == 64));
}
