//! The source ports with which masqueraded flows leave.

use std::{
    io,
    net::{IpAddr, TcpStream},
    ops::RangeInclusive,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{sandbox::connect_within, wait};

use super::{
    Backend, REMOTE, connect_to_node_port, exchange_stream, remote, route_to_node, service,
};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_HTTP, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, HTTP_TARGET, ensure_eq},
};

/// Connects a socket of the host to the backend from one of the ports for flows. Returns both ends.
fn connect_from_host(
    scene: &Scene,
    backend: &Backend,
    port: u16,
) -> Result<(TcpStream, TcpStream)> {
    let socket = scene.node.host().socket(Domain::IPV4, Type::STREAM)?;
    socket.set_reuse_address(true)?;
    socket.bind(&Dialer::V4.address(HOST, port).into())?;
    socket.connect(&Dialer::V4.address(REMOTE, HTTP_TARGET).into())?;
    Ok((socket.into(), backend.tcp[0].accept()?.0))
}

#[test]
#[ignore = "independent of the kernel: a decision, of which `reachability` runs every part"]
fn a_flow_without_a_free_port_is_refused_and_sockets_of_the_host_keep_theirs() -> Result<()> {
    const PORTS: RangeInclusive<u16> = 50_000..=50_003;
    const OF_HOST: u16 = 50_001;
    let (first, last) = (PORTS.start(), PORTS.end());
    let scene = configured(&format!("packets: {{ ports: {first}-{last} }}"))?;
    route_to_node(&scene)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    let client = scene.node.outside();
    let own = connect_from_host(&scene, &backend, OF_HOST)?;

    let mut open = Vec::new();
    let mut used = vec![OF_HOST];
    for _ in 1..PORTS.count() {
        let pair = connect_to_node_port(client, &backend)?;
        let seen = pair.1.peer_addr()?;
        ensure_eq("the client's address", seen.ip(), IpAddr::V4(HOST.v4))?;
        used.push(seen.port());
        open.push(pair);
    }
    used.sort_unstable();
    ensure_eq("ports", used, PORTS.collect::<Vec<_>>())?;
    ensure_eq("refused", scene.node.reason_count("ports_full")?, 0)?;

    // Its packets are dropped, so that it comes through if a port becomes free.
    let socket = Dialer::V4.tcp_socket(client)?;
    let to = Dialer::V4.address(HOST, NODE_HTTP);
    let error = connect_within(&socket, to, Duration::from_millis(500)).err();
    let error = error.context("a flow without a port")?.kind();
    ensure_eq("error", error, io::ErrorKind::TimedOut)?;
    ensure!(scene.node.reason_count("ports_full")? >= 1, "not counted");
    for (one, other) in open.iter().chain([&own]) {
        exchange_stream(one, other)?;
    }

    // A port is free again once its flow has ended.
    drop((socket, open.pop()));
    let again = || connect_to_node_port(client, &backend).is_ok();
    wait::until(CHANGE_TIMEOUT, again).context("no flow after one has ended")
}
