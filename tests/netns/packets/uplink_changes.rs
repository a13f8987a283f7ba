//! An uplink that is renamed, or replaced by another link, while connections are open.

use std::{net::TcpStream, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    load::StopSignal,
    load_scale::LoadScale,
    node_network::{HOST_V4, HOST_V6, OUTSIDE_V4, OUTSIDE_V6},
    wait,
};

use super::{
    ADDRESSES, Backend, attached, connect_to_node_port, exchange_stream, exchange_within,
    expect_reached, route_to_node, start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, HOST, ensure_eq, run},
};

/// The number of open connections.
const OPEN: usize = 16;
/// The number of open connections over which data is exchanged all the time.
const BUSY: usize = 4;
/// The time limit for data to arrive, since the kernel waits longer before each retransmission.
const OUTAGE: Duration = Duration::from_secs(60);

/// Waits until the programs are attached to a link, and the status shows it as the only uplink.
fn until_followed(scene: &Scene, link: &str) -> Result<()> {
    let pins = || -> Result<bool> {
        let shown = run(scene.node.host(), &format!("ip -o link show dev {link}"))?;
        let (index, _) = shown.split_once(':').context("no index")?;
        let links = scene.node.bpffs().join("links");
        let has = |name: &str| links.join(format!("{name}-{index}")).exists();
        let status = scene.node.status()?["packets"]["uplinks"].take();
        Ok(has("in") && has("out") && status == serde_json::json!([link]))
    };
    wait::until(CHANGE_TIMEOUT, || pins().unwrap_or(false))
        .with_context(|| format!("{link} is not followed\n{}", scene.node.logs()))?;
    ensure_eq("programs", attached(scene)?, 2)
}

/// Gives the node's uplink its addresses and routes. The addresses may be there already.
fn configure(scene: &Scene, link: &str) -> Result<()> {
    let host = scene.node.host();
    run(host, &format!("ip link set {link} up"))?;
    run(host, &format!("ip addr replace {HOST_V4}/24 dev {link}"))?;
    run(
        host,
        &format!("ip addr replace {HOST_V6}/64 dev {link} nodad"),
    )?;
    run(host, &format!("ip route replace default via {OUTSIDE_V4}"))?;
    run(
        host,
        &format!("ip -6 route replace default via {OUTSIDE_V6}"),
    )
    .map(drop)
}

/// Runs `action` while data is exchanged over some of the connections, which stand still during an outage.
fn while_data_is_exchanged(
    open: &[(TcpStream, TcpStream)],
    action: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let stop = StopSignal::default();
    let limit = LoadScale::from_environment().timeout(OUTAGE);
    let exchange = |one: &TcpStream, other: &TcpStream| -> Result<()> {
        loop {
            exchange_within(one, other, limit)?;
            if stop.is_stopped() {
                return Ok(());
            }
        }
    };
    thread::scope(|scope| {
        let streams = open.iter().take(BUSY);
        let exchanges = streams.map(|(one, other)| scope.spawn(|| exchange(one, other)));
        let exchanges: Vec<_> = exchanges.collect();
        stop.stop_after(action)?;
        for (number, exchange) in exchanges.into_iter().enumerate() {
            let exchanged = exchange.join().ok().context("an exchange panicked")?;
            exchanged.with_context(|| format!("connection {number}"))?;
        }
        Ok(())
    })
}

/// Asserts that the open connections go on, and that others begin.
fn expect_served(
    scene: &Scene,
    backend: &Backend,
    open: &[(TcpStream, TcpStream)],
    when: &str,
) -> Result<()> {
    for (number, (one, other)) in open.iter().enumerate() {
        exchange_stream(one, other).with_context(|| format!("connection {number}, {when}"))?;
    }
    for (what, vip, ports) in ADDRESSES {
        expect_reached(scene.node.outside(), backend, (vip, ports), HOST.ips())
            .with_context(|| format!("{what}, {when}"))?;
    }
    Ok(())
}

/// Replaces the uplink `wan` by another one.
fn replace(scene: &Scene) -> Result<()> {
    let (host, outside) = (scene.node.host(), scene.node.outside());
    run(host, "ip link del wan")?;
    let pid = outside.pid();
    run(
        host,
        &format!("ip link add card type veth peer name eth0 netns {pid}"),
    )?;
    configure(scene, "card")?;
    // Packets that arrive before the programs are attached would reset the connections.
    until_followed(scene, "card")?;
    for command in [
        "link set eth0 up",
        &format!("addr add {OUTSIDE_V4}/24 dev eth0"),
        &format!("addr add {OUTSIDE_V6}/64 dev eth0 nodad"),
        &format!("route add default via {HOST_V4}"),
        &format!("-6 route add default via {HOST_V6}"),
    ] {
        run(outside, &format!("ip {command}"))?;
    }
    route_to_node(scene)
}

#[test]
fn connections_go_on_when_an_uplink_is_renamed_and_replaced() -> Result<()> {
    let scene = configured("packets: { links: uplinks }")?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let (host, outside) = (scene.node.host(), scene.node.outside());
    until_followed(&scene, "uplink")?;
    let open = (0..OPEN).map(|_| connect_to_node_port(outside, &backend));
    let open: Vec<_> = open.collect::<Result<_>>()?;
    expect_served(&scene, &backend, &open, "at first")?;

    let rename = || {
        // Most kernels rename only a link that is down, which loses its routes and IPv6 addresses.
        for command in ["set uplink down", "set uplink name wan"] {
            run(host, &format!("ip link {command}"))?;
        }
        configure(&scene, "wan")?;
        until_followed(&scene, "wan")
    };
    while_data_is_exchanged(&open, rename).context("while it was renamed")?;
    expect_served(&scene, &backend, &open, "after it was renamed")?;

    while_data_is_exchanged(&open, || replace(&scene)).context("while it was replaced")?;
    expect_served(&scene, &backend, &open, "after it was replaced")?;
    let logs = scene.node.logs();
    ensure!(!logs.contains("cannot translate packets"), "{logs}");
    Ok(())
}
