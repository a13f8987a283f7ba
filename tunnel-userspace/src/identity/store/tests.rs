use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use super::{
    super::{
        ca,
        tests::{TestCa, assert_has, both_cas, copy, days, first_certificate, fixed_time},
    },
    *,
};

/// A store with a simulated clock, and its receiver.
struct StoreFixture {
    store: CertificateStore,
    receiver: CertificateReceiver,
}

impl StoreFixture {
    fn open(files: &IdentityFiles, role: Role, now: Timestamp) -> Self {
        let (store, receiver) = CertificateStore::open_at(files.clone(), role, now);
        Self { store, receiver }
    }

    fn check(&mut self, now: Timestamp) {
        let found = FileContents::read(&self.store.files);
        self.store.handle_check(found, now);
    }

    fn name(&self) -> Option<String> {
        let current = self.receiver.current()?;
        Some(current.name.clone())
    }

    fn problem(&self) -> Option<String> {
        self.receiver.state().problem
    }

    fn warnings(&self) -> Vec<String> {
        self.receiver.state().warnings
    }

    #[track_caller]
    fn assert_problem(&self, part: &str) {
        assert_has(&self.problem().expect("a problem"), part);
    }
}

/// Returns a CA, valid files that it has issued, and a store that has loaded them.
fn valid_store() -> (TestCa, IdentityFiles, StoreFixture) {
    let test_ca = TestCa::at(fixed_time());
    let files = test_ca.agent("edge-1");
    let fixture = StoreFixture::open(&files, Role::Agent, fixed_time());
    (test_ca, files, fixture)
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed");
}

#[test]
fn valid_files_are_in_use_at_once() {
    let (_test_ca, _files, fixture) = valid_store();

    let state = fixture.receiver.state();

    assert_eq!(fixture.name().as_deref(), Some("edge-1"));
    assert_eq!(state.name.as_deref(), Some("edge-1"));
    assert_eq!(state.expires, Some(fixed_time() + days(365)));
    assert_eq!(state.ca_expires, Some(fixed_time() + days(3650)));
    assert_eq!((state.problem, state.warnings), (None, Vec::new()));
}

#[test]
fn missing_files_are_a_problem_at_once_and_in_use_as_soon_as_they_exist() {
    let test_ca = TestCa::at(fixed_time());
    let files = test_ca.agent("edge-1");
    let aside = test_ca.path("aside");
    fs::rename(&files.key, &aside).expect("moved");

    let mut fixture = StoreFixture::open(&files, Role::Agent, fixed_time());
    fixture.assert_problem("key.pem: cannot be read: No such file");
    assert_eq!(fixture.name(), None);

    fs::rename(&aside, &files.key).expect("moved");
    fixture.check(fixed_time());
    assert_eq!(fixture.problem(), None);
    assert_eq!(fixture.name().as_deref(), Some("edge-1"));
}

#[test]
fn a_pair_that_is_replaced_comes_into_use_and_nothing_else_changes() {
    let (test_ca, _files, mut fixture) = valid_store();
    let first = fixture.receiver.current().expect("in use");
    fixture.check(fixed_time());
    let still = fixture.receiver.current().expect("in use");
    assert!(Arc::ptr_eq(&first, &still));

    ca::issue_agent(test_ca.dir.path(), "edge-1", None, 30, fixed_time()).expect("issued again");
    fixture.check(fixed_time());

    let second = fixture.receiver.current().expect("in use");
    assert_eq!(second.expires, fixed_time() + days(30));
    assert_eq!(
        fixture.receiver.state().expires,
        Some(fixed_time() + days(30))
    );
    // Sessions that started with the first certificate keep it.
    assert_eq!(first.expires, fixed_time() + days(365));
}

#[test]
fn an_invalid_pair_leaves_the_old_one_in_use_and_is_reported_by_the_second_check() {
    let (_test_ca, files, mut fixture) = valid_store();
    let first = fixture.receiver.current().expect("in use");
    let good = fs::read(&files.cert).expect("read");

    fs::write(&files.cert, "garbage").expect("written");
    fixture.check(fixed_time());
    assert_eq!(fixture.problem(), None, "it may be half written");
    fixture.check(fixed_time());
    fixture.assert_problem("cert.pem: contains no certificate");
    let still = fixture.receiver.current().expect("in use");
    assert!(Arc::ptr_eq(&first, &still));
    assert_eq!(
        fixture.receiver.state().expires,
        Some(fixed_time() + days(365))
    );

    fs::write(&files.cert, "").expect("written");
    fixture.check(fixed_time());
    fixture.check(fixed_time());
    fixture.assert_problem("cert.pem: is empty");

    fs::write(&files.cert, good).expect("written");
    fixture.check(fixed_time());
    assert_eq!(fixture.problem(), None);
}

