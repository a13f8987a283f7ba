//! The flows, as `culvert flows`, the status and the metrics show them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tunnel_tests::wait;

use super::{
    CLIENT, REMOTE, pod_elsewhere, remote_server, route_to_node, serve_in, service,
    start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_DNS, NODE_HTTP, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, Vip, ensure_eq},
};

fn flows(scene: &Scene, arguments: &[&str]) -> Result<Vec<Value>> {
    let command = [&["flows", "--output", "json"], arguments].concat();
    let output = scene.node.culvert(&command)?.stdout;
    Ok(serde_json::from_str(&output)?)
}

fn text_of<'a>(flow: &'a Value, field: &str) -> &'a str {
    flow[field].as_str().unwrap_or_default()
}

#[test]
fn open_flows_are_listed_with_their_ends_and_state_and_counted() -> Result<()> {
    const CONNECTIONS: usize = 30;
    let scene = configured("")?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = Dialer::V4.connect(client, HOST, NODE_HTTP)?;
        open.push((stream, backend.tcp[0].accept()?));
    }
    let socket = Dialer::V6.udp_socket(client)?;
    socket.send_to(b"ask", Dialer::V6.address(HOST, NODE_DNS))?;
    backend.udp[1].recv_from(&mut [0; 16])?;

    let all = flows(&scene, &[])?;
    ensure_eq("flows", all.len(), CONNECTIONS + 1)?;
    for (stream, (_, seen)) in &open {
        let own = stream.local_addr()?.to_string();
        let flow = all.iter().find(|flow| text_of(flow, "client") == own);
        let flow = flow.with_context(|| format!("no flow of {own}: {all:?}"))?;
        ensure_eq(
            "frontend",
            text_of(flow, "frontend"),
            &*format!("{}:{NODE_HTTP}", HOST.v4),
        )?;
        ensure_eq("seen as", text_of(flow, "masquerade"), &*seen.to_string())?;
        ensure_eq("state", text_of(flow, "state"), "established")?;
        ensure!(
            text_of(flow, "service").starts_with("default/web"),
            "{flow}"
        );
    }
    let of_client = |ip: String| flows(&scene, &["--client", &ip]);
    ensure_eq("IPv6", of_client(CLIENT.v6.to_string())?.len(), 1)?;
    ensure_eq("IPv4", of_client(CLIENT.v4.to_string())?.len(), CONNECTIONS)?;
    ensure_eq(
        "web",
        flows(&scene, &["--service", "web"])?.len(),
        CONNECTIONS + 1,
    )?;
    ensure_eq("other", flows(&scene, &["--service", "other"])?.len(), 0)?;
    let table = scene.node.culvert(&["flows"])?.stdout;
    let (from, _) = &open[0];
    let from: SocketAddr = from.local_addr()?;
    ensure!(table.contains(&from.to_string()), "{table}");

    // The sweep counts them, and removes those that are over.
    drop(open);
    wait::until(3 * CHANGE_TIMEOUT, || {
        let Ok(status) = scene.node.status() else {
            return false;
        };
        let states = &status["flows"]["states"];
        states["closed"] == 0 && states["established"] == 0 && states["closing"] == CONNECTIONS
    })
    .with_context(|| format!("{:?}", scene.node.status().map(|it| it["flows"].clone())))?;
    let metrics = scene.node.metrics()?;
    ensure!(
        metrics.contains("culvert_flows{state=\"closing\"} 30"),
        "{metrics}"
    );
    ensure!(
        metrics.contains("culvert_map_entries{map=\"flows\"} 9"),
        "{metrics}"
    );
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: many entries in the map; those of `under_load` are alike"]
fn twenty_thousand_flows_to_two_backends_are_answered_and_counted() -> Result<()> {
    /// The number of processes that are clients, since a process may have only so many files open.
    const CLIENTS: usize = 2;
    const EACH: usize = 10_000;
    let scene = configured("packets: { ports: 1024-29999 }")?;
    let node = &scene.node;
    route_to_node(&scene)?;
    let second = Vip {
        v4: Ipv4Addr::new(203, 0, 113, 18),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0x113, 1, 0, 0, 0, 2),
    };
    let (_remote, first) = remote_server(&scene, "first")?;
    let other = pod_elsewhere(&scene, "second", second)?;
    let servers = [first, serve_in(&scene, &other, "second")?];
    node.start()?;
    scene.program(service("Cluster").backends([REMOTE.ips(), second.ips()].concat()))?;

    let client = node.outside();
    let hold = || {
        let command = client.lab_command(&["load", "hold"])?;
        let to = Dialer::V4.address(HOST, NODE_HTTP);
        let command = command.option("--tcp", to).option("--each", EACH);
        command.option("--requests", 2).start()
    };
    let clients: Vec<_> = (0..CLIENTS).map(|_| hold()).collect::<Result<_>>()?;
    let answered = || -> Result<[u64; 2]> {
        let [one, other] = servers
            .each_ref()
            .map(|it| it.record().map(|it| it.total().answered));
        Ok([one?, other?])
    };
    let wanted = u64::try_from(2 * CLIENTS * EACH)?;
    let all_answered = || answered().is_ok_and(|it| it.iter().sum::<u64>() == wanted);
    let ended = || {
        let mut ended = None;
        for client in &clients {
            ended = ended.or(client.try_wait()?);
        }
        Ok(ended)
    };
    wait::until_ready(6 * CHANGE_TIMEOUT, ended, all_answered)
        .with_context(|| format!("answered: {:?}", answered()))?;
    ensure!(
        answered()?.into_iter().all(|it| it > 0),
        "one backend got nothing"
    );

    let port = format!(":{NODE_HTTP}");
    let command = ["ss", "-Htn", "state", "established", "dport", "=", &port];
    let sockets = client.run(&command)?.lines().count();
    ensure_eq("sockets", sockets, CLIENTS * EACH)?;
    ensure_eq("flows", flows(&scene, &[])?.len(), sockets)
}
