//! Sockets that are steered to the tunnel, and sockets that are not.

use std::{
    net::{TcpStream, UdpSocket},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    edge::EDGE,
    place::{ANSWER, connect_within},
    shared::Shared,
    site::{FURTHER, KUBELET, Site},
};

use super::{Kind, both, client, each_place, expect_unsteered};
use crate::support::{counted, errno, is_nowhere, same};

/// The default mark of Culvert's own sockets.
const MARK: u32 = 0x1_0000;

static SITE: Shared<Site> = Shared::new(Site::new);

#[test]
fn every_socket_reaches_the_kubelet_and_shows_what_it_dialled() -> Result<()> {
    let site = SITE.take()?;

    each_place(&site, |from| {
        for kind in Kind::ALL {
            // A host socket that is bound to the uplink can't reach the ingress, which is on loopback.
            if kind == Kind::Device && !from.is_pod {
                continue;
            }
            for to in KUBELET.into_iter().flat_map(both) {
                if kind == Kind::Mapped && to.is_ipv6() {
                    continue;
                }
                let what = || format!("{kind:?} → {to}");
                let connect = || {
                    let stream = kind.connect(from, to)?;
                    site.client(TcpStream::from(stream), to)
                };
                let (mut client, steered) =
                    counted(site.node(), &["steered"], connect).with_context(what)?;
                client.healthz().with_context(what)?;
                same(&what(), client.peer()?, kind.dialled(to))?;
                same(&what(), steered, vec![1])?;
                let subject = client.subject();
                let node = format!("system:node:{EDGE}");
                ensure!(subject.contains(&node), "{subject}");
            }
        }
        Ok(())
    })?;
    site.give_back()
}

#[test]
fn whole_dialogs_pass_as_on_a_flat_network() -> Result<()> {
    let site = SITE.take()?;

    each_place(&site, |from| {
        for to in both(KUBELET[0]) {
            let mut one = client(&site, from.place, to)?;
            one.bytes(1 << 20)?;
            one.sum(1 << 20)?;
            one.until_end(100_000)?;

            let mut two = client(&site, from.place, to)?;
            two.upgrade()?;
            for _ in 0..20 {
                two.exchange(b"a frame")?;
            }
            two.close()?;
            client(&site, from.place, to)?.reset()?;
        }
        Ok(())
    })?;

    let exchanges = site.kubelet().record()?.exchanges;
    let steps = exchanges.iter().flat_map(|it| &it.steps);
    same("upgrades", steps.filter(|it| *it == "upgraded").count(), 4)?;
    site.give_back()
}

#[test]
fn many_connects_at_once_reach_the_kubelet() -> Result<()> {
    const EACH: usize = 25;
    let site = SITE.take()?;
    let pod = site.pod()?;
    let (here, dialling) = (&*site, &**pod);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for place in [here.node().host(), dialling] {
            for to in both(KUBELET[0]) {
                threads.push(scope.spawn(move || {
                    (0..EACH).try_for_each(|_| client(here, place, to)?.echo("hello"))
                }));
            }
        }
        let mut threads = threads.into_iter();
        threads.try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    site.give_back()
}

#[test]
fn datagrams_to_an_edge_node_are_not_steered() -> Result<()> {
    let site = SITE.take()?;

    each_place(&site, |from| {
        for to in both(KUBELET[0]) {
            let send = || {
                let socket = from.place.socket(Domain::for_address(to), Type::DGRAM)?;
                let socket = UdpSocket::from(socket);
                let connected = socket.connect(to);
                if connected.is_ok() {
                    same("peer", socket.peer_addr()?, to)?;
                    // The send may get the ICMP error of a router that has no route.
                    drop(socket.send(b"anybody?"));
                }
                Ok(connected)
            };
            let (connected, grown) = counted(site.node(), &["steered"], send)?;
            // The connect fails only on the host, which has no route; a pod's route leads to the host.
            let error = connected.err().map(|it| it.kind());
            ensure!(from.is_pod == error.is_none(), "{to}: {error:?}");
            same("steered", grown, vec![0])?;
        }
        Ok(())
    })?;
    site.give_back()
}

#[test]
fn own_sockets_other_ports_and_sockets_of_a_device_of_the_host_are_not_steered() -> Result<()> {
    let site = SITE.take()?;

    each_place(&site, |from| {
        for to in both(KUBELET[0]) {
            let socket = from.place.socket(Domain::for_address(to), Type::STREAM)?;
            socket.set_mark(MARK)?;
            let error = errno(connect_within(&socket, to, ANSWER));
            ensure!(is_nowhere(error), "with our mark: {to}: {error:?}");
            if !from.is_pod {
                let error = errno(Kind::Device.connect(from, to));
                ensure!(is_nowhere(error), "of a device: {to}: {error:?}");
            }
        }
        for to in both(FURTHER).into_iter().chain(both(22)) {
            expect_unsteered(from.place, to)?;
        }
        Ok(())
    })?;
    site.give_back()
}