#[test]
fn a_key_and_certificate_that_are_replaced_one_after_the_other_are_no_problem() {
    let (test_ca, files, mut fixture) = valid_store();
    let out = test_ca.path("next");
    let next = ca::issue_agent(test_ca.dir.path(), "edge-1", Some(&out), 30, fixed_time());
    let next = next.expect("issued").files;

    copy(&next.key, &files.key);
    fixture.check(fixed_time());
    assert_eq!(fixture.problem(), None, "the certificate may be on its way");
    assert_eq!(
        fixture.receiver.state().expires,
        Some(fixed_time() + days(365))
    );
    copy(&next.cert, &files.cert);
    fixture.check(fixed_time());

    assert_eq!(fixture.problem(), None);
    assert_eq!(
        fixture.receiver.state().expires,
        Some(fixed_time() + days(30))
    );
}

#[test]
fn a_certificate_has_a_warning_before_it_expires_and_a_problem_afterwards() {
    let (_test_ca, _files, mut fixture) = valid_store();

    fixture.check(fixed_time() + days(334));
    assert_eq!(fixture.warnings(), Vec::<String>::new());
    fixture.check(fixed_time() + days(336));
    let warnings = fixture.warnings();
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].ends_with("cert.pem: expires on 2027-03-01T12:00:00Z; issue a new certificate"),
        "{warnings:?}"
    );

    fixture.check(fixed_time() + days(364));
    assert_eq!(fixture.problem(), None);
    fixture.check(fixed_time() + days(366));
    fixture.assert_problem("cert.pem: expired on 2027-03-01T12:00:00Z");
    assert_eq!(fixture.name().as_deref(), Some("edge-1"), "it stays in use");
}

#[test]
fn files_that_are_not_valid_yet_are_used_once_they_are() {
    let soon = TestCa::at(fixed_time()).later(fixed_time() + days(2));
    let mut fixture = StoreFixture::open(&soon.agent("edge-1"), Role::Agent, fixed_time());
    fixture.assert_problem("is not valid before 2026-03-03T11:00:00Z");

    fixture.check(fixed_time() + days(2));

    assert_eq!(fixture.problem(), None);
    assert_eq!(fixture.name().as_deref(), Some("edge-1"));
}

#[test]
fn an_expired_ca_of_two_is_no_longer_trusted() {
    let (old, new) = (
        TestCa::at(fixed_time() - days(3640)),
        TestCa::at(fixed_time()),
    );
    let files = new.agent("edge-1");
    fs::write(&files.ca, both_cas(&old, &new)).expect("written");
    let mut fixture = StoreFixture::open(&files, Role::Agent, fixed_time());
    assert_eq!(
        fixture.receiver.state().ca_expires,
        Some(fixed_time() + days(10))
    );

    fixture.check(fixed_time() + days(11));

    assert_eq!(fixture.problem(), None);
    assert_eq!(
        fixture.receiver.state().ca_expires,
        Some(fixed_time() + days(3650))
    );
}

#[test]
fn a_key_that_others_can_access_has_a_warning() {
    let (_test_ca, files, mut fixture) = valid_store();
    let start = format!("{}: users other than the owner", files.key.display());

    for mode in [0o644, 0o604, 0o620, 0o610, 0o602, 0o601] {
        chmod(&files.key, mode);
        fixture.check(fixed_time());
        let warnings = fixture.warnings();
        assert_eq!(warnings.len(), 1, "{mode:o}: {warnings:?}");
        assert!(warnings[0].starts_with(&start), "{mode:o}: {warnings:?}");
        assert_eq!(fixture.problem(), None);
    }
    for mode in [0o600, 0o400, 0o640] {
        chmod(&files.key, mode);
        fixture.check(fixed_time());
        assert_eq!(fixture.warnings(), Vec::<String>::new(), "{mode:o}");
    }
}

#[test]
fn a_file_without_a_private_key_has_no_warning_about_one() {
    let (_test_ca, files, mut fixture) = valid_store();
    fs::copy(&files.cert, &files.key).expect("copied");
    chmod(&files.key, 0o644);

    fixture.check(fixed_time());
    fixture.check(fixed_time());

    fixture.assert_problem("contains no private key");
    assert_eq!(fixture.warnings(), Vec::<String>::new());
}

#[test]
fn an_agents_certificate_for_another_node_has_a_warning() {
    let (_test_ca, _files, mut fixture) = valid_store();
    fixture.store.expect_name("edge-2");
    fixture.check(fixed_time());

    let warnings = fixture.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_has(
        &warnings[0],
        "is the certificate of node edge-1, but nodeName is edge-2",
    );
    assert_eq!(fixture.name().as_deref(), Some("edge-1"));

    fixture.store.expect_name("edge-1");
    assert_eq!(fixture.warnings(), Vec::<String>::new());
}

