use std::{collections::BTreeMap, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
};

use super::{Setup, TunnelViews, Views};
use crate::{
    reconcile::{Counted, Stats},
    source::Report,
};

/// The views of a daemon that is ready and has read nothing.
pub(super) fn views(stats: watch::Receiver<Stats>) -> Views {
    let maps = [
        ("fronts", 10),
        ("slots", 20),
        ("backends", 30),
        ("sources", 40),
    ];
    let word = String::new;
    let setup = Setup {
        version: word(),
        pid: 1,
        node: word(),
        started: word(),
        cgroup: word(),
        pins: word(),
        layout: 1,
        refusing: word(),
        clients: word(),
        maps: maps.map(|(size, room)| (size.to_owned(), room)).into(),
    };
    Views {
        setup,
        config: serde_json::json!({ "culvert.dev": { "mode": "ebpf" } }),
        starting: watch::channel(None).1,
        start: watch::Sender::default().subscribe(),
        stats,
        kernel_log: watch::channel(None).1,
        service_metrics: 0,
        services: Box::new(|_| Vec::new()),
        counted: Box::new(|_| Counted::default()),
        network: watch::Sender::default().subscribe(),
        sockets: watch::Sender::default().subscribe(),
        tunnel: TunnelViews::default(),
        source: Box::new(Report::default),
        counters: Box::new(|| Ok(Vec::new())),
        connections: Box::new(|| 0),
        listening: watch::Sender::new(BTreeMap::new()),
        checks: watch::Sender::default(),
    }
}

/// Asks, and reads the whole answer; nothing if nobody listens.
pub(super) async fn ask(request: &str, address: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let text = format!("{request} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n");
    stream.write_all(text.as_bytes()).await.expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    Some(answer)
}
