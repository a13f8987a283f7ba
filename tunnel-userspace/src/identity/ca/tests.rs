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
    super::tests::{assert_has, copy, days, then},
    *,
};

fn ca() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    init(dir.path(), CA_DAYS, then()).expect("a CA");
    dir
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("there").permissions().mode() & 0o777
}

fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).expect("a folder");
    entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect()
}

fn der(path: &Path) -> Vec<u8> {
    let (bytes, _) = super::super::files::read(path).expect("read");
    let mut found = super::super::files::certificates(path, &bytes).expect("certificates");
    found.remove(0).0.to_vec()
}

#[test]
fn init_makes_a_ca_in_a_folder_of_its_own() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("new").join("ca");

    let made = init(&folder, CA_DAYS, then()).expect("a CA");

    assert_eq!(
        names(&folder),
        ["ca-key.pem", "ca.pem"].map(str::to_owned).into()
    );
    assert_eq!(
        (mode(&folder), mode(&made.key), mode(&made.cert)),
        (0o700, 0o600, 0o644)
    );
    assert_ne!(
        mode(&dir.path().join("new")),
        0o700,
        "what is above is not closed"
    );
    assert_eq!(made.expires, then() + days(3650));
}

#[test]
fn init_never_overwrites_a_ca_nor_a_part_of_one() {
    let dir = ca();
    let before = fs::read(dir.path().join("ca.pem")).expect("read");
    let refused = init(dir.path(), CA_DAYS, then()).expect_err("there is one");
    assert_has(&refused.to_string(), "a CA is never overwritten");
    assert_eq!(fs::read(dir.path().join("ca.pem")).expect("read"), before);

    for part in ["ca.pem", "ca-key.pem"] {
        let dir = tempfile::tempdir().expect("a folder");
        symlink("/nowhere", dir.path().join(part)).expect("linked");
        let refused = init(dir.path(), CA_DAYS, then());
        assert!(
            matches!(refused, Err(CaError::Exists { .. })),
            "{refused:?}"
        );
        assert_eq!(names(dir.path()).len(), 1);
    }
}

#[test]
fn two_that_init_at_once_make_one_ca() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().expect("a folder");
        let made = AtomicUsize::new(0);
        let start = Barrier::new(8);
        let one = || {
            start.wait();
            if init(dir.path(), CA_DAYS, then()).is_ok() {
                made.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(one);
            }
        });

        assert_eq!(made.into_inner(), 1);
        issue_gateway(dir.path(), None, DAYS, then()).expect("its key is its own");
    }
}

#[test]
fn issue_writes_three_files_that_only_their_owner_can_use() {
    let dir = ca();

    let issued = issue_agent(dir.path(), "edge-1", None, DAYS, then()).expect("issued");

    let folder = dir.path().join("agents/edge-1");
    assert_eq!(
        names(&folder),
        ["ca.pem", "cert.pem", "key.pem"].map(str::to_owned).into()
    );
    assert_eq!((mode(&folder), mode(&issued.files.key)), (0o700, 0o600));
    assert_eq!(
        fs::read(&issued.files.ca).expect("read"),
        fs::read(dir.path().join("ca.pem")).expect("read")
    );
    assert_eq!(
        (issued.expires, issued.is_shortened),
        (then() + days(365), false)
    );
}

#[test]
fn a_key_is_its_owners_from_the_moment_it_exists() {
    // What is created with that mode never had another; the umask can only take from it.
    let dir = tempfile::tempdir().expect("a folder");
    let place = dir.path().join("key.pem");
    fs::write(&place, "old").expect("written");
    fs::set_permissions(&place, fs::Permissions::from_mode(0o666)).expect("changed");
    symlink("/nowhere", dir.path().join(".key.pem.new")).expect("linked");

    let draft = folder::Draft::write(&place, b"new", PRIVATE).expect("written");
    assert_eq!(mode(&dir.path().join(".key.pem.new")), 0o600);
    assert_eq!(
        fs::read(&place).expect("read"),
        b"old",
        "not touched until it is renamed"
    );
    draft.rename().expect("renamed");

    assert_eq!(
        (fs::read(&place).expect("read"), mode(&place)),
        (b"new".to_vec(), 0o600)
    );
    assert_eq!(names(dir.path()).len(), 1);
}

