//! The flows, as `culvert flows`, the status and the metrics show them.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tunnel_tests::wait;

use super::{CLIENT, start_with_remote_backend};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_DNS, NODE_HTTP, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, ensure_eq},
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
