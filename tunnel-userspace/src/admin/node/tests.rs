use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use http_body_util::BodyExt as _;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::*;
use crate::{
    admin::{
        fixture::{self, LOOPBACKS, free_port, good},
        serve_port,
    },
    reconcile::Stats,
};

/// A port that is served.
struct Served {
    port: u16,
    stats: watch::Sender<Stats>,
    views: Arc<Views>,
    _drain: watch::Sender<bool>,
    _task: JoinSet<()>,
}

/// Serves a free port of an address.
async fn served(endpoint: Endpoint, ip: IpAddr) -> Served {
    let port = free_port().await;
    let (stats, shown) = watch::channel(good());
    let (drain, draining) = watch::channel(false);
    let views = Arc::new(fixture::views(shown));
    let address = SocketAddr::new(ip, port);
    let mut task = JoinSet::new();
    let waiting = views.listening.clone();
    let routes = Node {
        endpoint,
        views: Arc::clone(&views),
    };
    task.spawn(serve_port("test", address, routes, waiting, draining));
    Served {
        port,
        stats,
        views,
        _drain: drain,
        _task: task,
    }
}

impl Served {
    /// What is answered at an address: head and body; nothing if nobody listens.
    async fn ask(&self, ip: IpAddr, path: &str) -> Option<(String, String)> {
        let request = format!("GET {path}");
        let answer = fixture::ask(&request, (ip, self.port).into()).await?;
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        Some((head.to_lowercase(), body.to_owned()))
    }

    async fn until_asked(&self, ip: IpAddr, path: &str) -> (String, String) {
        let asked = async {
            loop {
                if let Some(answer) = self.ask(ip, path).await {
                    return answer;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let answer = timeout(Duration::from_secs(10), asked).await;
        answer.expect("nobody listens")
    }
}

#[tokio::test]
async fn beside_the_metrics_are_the_mode_the_config_and_a_plain_health() {
    let served = served(Endpoint::Admin, LOOPBACKS[0]).await;
    let plain = "content-type: text/plain; charset=utf-8";
    for (path, kind, body) in [
        ("/proxyMode", plain, "ebpf"),
        ("/healthz", plain, "ok"),
        (
            "/configz",
            "content-type: application/json",
            r#"{"culvert.dev":{"mode":"ebpf"}}"#,
        ),
    ] {
        let (head, found) = served.until_asked(LOOPBACKS[0], path).await;

        assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
        assert!(head.contains(kind), "{path}: {head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
        assert_eq!(found, body);
    }
    assert!(served.views.answers.borrow().is_empty());
    let (head, _) = served.until_asked(LOOPBACKS[0], "/livez").await;
    assert!(head.starts_with("http/1.1 404"), "{head}");
}

#[tokio::test]
async fn answers_about_health_are_counted_by_their_code() {
    let served = served(Endpoint::Healthz, LOOPBACKS[1]).await;
    let head = async |path: &str| served.until_asked(LOOPBACKS[1], path).await.0;

    assert!(head("/healthz").await.starts_with("http/1.1 200"));
    served
        .stats
        .send_modify(|stats| stats.node_eligible = false);
    assert!(head("/healthz").await.starts_with("http/1.1 503"));
    assert!(head("/livez").await.starts_with("http/1.1 200"));
    served.stats.send_modify(|stats| stats.synced = false);
    assert!(head("/livez").await.starts_with("http/1.1 503"));
    assert!(head("/proxyMode").await.starts_with("http/1.1 404"));

    let counts = served.views.answers.borrow().clone();
    let once = [
        ("/healthz", 200),
        ("/healthz", 503),
        ("/livez", 200),
        ("/livez", 503),
    ];
    assert_eq!(counts, once.map(|answer| (answer, 1)).into());
}

#[tokio::test]
async fn the_unspecified_address_of_either_family_stands_for_both() {
    for ip in [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ] {
        let served = served(Endpoint::Healthz, ip).await;
        for ip in LOOPBACKS {
            let (head, _) = served.until_asked(ip, "/healthz").await;
            assert!(head.starts_with("http/1.1 200"), "{head}");
        }
    }
    for (ip, other) in [(LOOPBACKS[0], LOOPBACKS[1]), (LOOPBACKS[1], LOOPBACKS[0])] {
        let served = served(Endpoint::Healthz, ip).await;
        served.until_asked(ip, "/healthz").await;
        assert!(served.ask(other, "/healthz").await.is_none());
    }
}

/// The views of a daemon at this point of its start.
fn views(starting: Option<&str>, stats: Stats) -> Views {
    Views {
        starting: watch::channel(starting.map(str::to_owned)).1,
        ..fixture::views(watch::channel(stats).1)
    }
}

fn node(views: Views) -> Node {
    Node {
        endpoint: Endpoint::Socket,
        views: Arc::new(views),
    }
}

async fn asked(node: &Node, path: &str) -> (u16, String) {
    let answer = node.answer(path, "").await.expect("a path");
    let code = answer.status().as_u16();
    let body = answer.into_body().collect().await.expect("a body");
    (code, String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

#[tokio::test]
async fn readiness_is_one_answer_wherever_it_is_asked_for() {
    let stale = Stats {
        stale: true,
        ..good()
    };
    let taken = views(None, good());
    let port = ("admin".to_owned(), "in use".to_owned());
    taken.listening.send_replace([port].into());
    for (views, wanted) in [
        (views(None, good()), true),
        (views(Some("waiting"), good()), false),
        (views(None, stale), false),
        (taken, false),
    ] {
        let node = node(views);
        let (code, readyz) = asked(&node, "/readyz").await;
        assert_eq!(code, if wanted { 200 } else { 503 }, "{readyz}");
        let (_, status) = asked(&node, "/status").await;
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let readyz: serde_json::Value = serde_json::from_str(&readyz).expect("JSON");
        assert_eq!(status["ready"], wanted);
        assert_eq!(status["notReady"], readyz["reasons"][0]);
        let (_, metrics) = asked(&node, "/metrics").await;
        let metric = format!("\nculvert_ready {}.0\n", u8::from(wanted));
        assert!(metrics.contains(&metric), "{metrics}");
    }
}

#[tokio::test(start_paused = true)]
async fn before_the_first_list_nobody_is_kept_waiting() {
    let node = node(views(Some("waiting for the sources"), Stats::default()));
    let began = tokio::time::Instant::now();

    let services = asked(&node, "/services").await;
    let (code, metrics) = asked(&node, "/metrics").await;

    assert_eq!(
        services,
        (503, "not ready: waiting for the sources\n".to_owned())
    );
    assert_eq!(code, 200);
    assert!(metrics.contains("culvert_ready 0"), "{metrics}");
    assert_eq!(began.elapsed(), Duration::ZERO);
}