#[test]
fn what_cannot_be_written_whole_changes_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let (one, two) = (dir.path().join("one"), dir.path().join("missing/two"));
    fs::write(&one, "old").expect("written");

    let refused = replace(&[
        (one.clone(), b"new".to_vec(), PUBLIC),
        (two, b"new".to_vec(), PUBLIC),
    ]);

    assert!(matches!(refused, Err(CaError::Io { .. })), "{refused:?}");
    assert_eq!(fs::read(&one).expect("read"), b"old");
    assert_eq!(names(dir.path()).len(), 1, "no draft is left");
}

#[test]
fn the_pair_of_another_is_not_replaced() {
    let dir = ca();
    let out = dir.path().join("out");
    let to = Some(&*out);
    issue_agent(dir.path(), "edge-1", to, DAYS, then()).expect("issued");

    let other = issue_agent(dir.path(), "edge-2", to, DAYS, then()).expect_err("taken");
    let gateway = issue_gateway(dir.path(), to, DAYS, then()).expect_err("taken");

    assert_has(&other.to_string(), "is the certificate of node edge-1");
    assert_has(&gateway.to_string(), "replaced by that of a gateway");
    fs::write(out.join("cert.pem"), "damaged").expect("written");
    issue_agent(dir.path(), "edge-2", to, DAYS, then()).expect("a damaged one is nobody's");
}

#[test]
fn names_that_no_node_can_have_are_refused_before_anything_is_written() {
    let dir = ca();
    for name in ["", "../../etc", "Edge", "a b", &"a".repeat(65)] {
        let refused = issue_agent(dir.path(), name, None, DAYS, then());
        assert!(matches!(refused, Err(CaError::Name(_))), "{refused:?}");
    }
    issue_agent(dir.path(), &"a".repeat(64), None, DAYS, then()).expect("the longest");
    assert_eq!(names(&dir.path().join("agents")).len(), 1);
}

#[test]
fn nothing_outlives_the_ca_and_an_expired_ca_issues_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    init(dir.path(), 10, then()).expect("a CA");

    let issued = issue_gateway(dir.path(), None, DAYS, then()).expect("issued");
    let late = issue_gateway(dir.path(), None, DAYS, then() + days(11)).expect_err("expired");
    let early = issue_gateway(dir.path(), None, DAYS, then() - days(1)).expect_err("too early");

    assert_eq!(
        (issued.expires, issued.is_shortened),
        (then() + days(10), true)
    );
    for refused in [late, early] {
        assert!(matches!(refused, CaError::NotValid { .. }), "{refused}");
    }
}

#[test]
fn days_have_bounds() {
    let dir = tempfile::tempdir().expect("a folder");
    for days in [0, MOST_DAYS + 1, u32::MAX] {
        let refused = init(dir.path(), days, then());
        assert!(matches!(refused, Err(CaError::Days { .. })), "{refused:?}");
    }
    init(dir.path(), MOST_DAYS, then()).expect("the most");
    assert!(matches!(
        issue_gateway(dir.path(), None, 0, then()),
        Err(CaError::Days { .. })
    ));
}

#[test]
fn a_folder_without_ca_and_a_key_of_another_ca_are_told() {
    let empty = tempfile::tempdir().expect("a folder");
    let refused = issue_gateway(empty.path(), None, DAYS, then()).expect_err("no CA");
    assert_has(&refused.to_string(), "culvert ca init --dir");

    let (dir, other) = (ca(), ca());
    copy(
        &other.path().join("ca-key.pem"),
        &dir.path().join("ca-key.pem"),
    );
    let refused = issue_gateway(dir.path(), None, DAYS, then()).expect_err("another's");
    assert!(matches!(refused, CaError::OtherKey { .. }), "{refused}");
}

