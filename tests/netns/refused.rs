//! Connects to a Service without endpoints fail at once, with the error that a program sets by
//! `bpf_set_retval` (Linux 6.1).

use std::{io, net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::Socket;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    node::Node,
    place::{ANSWER, connect_within},
    scale::Scale,
    shared::Lease,
    test_name,
};

use crate::{
    scene::{DIALLED, EMPTY, Scene},
    support::{DNS, HTTP, Way, is_refused, same},
};

/// The time limit of a refusal: less than the second after which the kernel retransmits a SYN, so the
/// refusal does not come from the network.
const AT_ONCE: Duration = Duration::from_millis(500);

fn dialled() -> Result<Lease<Scene>> {
    let scene = DIALLED.take()?;
    let refusing = &scene.node.status()?["refusalMethod"];
    same("refusalMethod", refusing, "bpf_set_retval")?;
    Ok(scene)
}

/// Asserts that an attempt is refused within [`AT_ONCE`], and counted once.
fn refused<T>(node: &Node, attempt: impl FnOnce() -> io::Result<T>) -> Result<()> {
    let start = Instant::now();
    is_refused(node, "no_backend", Errno::ECONNREFUSED, attempt)?;
    let within = Scale::from_environment().patience(AT_ONCE);
    ensure!(start.elapsed() < within, "after {:?}", start.elapsed());
    Ok(())
}

#[test]
fn a_tcp_connect_is_refused_at_once() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SetRetval])? {
        return Ok(());
    }
    let scene = dialled()?;

    for (device, place) in scene.devices() {
        for way in Way::TCP {
            for (kind, bound, blocks) in [
                ("plain", None, true),
                ("bound", Some(device.as_bytes()), true),
                ("without blocking", None, false),
            ] {
                let socket = way.tcp(place)?;
                socket.bind_device(bound)?;
                socket.set_nonblocking(!blocks)?;
                let connect = || connect_within(&socket, way.to(EMPTY, HTTP), ANSWER);
                refused(&scene.node, connect)
                    .with_context(|| format!("{way:?}, {kind}, by {device}"))?;
            }
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

    for (device, place) in scene.devices() {
        for way in Way::UDP {
            let to = way.to(EMPTY, DNS);
            for (kind, bound) in [("plain", None), ("bound", Some(device.as_bytes()))] {
                let what = || format!("{way:?}, {kind}, by {device}");
                let socket = Socket::from(way.udp(place)?);
                socket.bind_device(bound)?;
                let socket = UdpSocket::from(socket);
                refused(&scene.node, || socket.connect(to)).with_context(what)?;
                refused(&scene.node, || socket.send_to(b"who?", to)).with_context(what)?;
            }
        }
    }
    scene.give_back()
}
