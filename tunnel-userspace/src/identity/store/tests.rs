use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use super::{
    super::{
        ca,
        tests::{Site, assert_has, both, copy, days, then},
    },
    *,
};

/// A store with a simulated clock, and its receiver.
struct Looked {
    store: Store,
    receiver: Receiver,
}

impl Looked {
    fn open(files: &Files, role: Role, now: Timestamp) -> Self {
        let (store, receiver) = Store::open_at(files.clone(), role, now);
        Self { store, receiver }
    }

    fn look(&mut self, now: Timestamp) {
        let found = Contents::read(&self.store.files);
        self.store.take(found, now);
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

/// Returns a CA, valid files that it issued, and a store of them.
fn good() -> (Site, Files, Looked) {
    let site = Site::at(then());
    let files = site.agent("edge-1");
    let looked = Looked::open(&files, Role::Agent, then());
    (site, files, looked)
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("changed");
}

#[test]
fn good_files_are_in_use_at_once() {
    let (_site, _files, looked) = good();

    let state = looked.receiver.state();

    assert_eq!(looked.name().as_deref(), Some("edge-1"));
    assert_eq!(state.name.as_deref(), Some("edge-1"));
    assert_eq!(state.expires, Some(then() + days(365)));
    assert_eq!(state.ca_expires, Some(then() + days(3650)));
    assert_eq!((state.problem, state.warnings), (None, Vec::new()));
}

#[test]
fn missing_files_are_a_problem_at_once_and_in_use_as_soon_as_they_come() {
    let site = Site::at(then());
    let files = site.agent("edge-1");
    let aside = site.path("aside");
    fs::rename(&files.key, &aside).expect("moved");

    let mut looked = Looked::open(&files, Role::Agent, then());
    looked.assert_problem("key.pem: cannot be read: No such file");
    assert_eq!(looked.name(), None);

    fs::rename(&aside, &files.key).expect("moved");
    looked.look(then());
    assert_eq!(looked.problem(), None);
    assert_eq!(looked.name().as_deref(), Some("edge-1"));
}

#[test]
fn a_pair_that_is_replaced_comes_into_use_and_nothing_else_changes() {
    let (site, _files, mut looked) = good();
    let first = looked.receiver.current().expect("in use");
    looked.look(then());
    let still = looked.receiver.current().expect("in use");
    assert!(Arc::ptr_eq(&first, &still));

    ca::issue_agent(site.dir.path(), "edge-1", None, 30, then()).expect("issued again");
    looked.look(then());

    let second = looked.receiver.current().expect("in use");
    assert_eq!(second.expires, then() + days(30));
    assert_eq!(looked.receiver.state().expires, Some(then() + days(30)));
    // Sessions that began with the first certificate keep it.
    assert_eq!(first.expires, then() + days(365));
}

#[test]
fn a_bad_pair_leaves_the_old_in_use_and_the_second_look_tells_its_fault() {
    let (_site, files, mut looked) = good();
    let first = looked.receiver.current().expect("in use");
    let good = fs::read(&files.cert).expect("read");

    fs::write(&files.cert, "garbage").expect("written");
    looked.look(then());
    assert_eq!(looked.problem(), None, "it may be half written");
    looked.look(then());
    looked.assert_problem("cert.pem: contains no certificate");
    let still = looked.receiver.current().expect("in use");
    assert!(Arc::ptr_eq(&first, &still));
    assert_eq!(looked.receiver.state().expires, Some(then() + days(365)));

    fs::write(&files.cert, "").expect("written");
    looked.look(then());
    looked.look(then());
    looked.assert_problem("cert.pem: is empty");

    fs::write(&files.cert, good).expect("written");
    looked.look(then());
    assert_eq!(looked.problem(), None);
}

#[test]
fn a_key_and_certificate_that_are_replaced_one_after_the_other_are_no_problem() {
    let (site, files, mut looked) = good();
    let out = site.path("next");
    let next = ca::issue_agent(site.dir.path(), "edge-1", Some(&out), 30, then());
    let next = next.expect("issued").files;

    copy(&next.key, &files.key);
    looked.look(then());
    assert_eq!(looked.problem(), None, "the certificate may be on its way");
    assert_eq!(looked.receiver.state().expires, Some(then() + days(365)));
    copy(&next.cert, &files.cert);
    looked.look(then());

    assert_eq!(looked.problem(), None);
    assert_eq!(looked.receiver.state().expires, Some(then() + days(30)));
}

#[test]
fn a_certificate_is_warned_of_before_it_expires_and_a_problem_from_then_on() {
    let (_site, _files, mut looked) = good();

    looked.look(then() + days(334));
    assert_eq!(looked.warnings(), Vec::<String>::new());
    looked.look(then() + days(336));
    let warnings = looked.warnings();
    assert_eq!(warnings.len(), 1);
    assert!(
        warnings[0].ends_with("cert.pem: expires on 2027-03-01T12:00:00Z; issue a new certificate"),
        "{warnings:?}"
    );

    looked.look(then() + days(364));
    assert_eq!(looked.problem(), None);
    looked.look(then() + days(366));
    looked.assert_problem("cert.pem: expired on 2027-03-01T12:00:00Z");
    assert_eq!(looked.name().as_deref(), Some("edge-1"), "it stays in use");
}

#[test]
fn files_that_are_not_valid_yet_come_into_use_when_they_are() {
    let soon = Site::at(then()).later(then() + days(2));
    let mut looked = Looked::open(&soon.agent("edge-1"), Role::Agent, then());
    looked.assert_problem("is not valid before 2026-03-03T11:00:00Z");

    looked.look(then() + days(2));

    assert_eq!(looked.problem(), None);
    assert_eq!(looked.name().as_deref(), Some("edge-1"));
}

#[test]
fn an_authority_of_two_that_expires_is_trusted_no_more() {
    let (old, new) = (Site::at(then() - days(3640)), Site::at(then()));
    let files = new.agent("edge-1");
    fs::write(&files.ca, both(&old, &new)).expect("written");
    let mut looked = Looked::open(&files, Role::Agent, then());
    assert_eq!(looked.receiver.state().ca_expires, Some(then() + days(10)));

    looked.look(then() + days(11));

    assert_eq!(looked.problem(), None);
    assert_eq!(
        looked.receiver.state().ca_expires,
        Some(then() + days(3650))
    );
}

#[test]
fn a_key_that_others_can_use_is_warned_of_until_they_cannot() {
    let (_site, files, mut looked) = good();
    let start = format!("{}: users other than the owner", files.key.display());

    for mode in [0o644, 0o604, 0o620, 0o610, 0o602, 0o601] {
        chmod(&files.key, mode);
        looked.look(then());
        let warnings = looked.warnings();
        assert_eq!(warnings.len(), 1, "{mode:o}: {warnings:?}");
        assert!(warnings[0].starts_with(&start), "{mode:o}: {warnings:?}");
        assert_eq!(looked.problem(), None);
    }
    for mode in [0o600, 0o400, 0o640] {
        chmod(&files.key, mode);
        looked.look(then());
        assert_eq!(looked.warnings(), Vec::<String>::new(), "{mode:o}");
    }
}

#[test]
fn the_state_survives_its_trip_to_the_command_line() {
    let state = good().2.receiver.state();

    let text = serde_json::to_string(&state).expect("written");

    assert_eq!(serde_json::from_str::<CertificateState>(&text).expect("read"), state);
    assert_has(&text, r#""expires":"2027-03-01T12:00:00Z""#);
}

#[tokio::test(start_paused = true)]
async fn the_running_store_finds_what_was_replaced_and_stops_at_the_drain() {
    let site = Site::new();
    let files = site.agent("edge-1");
    let (store, mut receiver) = Store::open(files, Role::Agent);
    let (drain, draining) = watch::channel(false);
    let first = receiver.current().expect("in use").expires;
    let issuing = async {
        ca::issue_agent(site.dir.path(), "edge-1", None, 30, site.now).expect("issued again");
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