#[test]
fn a_ca_that_takes_over_hands_out_both_certificates() {
    let (old, new) = (ca(), ca());
    let [one, two] =
        [&old, &new].map(|dir| fs::read_to_string(dir.path().join("ca.pem")).expect("a CA"));
    let both = format!("{one}{two}");
    fs::write(new.path().join("ca.pem"), &both).expect("written");

    let issued = issue_gateway(new.path(), None, DAYS, then()).expect("issued");

    assert_eq!(fs::read_to_string(&issued.files.ca).expect("read"), both);
    let views = show(&issued.files.cert, then()).expect("shown");
    let issuers = show(&new.path().join("ca.pem"), then()).expect("shown");
    assert_eq!(views[0].issuer, issuers[1].subject);
}

#[test]
fn certificates_carry_what_x_509_asks_for() {
    let dir = ca();
    let agent = issue_agent(dir.path(), "edge-1", None, DAYS, then()).expect("issued");
    let gateway = issue_gateway(dir.path(), None, DAYS, then()).expect("issued");
    let ders = [
        dir.path().join("ca.pem"),
        agent.files.cert,
        gateway.files.cert,
    ]
    .map(|it| der(&it));
    let [ca, agent, gateway] = [0, 1, 2].map(|index: usize| {
        X509Certificate::from_der(&ders[index])
            .expect("a certificate")
            .1
    });

    let constraints = ca.basic_constraints().expect("sound").expect("there");
    assert!(constraints.critical && constraints.value.ca);
    assert_eq!(constraints.value.path_len_constraint, Some(0));
    let usage = ca.key_usage().expect("sound").expect("there");
    assert!(usage.critical && usage.value.key_cert_sign() && !usage.value.digital_signature());
    for leaf in [&agent, &gateway] {
        let constraints = leaf.basic_constraints().expect("sound").expect("there");
        assert!(!constraints.value.ca);
        let usage = leaf.key_usage().expect("sound").expect("there");
        assert!(usage.critical && usage.value.digital_signature());
        assert!(!usage.value.key_cert_sign());
        let key_id = |cert: &X509Certificate<'_>| {
            let mut parsed = cert.iter_extensions().map(|it| it.parsed_extension());
            parsed.find_map(|it| {
                if let ParsedExtension::SubjectKeyIdentifier(id) = it {
                    Some(id.0.to_vec())
                } else {
                    None
                }
            })
        };
        let mut parsed = leaf.iter_extensions().map(|it| it.parsed_extension());
        let authority = parsed.find_map(|it| {
            if let ParsedExtension::AuthorityKeyIdentifier(id) = it {
                id.key_identifier.clone()
            } else {
                None
            }
        });
        assert_eq!(authority.map(|id| id.0.to_vec()), key_id(&ca));
        assert!(key_id(leaf).is_some());
        assert_ne!(key_id(leaf), key_id(&ca));
    }
    let serials: BTreeSet<_> = [&ca, &agent, &gateway]
        .map(|it| it.raw_serial().to_vec())
        .into();
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
fn show_tells_what_a_certificate_is() {
    let dir = ca();
    issue_agent(dir.path(), "edge-2", None, DAYS, then()).expect("issued");
    issue_agent(dir.path(), "edge-1", None, 1, then()).expect("issued");
    issue_gateway(dir.path(), None, DAYS, then()).expect("issued");

    let files = issued(dir.path()).expect("a CA");
    let views: Vec<_> = files
        .iter()
        .flat_map(|file| show(file, then() + days(2)).expect("shown"))
        .collect();

    let told: Vec<_> = views
        .iter()
        .map(|view| (view.role, view.node.as_deref(), view.days_left))
        .collect();
    assert_eq!(
        told,
        [
            (Kind::Ca, None, 3648),
            (Kind::Gateway, None, 363),
            (Kind::Agent, Some("edge-1"), -1),
            (Kind::Agent, Some("edge-2"), 363),
        ]
    );
    assert_eq!(views[1].issuer, views[0].subject);
    let fingerprints: BTreeSet<_> = views.iter().map(|view| &view.fingerprint).collect();
    assert_eq!(fingerprints.len(), 4);
    assert!(fingerprints.iter().all(|digits| digits.len() == 64));
}
