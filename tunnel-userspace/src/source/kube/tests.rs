//! Tests with a scripted API server on loopback.

mod access;
mod faults;
mod owners;
mod server;

use server::{Asked, Reply, Script, Server, list_of_one, listed, status, watched};

use super::*;
use crate::source::{
    Store,
    tests::{Followed, PATIENCE},
};

/// The limits for misbehaving servers, in tests that reach them.
const A_LITTLE: Duration = Duration::from_millis(500);

/// The settings of a source with servers on loopback, and with short limits.
struct Setup {
    limits: Limits,
    settings: Settings,
    scope: Scope,
    folder: tempfile::TempDir,
}

impl Setup {
    fn of(servers: &[&Server]) -> Self {
        Self::within(tempfile::tempdir().expect("a folder"), servers)
    }

    /// Creates the settings for a folder. Writes a kubeconfig unless the folder has one.
    fn within(folder: tempfile::TempDir, servers: &[&Server]) -> Self {
        let kubeconfig = folder.path().join("kubeconfig");
        if !kubeconfig.exists() {
            std::fs::write(&kubeconfig, server::kubeconfig(servers[0])).expect("written");
        }
        Self {
            limits: LIMITS,
            settings: Settings {
                kubeconfig: Some(kubeconfig),
                api_servers: servers.iter().map(|it| it.named()).collect(),
                connect_timeout: Duration::from_secs(2),
                watch_timeout: Duration::from_secs(60),
                max_backoff: Duration::from_millis(300),
                page_size: 2,
                initial_sync_timeout: PATIENCE,
                snapshot_interval: Duration::from_millis(10),
                ..Settings::default()
            },
            scope: Scope {
                node: "node-a".to_owned(),
                snapshot: folder.path().join("objects"),
                ..Scope::default()
            },
            folder,
        }
    }

    async fn start(self) -> Followed {
        let mut store = Store::default();
        let source = start_within(self.limits, self.settings, self.scope, store.overlay()).await;
        let source = source.expect("a source");
        let report = source.report();
        Followed::new(self.folder, store, report, |stop| source.run(stop))
    }
}

async fn follow(servers: &[&Server]) -> Followed {
    Setup::of(servers).start().await
}

/// Starts a source with this value for all limits for misbehaving servers.
async fn follow_within(limit: Duration, servers: &[&Server]) -> Followed {
    let mut setup = Setup::of(servers);
    setup.limits = Limits {
        silence: limit,
        lag: limit,
        probe: limit,
        overtime: limit,
    };
    setup.start().await
}

fn is_streamed(asked: &Asked) -> bool {
    asked.query.contains_key("sendInitialEvents")
}

fn is_watch(asked: &Asked) -> bool {
    asked.query.contains_key("watch")
}

#[tokio::test]
async fn a_streamed_list_is_followed_by_what_changes() {
    let server = Server::start(Script::new(|asked| {
        assert!(is_streamed(asked), "{asked:?}");
        Reply::Held(vec![
            watched("ADDED", "a", "10.0.0.1", 5),
            watched("ADDED", "b", "10.0.0.2", 6),
            server::end_of_list(7),
            watched("MODIFIED", "a", "10.0.0.3", 8),
            watched("DELETED", "b", "10.0.0.2", 9),
        ])
    }));
    let mut followed = follow(&[&server]).await;

    let first = followed.take().await;
    assert!(first.synced && first.whole);
    followed.until("a=10.0.0.3").await;

    let asked = server.asked("/api/v1/services");
    assert_eq!(asked[0].query["fieldSelector"], "spec.clusterIP!=None");
    assert_eq!(
        asked[0].query["labelSelector"],
        "!service.kubernetes.io/service-proxy-name"
    );
    let slices = server.asked("/apis/discovery.k8s.io/v1/endpointslices");
    assert_eq!(
        slices[0].query["labelSelector"],
        "!service.kubernetes.io/headless"
    );
    let nodes = server.asked("/api/v1/nodes");
    assert_eq!(nodes[0].query["fieldSelector"], "metadata.name=node-a");
}

#[tokio::test]
async fn a_server_that_refuses_or_fails_to_stream_a_list_is_read_in_pages() {
    let refusals: [fn() -> Reply; 2] = [
        || status(422, "sendInitialEvents is forbidden for watch"),
        || Reply::Closed(vec![server::failed(500, "a storage feature is disabled")]),
    ];
    for refusal in refusals {
        let server = Server::start(Script::new(move |asked| {
            if is_streamed(asked) {
                return refusal();
            }
            if is_watch(asked) {
                return Reply::Held(vec![watched("ADDED", "d", "10.0.0.4", 9)]);
            }
            match asked.query.get("continue").map(String::as_str) {
                None => listed(&[("a", "10.0.0.1"), ("b", "10.0.0.2")], 7, Some("next")),
                Some(_) => listed(&[("c", "10.0.0.3")], 7, None),
            }
        }));

        let all = "a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 d=10.0.0.4";
        follow(&[&server]).await.until(all).await;
    }
}

#[tokio::test]
async fn a_watch_that_ends_goes_on_where_it_was_without_a_new_list() {
    let server = Server::start(Script::new(|asked| {
        if is_streamed(asked) {
            return Reply::Closed(list_of_one("a", "10.0.0.1", 5, 7));
        }
        assert_eq!(asked.query["resourceVersion"], "7");
        Reply::Held(vec![watched("ADDED", "b", "10.0.0.2", 8)])
    }));

    let both = "a=10.0.0.1 b=10.0.0.2";
    follow(&[&server]).await.until(both).await;
}

