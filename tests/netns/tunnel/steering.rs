//! Tests which sockets are steered into the tunnel, and which are not.

use std::{
    net::{TcpStream, UdpSocket},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    edge_node::EDGE_NAME,
    sandbox::{RESPONSE_TIMEOUT, connect_within},
    shared_fixture::SharedFixture,
    tunnel_testbed::{FURTHER_PORT, KUBELET_PORTS, TunnelTestbed},
};

use super::{SocketKind, client, edge_addresses, expect_unsteered, for_each_client};
use crate::support::{count_during, ensure_eq, errno, is_unreachable};

/// The mark that Culvert sets on its own sockets by default.
const MARK: u32 = 0x1_0000;

static SITE: SharedFixture<TunnelTestbed> = SharedFixture::new(TunnelTestbed::new);

#[test]
fn every_socket_reaches_the_kubelet_and_shows_the_dialled_address() -> Result<()> {
    let testbed = SITE.lease()?;

    for_each_client(&testbed, |from| {
        for kind in SocketKind::ALL {
            // A socket on the host that is bound to the uplink can't reach the ingress, which is on loopback.
            if kind == SocketKind::Device && !from.is_pod {
                continue;
            }
            for to in KUBELET_PORTS.into_iter().flat_map(edge_addresses) {
                if kind == SocketKind::Mapped && to.is_ipv6() {
                    continue;
                }
                let what = || format!("{kind:?} → {to}");
                let connect = || {
                    let stream = kind.connect(from, to)?;
                    testbed.client(TcpStream::from(stream), to)
                };
                let (mut client, steered) =
                    count_during(testbed.node(), &["steered"], connect).with_context(what)?;
                client.healthz().with_context(what)?;
                ensure_eq(&what(), client.peer()?, kind.dialled(to))?;
                ensure_eq(&what(), steered, vec![1])?;
                let subject = client.subject();
                let node = format!("system:node:{EDGE_NAME}");
                ensure!(subject.contains(&node), "{subject}");
            }
        }
        Ok(())
    })?;
    testbed.give_back()
}

#[test]
fn downloads_uploads_upgrades_and_resets_work_as_on_a_flat_network() -> Result<()> {
    let testbed = SITE.lease()?;

    for_each_client(&testbed, |from| {
        for to in edge_addresses(KUBELET_PORTS[0]) {
            let mut one = client(&testbed, from.sandbox, to)?;
            one.bytes(1 << 20)?;
            one.sum(1 << 20)?;
            one.until_end(100_000)?;

            let mut two = client(&testbed, from.sandbox, to)?;
            two.upgrade()?;
            for _ in 0..20 {
                two.exchange(b"a frame")?;
            }
            two.close()?;
            client(&testbed, from.sandbox, to)?.reset()?;
        }
        Ok(())
    })?;

    let exchanges = testbed.kubelet().record()?.exchanges;
    let steps = exchanges.iter().flat_map(|it| &it.steps);
    ensure_eq("upgrades", steps.filter(|it| *it == "upgraded").count(), 4)?;
    testbed.give_back()
}

#[test]
fn many_connects_at_once_reach_the_kubelet() -> Result<()> {
    const EACH: usize = 25;
    let testbed = SITE.lease()?;
    let pod = testbed.pod()?;
    let (here, dialling) = (&*testbed, &**pod);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for sandbox in [here.node().host(), dialling] {
            for to in edge_addresses(KUBELET_PORTS[0]) {
                threads.push(scope.spawn(move || {
                    (0..EACH).try_for_each(|_| client(here, sandbox, to)?.echo("hello"))
                }));
            }
        }
        let mut threads = threads.into_iter();
        threads.try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    testbed.give_back()
}

#[test]
fn datagrams_to_an_edge_node_are_not_steered() -> Result<()> {
    let testbed = SITE.lease()?;

    for_each_client(&testbed, |from| {
        for to in edge_addresses(KUBELET_PORTS[0]) {
            let send = || {
                let socket = from.sandbox.socket(Domain::for_address(to), Type::DGRAM)?;
                let socket = UdpSocket::from(socket);
                let connected = socket.connect(to);
                if connected.is_ok() {
                    ensure_eq("peer", socket.peer_addr()?, to)?;
                    // The send may fail with an ICMP error from a router that has no route.
                    drop(socket.send(b"anybody?"));
                }
                Ok(connected)
            };
            let (connected, increases) = count_during(testbed.node(), &["steered"], send)?;
            // connect() fails only on the host, which has no route to the edge node. In a pod it succeeds,
            // since the pod's default route leads to the host.
            let error = connected.err().map(|it| it.kind());
            ensure!(from.is_pod == error.is_none(), "{to}: {error:?}");
            ensure_eq("steered", increases, vec![0])?;
        }
        Ok(())
    })?;
    testbed.give_back()
}

#[test]
fn own_sockets_other_ports_and_host_sockets_bound_to_a_device_are_not_steered() -> Result<()> {
    let testbed = SITE.lease()?;

    for_each_client(&testbed, |from| {
        for to in edge_addresses(KUBELET_PORTS[0]) {
            let socket = from.sandbox.socket(Domain::for_address(to), Type::STREAM)?;
            socket.set_mark(MARK)?;
            let connected = connect_within(&socket, to, RESPONSE_TIMEOUT);
            if from.is_pod {
                // The mark has no effect in a pod.
                connected.with_context(|| format!("with our mark: {to}"))?;
            } else {
                let error = errno(connected);
                ensure!(is_unreachable(error), "with our mark: {to}: {error:?}");
                let error = errno(SocketKind::Device.connect(from, to));
                ensure!(is_unreachable(error), "of a device: {to}: {error:?}");
            }
        }
        for to in edge_addresses(FURTHER_PORT)
            .into_iter()
            .chain(edge_addresses(22))
        {
            expect_unsteered(from.sandbox, to)?;
        }
        Ok(())
    })?;
    testbed.give_back()
}
