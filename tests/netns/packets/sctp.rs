//! Packets of SCTP, which have no socket hook.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol as Transport, Socket, Type};
use tunnel_tests::{
    feature::{self, Feature},
    manifest::{Protocol, Service},
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    test_name,
};

use super::{CLIENT, REMOTE, host::outside_the_cgroup, pod_links::unhooked, remote, route_to_node};
use crate::{
    fixture::{Scene, WEB},
    service_addresses::{EXTERNAL, configured},
    support::{HOST, ensure_eq},
};

const SIGNAL: u16 = 3868;
const NODE_SIGNAL: u16 = 30_386;
/// The port of the backend, which differs from those that clients dial, so that the checksum changes.
const TARGET: u16 = 3869;

fn sctp(sandbox: &Sandbox, at: SocketAddr) -> Result<Socket> {
    let domain = Domain::for_address(at);
    let socket = sandbox.socket_with_protocol(domain, Type::STREAM, Transport::SCTP)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    Ok(socket)
}

/// The backend's sockets.
fn listen(sandbox: &Sandbox, ips: [IpAddr; 2]) -> Result<[Socket; 2]> {
    let [v4, v6] = ips.map(|ip| {
        let at = SocketAddr::new(ip, TARGET);
        let socket = sctp(sandbox, at)?;
        socket.bind(&at.into())?;
        socket.listen(8)?;
        Ok::<_, anyhow::Error>(socket)
    });
    Ok([v4?, v6?])
}

/// Opens an association, exchanges data over it, and returns the client's address as the backend sees it.
fn exchange(client: &Sandbox, to: SocketAddr, backend: &Socket) -> Result<IpAddr> {
    let mut socket = sctp(client, to)?;
    connect_within(&socket, to, RESPONSE_TIMEOUT).context("no association")?;
    let (mut accepted, from) = backend.accept()?;
    accepted.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    for data in [&b"hello"[..], &[7; 5000]] {
        let mut received = vec![0; data.len()];
        socket.write_all(data)?;
        accepted.read_exact(&mut received).context("no data")?;
        accepted.write_all(&received)?;
        socket.read_exact(&mut received).context("no reply")?;
        ensure_eq("data", received.as_slice(), data)?;
    }
    ensure_eq("peer", socket.peer_addr()?.as_socket(), Some(to))?;
    let from = from.as_socket().context("no address")?;
    Ok(from.ip())
}

fn service() -> Service {
    Service::new("signal", WEB.ips())
        .port(Protocol::SCTP, SIGNAL, TARGET)
        .node_port(NODE_SIGNAL)
        .spec(&format!("externalIPs: [{}]", EXTERNAL.yaml_list()))
}

/// Asserts that clients outside, in pods of this node and on the host reach the backend.
fn expect_reached(
    scene: &Scene,
    backend: &[Socket; 2],
    [seen_from_outside, seen_from_pod]: [[IpAddr; 2]; 2],
) -> Result<()> {
    let pod = unhooked(scene.node.network(), &scene.client)?;
    let host = outside_the_cgroup(scene, CLIENT)?;
    let outside = scene.node.outside();
    for (family, backend) in backend.iter().enumerate() {
        for (what, client, ip, port, seen) in [
            (
                "node port",
                outside,
                HOST.ips(),
                NODE_SIGNAL,
                seen_from_outside,
            ),
            (
                "external IP",
                outside,
                EXTERNAL.ips(),
                SIGNAL,
                seen_from_outside,
            ),
            (
                "cluster IP, from a pod",
                &pod,
                WEB.ips(),
                SIGNAL,
                seen_from_pod,
            ),
            (
                "cluster IP, from the host",
                &host,
                WEB.ips(),
                SIGNAL,
                HOST.ips(),
            ),
        ] {
            let to = SocketAddr::new(ip[family], port);
            let found = exchange(client, to, backend).with_context(|| format!("{what}: {to}"))?;
            ensure_eq(what, found, seen[family])?;
        }
    }
    Ok(())
}

#[test]
fn associations_reach_backends_and_pods_reach_them_on_their_links() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Sctp])? {
        return Ok(());
    }
    let scene = configured("packets: { links: all }")?;
    route_to_node(&scene)?;
    let pod = scene.node.pod("signal")?;
    let ips = [pod.v4(), pod.v6()];
    let backend = listen(&pod, ips)?;
    scene.node.start()?;
    scene.program(service().backends(ips))?;
    let own = [scene.client.v4(), scene.client.v6()];
    expect_reached(&scene, &backend, [HOST.ips(), own]).context("in a pod of this node")?;

    let scene = configured("packets: { links: all }")?;
    route_to_node(&scene)?;
    let remote = remote(&scene)?;
    let backend = listen(&remote, REMOTE.ips())?;
    scene.node.start()?;
    scene.program(service().backends(REMOTE.ips()))?;
    let own = [scene.client.v4(), scene.client.v6()];
    expect_reached(&scene, &backend, [HOST.ips(), own]).context("on another node")?;
    Ok(())
}