#[tokio::test]
async fn a_version_that_is_too_old_leads_to_a_new_list() {
    let server = Server::start(Script::counting(|asked, times| {
        if is_streamed(asked) && times == 0 {
            return Reply::Closed(vec![
                watched("ADDED", "a", "10.0.0.1", 5),
                server::end_of_list(7),
                server::failed(410, "Expired"),
            ]);
        }
        if is_streamed(asked) {
            return Reply::Held(list_of_one("b", "10.0.0.2", 50, 51));
        }
        listed(&[], 51, None)
    }));

    follow(&[&server]).await.until("b=10.0.0.2").await;
}

#[tokio::test]
async fn a_server_that_comes_back_with_older_data_is_listed_anew() {
    let server = Server::start(Script::counting(|asked, times| {
        if is_streamed(asked) && times == 0 {
            return Reply::Closed(list_of_one("a", "10.0.0.1", 500, 700));
        }
        if is_streamed(asked) {
            return Reply::Held(list_of_one("old", "10.0.0.2", 5, 7));
        }
        if is_watch(asked) {
            return status(500, "etcd is being restored");
        }
        listed(&[("old", "10.0.0.2")], 7, None)
    }));
    let mut followed = follow_within(A_LITTLE, &[&server]).await;
    followed.until("a=10.0.0.1").await;
    let before = Instant::now();

    followed.until("old=10.0.0.2").await;

    // The older list is accepted after the limit, and not before.
    assert!(before.elapsed() >= A_LITTLE);
}

#[tokio::test]
async fn a_version_that_the_server_doesnt_have_yet_leads_to_a_new_list() {
    let server = Server::start(Script::counting(|asked, times| {
        if is_streamed(asked) && times == 0 {
            return Reply::Closed(list_of_one("a", "10.0.0.1", 500, 700));
        }
        if is_streamed(asked) {
            return Reply::Held(vec![server::end_of_list(7)]);
        }
        status(504, "Too large resource version: 700, current: 7")
    }));
    let mut followed = follow_within(A_LITTLE, &[&server]).await;
    followed.until("a=10.0.0.1").await;

    followed.until("").await;
}

#[tokio::test]
async fn where_one_server_fails_the_next_is_asked() {
    let bad = Server::start(Script::all(|_| status(503, "starting")));
    let good = Server::start(Script::new(|_| {
        Reply::Held(list_of_one("a", "10.0.0.1", 5, 7))
    }));
    let mut followed = follow(&[&bad, &good]).await;

    followed.until("a=10.0.0.1").await;

    let asked = followed.report.borrow().server.clone();
    let asked = asked.expect("a server").address;
    assert_eq!(asked, good.uri().to_string());
}

#[tokio::test]
async fn an_object_of_another_shape_stops_no_other() {
    let server = Server::start(Script::new(|_| {
        let bad = watched("ADDED", "bad", "10.0.0.9", 5).replace("\"port\":80", "\"port\":\"x\"");
        Reply::Held(vec![
            bad,
            watched("ADDED", "a", "10.0.0.1", 6),
            server::end_of_list(7),
        ])
    }));
    let mut followed = follow(&[&server]).await;

    let update = followed.until("a=10.0.0.1").await;

    assert!(!update.expect("an update").whole);
    let problems = followed.report.borrow().problems.clone();
    let [problem] = &*problems else {
        panic!("{problems:?}");
    };
    let field = "Service default/bad: spec.ports[0].port";
    assert!(problem.to_string().contains(field), "{problem}");
}

#[tokio::test]
async fn a_kind_that_the_server_doesnt_have_is_done_without() {
    let server = Server::start(Script::all(|asked| {
        if asked.path.ends_with("servicecidrs") {
            return status(404, "the server could not find the requested resource");
        }
        Reply::Held(vec![server::end_of_list(7)])
    }));
    let mut followed = follow(&[&server]).await;

    assert!(followed.take().await.whole);
}

#[tokio::test]
async fn what_was_known_is_used_while_no_server_answers_and_given_up_when_one_does() {
    let server = Server::start(Script::new(|_| {
        Reply::Held(vec![
            watched("ADDED", "a", "10.0.0.1", 5),
            watched("ADDED", "b", "10.0.0.2", 6),
            server::end_of_list(7),
        ])
    }));
    let mut followed = follow(&[&server]).await;
    followed.until("a=10.0.0.1 b=10.0.0.2").await;
    let folder = followed.stop().await;

    // The server refuses connects until it is opened.
    let server = Server::reserved();
    let mut setup = Setup::within(folder, &[&server]);
    setup.settings.initial_sync_timeout = Duration::from_millis(50);
    let mut followed = setup.start().await;
    let update = followed.take().await;
    assert_eq!(followed.words(), "a=10.0.0.1 b=10.0.0.2");
    assert!(update.synced && !update.whole && update.stale);
    let stale = |followed: &Followed| followed.report.borrow().server.clone()?.stale;
    assert!(stale(&followed).is_some());

    server.open(Script::new(|_| {
        Reply::Held(list_of_one("b", "10.0.0.2", 6, 9))
    }));
    loop {
        let update = followed.take().await;
        assert_eq!(update.stale, !update.whole);
        if update.whole {
            break;
        }
    }

    assert_eq!(followed.words(), "b=10.0.0.2");
    assert_eq!(stale(&followed), None);
}
