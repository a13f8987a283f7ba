use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use http_body_util::BodyExt as _;
use tokio::sync::watch;

use super::*;
use crate::{
    admin::{
        fixture::{self, Daemon, LOOPBACKS, WILDCARDS, free_port, ready_stats},
        serve_tcp,
    },
    reconcile::ReconcileStats,
};

/// A daemon that serves one listener's paths on a TCP port.
struct Served {
    port: u16,
    daemon: Daemon,
}

/// Serves a listener's paths on a free port of the given address.
async fn served(listener: NodeListener, ip: IpAddr) -> Served {
    let port = free_port().await;
    let mut daemon = Daemon::new();
    let waiting = daemon.views.unbound_ports.clone();
    let routes = NodeRoutes::new(listener, Arc::clone(&daemon.views));
    let (address, draining) = ((ip, port).into(), daemon.drain.subscribe());
    let serving = serve_tcp("test", address, routes, waiting, draining);
    daemon.tasks.spawn(serving);
    Served { port, daemon }
}

impl Served {
    /// Sends a GET request to the given address, and returns the head and body of the response.
    async fn get(&self, ip: IpAddr, path: &str) -> (String, String) {
        let (request, address) = (format!("GET {path}"), SocketAddr::new(ip, self.port));
        let response =
            fixture::request_until(&request, address, |response| response.is_some()).await;
        let response = response.expect("a response");
        let (head, body) = response.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), body.to_owned())
    }
}

#[tokio::test]
async fn the_admin_port_serves_proxy_mode_configz_and_a_plain_healthz() {
    let served = served(NodeListener::Admin, LOOPBACKS[0]).await;
    let plain = "Content-Type: text/plain; charset=utf-8";
    for (path, kind, body) in [
        ("/proxyMode", plain, "ebpf"),
        ("/healthz", plain, "ok"),
        (
            "/configz",
            "Content-Type: application/json",
            r#"{"culvert.dev":{"mode":"ebpf"}}"#,
        ),
    ] {
        let (head, found) = served.get(LOOPBACKS[0], path).await;

        assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
        assert!(head.contains(kind), "{path}: {head}");
        assert!(head.contains("X-Content-Type-Options: nosniff"), "{head}");
        assert_eq!(found, body);
    }
    assert!(served.daemon.views.health_responses.borrow().is_empty());
    let (head, _) = served.get(LOOPBACKS[0], "/livez").await;
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
}

#[tokio::test]
async fn health_responses_are_counted_by_path_and_code() {
    let served = served(NodeListener::Healthz, LOOPBACKS[1]).await;
    let head = async |path: &str| served.get(LOOPBACKS[1], path).await.0;
    let stats = &served.daemon.stats;

    assert!(head("/healthz").await.starts_with("HTTP/1.1 200"));
    stats.send_modify(|stats| stats.node_eligible = false);
    assert!(head("/healthz").await.starts_with("HTTP/1.1 503"));
    assert!(head("/livez").await.starts_with("HTTP/1.1 200"));
    stats.send_modify(|stats| stats.synced = false);
    assert!(head("/livez").await.starts_with("HTTP/1.1 503"));
    assert!(head("/proxyMode").await.starts_with("HTTP/1.1 404"));

    let counts = served.daemon.views.health_responses.borrow().clone();
    let once = [
        ("/healthz", 200),
        ("/healthz", 503),
        ("/livez", 200),
        ("/livez", 503),
    ];
    assert_eq!(counts, once.map(|response| (response, 1)).into());
}

#[tokio::test]
async fn the_unspecified_address_of_either_family_listens_on_both() {
    for ip in WILDCARDS {
        let served = served(NodeListener::Healthz, ip).await;
        for ip in LOOPBACKS {
            let (head, _) = served.get(ip, "/healthz").await;
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        }
    }
    for (ip, other) in [(LOOPBACKS[0], LOOPBACKS[1]), (LOOPBACKS[1], LOOPBACKS[0])] {
        let served = served(NodeListener::Healthz, ip).await;
        served.get(ip, "/healthz").await;
        let other = SocketAddr::new(other, served.port);
        assert!(fixture::send("GET /healthz", other).await.is_none());
    }
}

/// Returns a daemon's views; `starting` is its current startup step, if any.
fn views(starting: Option<&str>, stats: ReconcileStats) -> NodeViews {
    NodeViews {
        starting: watch::channel(starting.map(str::to_owned)).1,
        ..fixture::views(watch::channel(stats).1)
    }
}

fn node(views: NodeViews) -> NodeRoutes {
    NodeRoutes::new(NodeListener::Socket, Arc::new(views))
}

async fn get(node: &NodeRoutes, path: &str) -> (u16, String) {
    let response = node.respond(path, "").await.expect("a path");
    let code = response.status().as_u16();
    let body = response.into_body().collect().await.expect("a body");
    (code, String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

#[tokio::test]
async fn readyz_status_and_metrics_report_the_same_readiness() {
    let stale = ReconcileStats {
        stale: true,
        ..ready_stats()
    };
    let taken = views(None, ready_stats());
    let port = ("admin".to_owned(), "in use".to_owned());
    taken.unbound_ports.send_replace([port].into());
    for (views, wanted) in [
        (views(None, ready_stats()), true),
        (views(Some("waiting"), ready_stats()), false),
        (views(None, stale), false),
        (taken, false),
    ] {
        let node = node(views);
        let (code, readyz) = get(&node, "/readyz").await;
        assert_eq!(code, if wanted { 200 } else { 503 }, "{readyz}");
        let (_, status) = get(&node, "/status").await;
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let readyz: serde_json::Value = serde_json::from_str(&readyz).expect("JSON");
        assert_eq!(status["ready"], wanted);
        assert_eq!(status["notReady"], readyz["reasons"][0]);
        let (_, metrics) = get(&node, "/metrics").await;
        let metric = format!("\nculvert_ready {}.0\n", u8::from(wanted));
        assert!(metrics.contains(&metric), "{metrics}");
    }
}

#[tokio::test(start_paused = true)]
async fn requests_before_the_first_list_get_a_response_at_once() {
    let node = node(views(
        Some("waiting for the sources"),
        ReconcileStats::default(),
    ));
    let began = tokio::time::Instant::now();

    let services = get(&node, "/services").await;
    let (code, metrics) = get(&node, "/metrics").await;

    assert_eq!(
        services,
        (503, "not ready: waiting for the sources\n".to_owned())
    );
    assert_eq!(code, 200);
    assert!(metrics.contains("culvert_ready 0"), "{metrics}");
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[test]
fn only_the_admin_socket_ends_sessions() {
    let routes = |listener| {
        let views = NodeViews {
            end_sessions: Box::new(|node| if node == "edge-7" { 2 } else { 0 }),
            ..views(None, ready_stats())
        };
        NodeRoutes::new(listener, Arc::new(views))
    };
    let socket = routes(NodeListener::Socket);

    assert!(socket.post(END_SESSIONS_PATH, "node=edge-7").is_some());
    assert!(socket.post(END_SESSIONS_PATH, "name=edge-7").is_none());
    assert!(socket.post("/status", "node=edge-7").is_none());
    for listener in [NodeListener::Admin, NodeListener::Healthz] {
        let response = routes(listener).post(END_SESSIONS_PATH, "node=edge-7");
        assert!(response.is_none(), "{}", listener.name());
    }
}