#[test]
fn the_state_is_the_same_after_a_round_trip_through_json() {
    let state = valid_store().2.receiver.state();

    let text = serde_json::to_string(&state).expect("written");

    assert_eq!(
        serde_json::from_str::<CertificateState>(&text).expect("read"),
        state
    );
    assert_has(&text, r#""expires":"2027-03-01T12:00:00Z""#);
}

#[tokio::test(start_paused = true)]
async fn the_running_store_publishes_replaced_files_and_stops_at_the_drain() {
    let test_ca = TestCa::new();
    let files = test_ca.agent("edge-1");
    let (store, mut receiver) = CertificateStore::open(files, Role::Agent);
    let (drain, draining) = watch::channel(false);
    let first = receiver.current().expect("in use").expires;
    let issuing = async {
        ca::issue_agent(test_ca.dir.path(), "edge-1", None, 30, test_ca.now).expect("issued again");
        receiver.changed().await;
        let second = receiver.current().expect("in use").expires;
        drain.send_replace(true);
        second
    };

    let limit = Duration::from_secs(20);
    let (_, second) =
        tokio::time::timeout(limit, async { tokio::join!(store.run(draining), issuing) })
            .await
            .expect("both end");

    assert!(second < first);
    let waits = tokio::time::timeout(Duration::from_millis(10), receiver.changed()).await;
    waits.expect_err("the end of the store is no change");
}

#[tokio::test(start_paused = true)]
async fn a_peer_is_rejected_once_its_certificate_has_expired() {
    let now = Timestamp::now();
    let test_ca = TestCa::at(now - days(1)).later(now - days(1) + SignedDuration::from_secs(2));
    let issued = ca::issue_agent(test_ca.dir.path(), "edge-1", None, 1, test_ca.now);
    // The second one isn't needed, and has expired long ago.
    let other = TestCa::at(now - days(4000));
    let files = [issued.expect("issued").files, other.agent("edge-1")];
    let chain = files.map(|files| first_certificate(&files.cert));
    let test_ca = test_ca.later(now);
    let (_store, mut receiver) = CertificateStore::open(test_ca.gateway(), Role::Gateway);
    let error = receiver.peer_rejected(&chain, Role::Agent).await;

    assert_has(
        &error.to_string(),
        "invalid peer certificate: certificate expired",
    );
    assert!(
        Timestamp::now() > now + SignedDuration::from_secs(1),
        "not before"
    );
}

#[test]
fn the_state_reports_failed_requests_in_the_place_of_a_warning_about_the_expiration() {
    let (_test_ca, _files, mut fixture) = valid_store();
    fixture.store.expect_renewal();
    fixture.check(fixed_time() + days(336));
    assert_eq!(fixture.warnings(), Vec::<String>::new());

    let requests = watch::Sender::new(RequestState {
        renew_at: Some(fixed_time() + days(300)),
        ..RequestState::default()
    });
    fixture.receiver.add_requests(requests.subscribe());
    let state = fixture.receiver.state();
    let validity = state.validity().unwrap_or_default();
    assert!(
        validity.starts_with("issued by O=culvert, CN=culvert CA "),
        "{validity}"
    );
    assert_has(
        &validity,
        ", expires on 2027-03-01T12:00:00Z, is renewed on 2026-12-26T12:00:00Z",
    );
    assert_eq!(state.request_problem(), None);

    requests.send_modify(|state| {
        state.problem = Some("connection refused".to_owned());
        state.failing_since = Some(fixed_time());
    });
    assert_eq!(
        fixture.receiver.state().request_problem().as_deref(),
        Some("no new certificate since 2026-03-01T12:00:00Z: connection refused")
    );
}

#[test]
fn a_certificate_and_its_key_may_be_in_one_file_that_a_link_replaces() {
    let test_ca = TestCa::at(fixed_time());
    let directory = tempfile::tempdir().expect("a directory");
    let link = directory.path().join("..data");
    // A kubelet replaces the files of a projected volume by a link to another directory.
    let publish = |version: &str, days: u32| {
        let issued = ca::issue_agent(test_ca.dir.path(), "edge-1", None, days, fixed_time());
        let files = issued.expect("issued").files;
        let [cert, key] = [&files.cert, &files.key].map(|path| fs::read(path).expect("read"));
        let next = directory.path().join(version);
        fs::create_dir(&next).expect("created");
        fs::write(next.join("bundle.pem"), [key, cert].concat()).expect("written");
        let draft = directory.path().join("..data_tmp");
        std::os::unix::fs::symlink(&next, &draft).expect("linked");
        fs::rename(&draft, &link).expect("replaced");
    };
    publish("first", 10);
    let files = IdentityFiles {
        ca: test_ca.path("ca.pem"),
        cert: link.join("bundle.pem"),
        key: link.join("bundle.pem"),
    };
    let mut fixture = StoreFixture::open(&files, Role::Agent, fixed_time());
    assert_eq!(fixture.problem(), None);
    assert_eq!(fixture.name().as_deref(), Some("edge-1"));

    publish("second", 20);
    fixture.check(fixed_time());

    let current = fixture.receiver.current().expect("in use");
    assert_eq!(current.expires, fixed_time() + days(20));
}
