//! Tests against a scripted API server on loopback.

mod access;
mod faults;
mod selections;
mod server;

use server::{
    ReceivedRequest, Script, ScriptedResponse, Server, error_status, list_of_one, list_page,
    service_line,
};

use super::*;
use crate::source::{
    Store,
    tests::{RunningSource, TIMEOUT},
};

/// A short time limit for misbehaving servers, for tests in which the limit is reached.
const SHORT_LIMIT: Duration = Duration::from_millis(500);

/// The settings and limits of a source whose servers are on loopback.
struct Setup {
    limits: Limits,
    settings: KubeSettings,
    scope: KubeScope,
    directory: tempfile::TempDir,
}

impl Setup {
    fn of(servers: &[&Server]) -> Self {
        Self::within(tempfile::tempdir().expect("a directory"), servers)
    }

    /// Creates a setup that uses the given directory. Writes a kubeconfig to it unless it already has one.
    fn within(directory: tempfile::TempDir, servers: &[&Server]) -> Self {
        let kubeconfig = directory.path().join("kubeconfig");
        if !kubeconfig.exists() {
            std::fs::write(&kubeconfig, server::kubeconfig(servers[0])).expect("written");
        }
        Self {
            limits: LIMITS,
            settings: KubeSettings {
                kubeconfig: Some(kubeconfig),
                api_servers: servers.iter().map(|it| it.api_server()).collect(),
                connect_timeout: Duration::from_secs(2),
                watch_timeout: Duration::from_secs(60),
                max_backoff: Duration::from_millis(300),
                page_size: 2,
                initial_sync_timeout: TIMEOUT,
                snapshot_interval: Duration::from_millis(10),
                ..KubeSettings::default()
            },
            scope: KubeScope {
                node: "node-a".to_owned(),
                snapshot: directory.path().join("objects"),
                ..KubeScope::default()
            },
            directory,
        }
    }

    async fn start(self) -> RunningSource {
        let mut store = Store::default();
        let source =
            start_with_limits(self.limits, self.settings, self.scope, store.overlay()).await;
        let source = source.expect("a source");
        let report = source.report();
        RunningSource::new(self.directory, store, report, |stop| source.run(stop))
    }
}

async fn start_source(servers: &[&Server]) -> RunningSource {
    Setup::of(servers).start().await
}

/// Starts a source with `limit` as the time limit for every kind of server misbehaviour.
async fn start_source_with_limits(limit: Duration, servers: &[&Server]) -> RunningSource {
    let mut setup = Setup::of(servers);
    setup.limits = Limits {
        max_silence: limit,
        max_lag: limit,
        probe_timeout: limit,
        watch_overtime: limit,
    };
    setup.start().await
}

fn is_streamed(request: &ReceivedRequest) -> bool {
    request.query.contains_key("sendInitialEvents")
}

fn is_watch(request: &ReceivedRequest) -> bool {
    request.query.contains_key("watch")
}

#[tokio::test]
async fn a_streamed_list_is_followed_by_its_changes() {
    let server = Server::start(Script::new(|request| {
        assert!(is_streamed(request), "{request:?}");
        ScriptedResponse::KeptOpen(vec![
            service_line("ADDED", "a", "10.0.0.1", 5),
            service_line("ADDED", "b", "10.0.0.2", 6),
            server::end_of_list(7),
            service_line("MODIFIED", "a", "10.0.0.3", 8),
            service_line("DELETED", "b", "10.0.0.2", 9),
        ])
    }));
    let mut source = start_source(&[&server]).await;

    let first = source.take().await;
    assert!(first.synced && first.complete);
    source.until("a=10.0.0.3").await;

    let services = server.requests("/api/v1/services");
    assert_eq!(services[0].query["fieldSelector"], "spec.clusterIP!=None");
    assert_eq!(
        services[0].query["labelSelector"],
        "!service.kubernetes.io/service-proxy-name"
    );
    let slices = server.requests("/apis/discovery.k8s.io/v1/endpointslices");
    assert_eq!(
        slices[0].query["labelSelector"],
        "!service.kubernetes.io/headless"
    );
    let nodes = server.requests("/api/v1/nodes");
    assert_eq!(nodes[0].query["fieldSelector"], "metadata.name=node-a");
}

#[tokio::test]
async fn lists_are_paged_if_the_server_can_not_stream_them() {
    let refusals: [fn() -> ScriptedResponse; 2] = [
        || error_status(422, "sendInitialEvents is forbidden for watch"),
        || {
            ScriptedResponse::Closed(vec![server::error_line(
                500,
                "a storage feature is disabled",
            )])
        },
    ];
    for refusal in refusals {
        let server = Server::start(Script::new(move |request| {
            if is_streamed(request) {
                return refusal();
            }
            if is_watch(request) {
                return ScriptedResponse::KeptOpen(vec![service_line("ADDED", "d", "10.0.0.4", 9)]);
            }
            match request.query.get("continue").map(String::as_str) {
                None => list_page(&[("a", "10.0.0.1"), ("b", "10.0.0.2")], 7, Some("next")),
                Some(_) => list_page(&[("c", "10.0.0.3")], 7, None),
            }
        }));

        let all = "a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 d=10.0.0.4";
        start_source(&[&server]).await.until(all).await;
    }
}

#[tokio::test]
async fn a_watch_that_ends_continues_without_a_new_list() {
    let server = Server::start(Script::new(|request| {
        if is_streamed(request) {
            return ScriptedResponse::Closed(list_of_one("a", "10.0.0.1", 5, 7));
        }
        assert_eq!(request.query["resourceVersion"], "7");
        ScriptedResponse::KeptOpen(vec![service_line("ADDED", "b", "10.0.0.2", 8)])
    }));

    let both = "a=10.0.0.1 b=10.0.0.2";
    start_source(&[&server]).await.until(both).await;
}

