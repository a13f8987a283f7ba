//! Helpers for testing the HTTP endpoints.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{NodeSetup, NodeViews, TunnelView};
use crate::{
    bpf::AttachmentView,
    reconcile::{PortCounterList, ReconcileStats},
    source::SourceReport,
};

/// A timeout that is longer than the interval between two attempts to bind a port that is in use.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);

/// A ready daemon that only serves HTTP endpoints.
pub(super) struct Daemon {
    pub(super) stats: watch::Sender<ReconcileStats>,
    pub(super) views: Arc<NodeViews>,
    pub(super) drain: watch::Sender<bool>,
    pub(super) tasks: JoinSet<()>,
}

impl Daemon {
    pub(super) fn new() -> Self {
        let (stats, receiver) = watch::channel(ready_stats());
        Self {
            stats,
            views: Arc::new(views(receiver)),
            drain: watch::Sender::new(false),
            tasks: JoinSet::new(),
        }
    }
}

/// Returns the views of a ready daemon that has no objects.
pub(super) fn views(stats: watch::Receiver<ReconcileStats>) -> NodeViews {
    let maps = [
        ("frontends", 10),
        ("slots", 20),
        ("backends", 30),
        ("sourceRanges", 40),
    ];
    let setup = NodeSetup {
        maps: maps.map(|(size, room)| (size.to_owned(), room)).into(),
        ..NodeSetup::default()
    };
    NodeViews {
        setup,
        config: serde_json::json!({ "culvert.dev": { "mode": "ebpf" } }),
        starting: watch::channel(None).1,
        stopping: watch::channel(None).1,
        start_times: watch::Sender::default().subscribe(),
        stats,
        heartbeat: watch::Sender::default().subscribe(),
        kernel_log: watch::channel(None).1,
        packets: watch::Sender::default().subscribe(),
        flows: watch::Sender::default().subscribe(),
        list_flows: Box::new(|_| Box::new(std::iter::empty())),
        explain: Box::new(|_| Box::pin(async { Err("nothing to explain".to_owned()) })),
        services: Box::new(|_| Box::new(std::iter::empty())),
        port_counts: Box::new(PortCounterList::default),
        attachment: watch::channel(AttachmentView {
            in_effect: Some(9),
            ..AttachmentView::default()
        })
        .1,
        network: watch::Sender::default().subscribe(),
        sockets: watch::Sender::default().subscribe(),
        tunnel: Box::new(TunnelView::default),
        end_sessions: Box::new(|_| 0),
        source_report: Box::new(SourceReport::default),
        kernel_counters: Box::new(Vec::new),
        open_connections: Box::new(|| 0),
        unbound_ports: watch::Sender::new(BTreeMap::new()),
        health_checks: watch::Sender::default(),
        health_responses: watch::Sender::default(),
    }
}

/// Returns the statistics of a ready daemon.
pub(super) fn ready_stats() -> ReconcileStats {
    ReconcileStats {
        synced: true,
        node_eligible: true,
        node_known: true,
        ..ReconcileStats::default()
    }
}

pub(super) const LOOPBACKS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];
pub(super) const WILDCARDS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
];

/// Finds a port that is free on both loopback addresses.
pub(super) async fn free_port() -> u16 {
    loop {
        let v4 = TcpListener::bind((LOOPBACKS[0], 0)).await.expect("a port");
        let port = v4.local_addr().expect("an address").port();
        if TcpListener::bind((LOOPBACKS[1], port)).await.is_ok() {
            return port;
        }
    }
}

/// Sends a request and returns the response, or `None` if nothing listens on the address.
pub(super) async fn send(request: &str, address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let text = format!("{request} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut response = String::new();
    stream
        .read_to_string(&mut response)
        .await
        .expect("a response");
    Some(response)
}

/// Repeats a request until `is_wanted` accepts the response, which is `None` while nothing listens on the
/// address.
pub(super) async fn request_until(
    request: &str,
    address: SocketAddr,
    is_wanted: impl Fn(Option<&str>) -> bool + Send + Sync,
) -> Option<String> {
    let mut last = None;
    let all = async {
        loop {
            last = send(request, address).await;
            if is_wanted(last.as_deref()) {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let in_time = timeout(TIMEOUT, all).await;
    assert!(in_time.is_ok(), "{request} at {address}: {last:?}");
    last
}
