//! A Service without an endpoint refuses at once, with the error that the kernel can be made to
//! give (`bpf_set_retval`, Linux 6.1).

use std::{net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    node::Node,
    place::{Place, connect_within},
    scale::Scale,
    shared::Lease,
    test_name,
};

use crate::{
    scene::{DIALLED, EMPTY, Scene},
    support::{DNS, HTTP, Way, counted, errno, same},
};

/// The kernel's first SYN is repeated after a second: what takes less was answered at once.
const AT_ONCE: Duration = Duration::from_millis(500);

/// Each place with the name of its network interface.
fn devices(scene: &Scene) -> [(&'static str, &Place); 2] {
    let [(_, host), (_, pod)] = scene.places();
    [("uplink", host), ("eth0", pod)]
}

fn dialled() -> Result<Lease<Scene>> {
    let scene = DIALLED.take()?;
    let refusing = &scene.node.status()?["refusing"];
    same("way", refusing, "bpf_set_retval")?;
    Ok(scene)
}

/// That something is refused at once, and counted once.
fn refused<T>(node: &Node, attempt: impl FnOnce() -> std::io::Result<T>) -> Result<()> {
    let start = Instant::now();
    let (failed, grown) = counted(node, &["no_backend"], || Ok(errno(attempt())))?;
    let within = Scale::from_environment().patience(AT_ONCE);
    ensure!(start.elapsed() < within, "after {:?}", start.elapsed());
    same("error", failed, Errno::ECONNREFUSED)?;
    same("counted", grown, vec![1])
}

#[test]
fn a_tcp_connect_is_refused_at_once() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SetRetval])? {
        return Ok(());
    }
    let scene = dialled()?;

    for (device, place) in devices(&scene) {
        for way in Way::TCP {
            let to = way.to(EMPTY, HTTP);
            let patience = tunnel_tests::place::ANSWER;
            let plain = way.tcp(place)?;
            refused(&scene.node, || connect_within(&plain, to, patience))
                .with_context(|| format!("{way:?} by {device}"))?;

            let bound = way.tcp(place)?;
            bound.bind_device(Some(device.as_bytes()))?;
            refused(&scene.node, || connect_within(&bound, to, patience))
                .with_context(|| format!("{way:?} bound to {device}"))?;

            let impatient = way.tcp(place)?;
            impatient.set_nonblocking(true)?;
            refused(&scene.node, || impatient.connect(&to.into()))
                .with_context(|| format!("{way:?} by {device}, without blocking"))?;
        }
    }
    scene.give_back()
}

#[test]
fn a_udp_connect_and_a_datagram_are_refused_at_once() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SetRetval])? {
        return Ok(());
    }
    let scene = dialled()?;

    for (device, place) in devices(&scene) {
        for way in Way::UDP {
            let to = way.to(EMPTY, DNS);
            for (bound, kind) in [(None, "free"), (Some(device.as_bytes()), "bound")] {
                let what = || format!("{way:?}, {kind}, by {device}");
                let socket = socket2::Socket::from(way.udp(place)?);
                socket.bind_device(bound)?;
                let socket = UdpSocket::from(socket);
                refused(&scene.node, || socket.connect(to)).with_context(what)?;
                refused(&scene.node, || socket.send_to(b"who?", to)).with_context(what)?;
            }
        }
    }
    scene.give_back()
}