#[tokio::test]
async fn a_version_that_is_too_old_leads_to_a_new_list() {
    let server = Server::start(Script::counting(|request, times| {
        if is_streamed(request) && times == 0 {
            return ScriptedResponse::Closed(vec![
                service_line("ADDED", "a", "10.0.0.1", 5),
                server::end_of_list(7),
                server::error_line(410, "Expired"),
            ]);
        }
        if is_streamed(request) {
            return ScriptedResponse::KeptOpen(list_of_one("b", "10.0.0.2", 50, 51));
        }
        list_page(&[], 51, None)
    }));

    start_source(&[&server]).await.until("b=10.0.0.2").await;
}

#[tokio::test]
async fn a_server_that_returns_with_older_data_is_listed_again() {
    let server = Server::start(Script::counting(|request, times| {
        if is_streamed(request) && times == 0 {
            return ScriptedResponse::Closed(list_of_one("a", "10.0.0.1", 500, 700));
        }
        if is_streamed(request) {
            return ScriptedResponse::KeptOpen(list_of_one("old", "10.0.0.2", 5, 7));
        }
        if is_watch(request) {
            return error_status(500, "etcd is being restored");
        }
        list_page(&[("old", "10.0.0.2")], 7, None)
    }));
    let mut source = start_source_with_limits(SHORT_LIMIT, &[&server]).await;
    source.until("a=10.0.0.1").await;
    let before = Instant::now();

    source.until("old=10.0.0.2").await;

    // The older list is accepted once the limit has passed, and not before.
    assert!(before.elapsed() >= SHORT_LIMIT);
}

#[tokio::test]
async fn a_version_that_the_server_doesnt_have_yet_leads_to_a_new_list() {
    let server = Server::start(Script::counting(|request, times| {
        if is_streamed(request) && times == 0 {
            return ScriptedResponse::Closed(list_of_one("a", "10.0.0.1", 500, 700));
        }
        if is_streamed(request) {
            return ScriptedResponse::KeptOpen(vec![server::end_of_list(7)]);
        }
        error_status(504, "Too large resource version: 700, current: 7")
    }));
    let mut source = start_source_with_limits(SHORT_LIMIT, &[&server]).await;
    source.until("a=10.0.0.1").await;

    source.until("").await;
}

#[tokio::test]
async fn the_next_server_is_used_if_one_fails() {
    let bad = Server::start(Script::all(|_| error_status(503, "starting")));
    let good = Server::start(Script::new(|_| {
        ScriptedResponse::KeptOpen(list_of_one("a", "10.0.0.1", 5, 7))
    }));
    let mut source = start_source(&[&bad, &good]).await;

    source.until("a=10.0.0.1").await;

    let server = source.report.borrow().server.clone();
    let server = server.expect("a server").address;
    assert_eq!(server, good.uri().to_string());
}

#[tokio::test]
async fn an_object_with_a_field_of_the_wrong_type_does_not_affect_others() {
    let server = Server::start(Script::new(|_| {
        let bad =
            service_line("ADDED", "bad", "10.0.0.9", 5).replace("\"port\":80", "\"port\":\"x\"");
        ScriptedResponse::KeptOpen(vec![
            bad,
            service_line("ADDED", "a", "10.0.0.1", 6),
            server::end_of_list(7),
        ])
    }));
    let mut source = start_source(&[&server]).await;

    let update = source.until("a=10.0.0.1").await;

    assert!(!update.expect("an update").complete);
    let problems = source.report.borrow().problems.clone();
    let [problem] = &*problems else {
        panic!("{problems:?}");
    };
    let field = "Service default/bad: spec.ports[0].port";
    assert!(problem.to_string().contains(field), "{problem}");
}

#[tokio::test]
async fn a_kind_that_the_server_does_not_support_is_skipped() {
    let server = Server::start(Script::all(|request| {
        if request.path.ends_with("servicecidrs") {
            return error_status(404, "the server could not find the requested resource");
        }
        ScriptedResponse::KeptOpen(vec![server::end_of_list(7)])
    }));
    let mut source = start_source(&[&server]).await;

    assert!(source.take().await.complete);
}

#[tokio::test]
async fn the_last_known_state_is_used_until_a_server_responds() {
    let server = Server::start(Script::new(|_| {
        ScriptedResponse::KeptOpen(vec![
            service_line("ADDED", "a", "10.0.0.1", 5),
            service_line("ADDED", "b", "10.0.0.2", 6),
            server::end_of_list(7),
        ])
    }));
    let mut source = start_source(&[&server]).await;
    source.until("a=10.0.0.1 b=10.0.0.2").await;
    let directory = source.stop().await;

    // The server refuses connections until it is opened.
    let server = Server::reserved();
    let mut setup = Setup::within(directory, &[&server]);
    setup.settings.initial_sync_timeout = Duration::from_millis(50);
    let mut source = setup.start().await;
    let update = source.take().await;
    assert_eq!(source.describe(), "a=10.0.0.1 b=10.0.0.2");
    assert!(update.synced && !update.complete && update.stale);
    let stale = |source: &RunningSource| source.report.borrow().server.clone()?.stale;
    assert!(stale(&source).is_some());

    server.open(Script::new(|_| {
        ScriptedResponse::KeptOpen(list_of_one("b", "10.0.0.2", 6, 9))
    }));
    loop {
        let update = source.take().await;
        assert_eq!(update.stale, !update.complete);
        if update.complete {
            break;
        }
    }

    assert_eq!(source.describe(), "b=10.0.0.2");
    assert_eq!(stale(&source), None);
}
