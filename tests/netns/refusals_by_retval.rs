//! Tests that connections to a Service without endpoints fail at once, with the error that a program sets by
//! calling `bpf_set_retval` (Linux 6.1).

use std::{io, net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::Socket;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    load_scale::LoadScale,
    node::Node,
    sandbox::{RESPONSE_TIMEOUT, connect_within},
    shared_fixture::Lease,
    test_name,
};

use crate::{
    fixture::{DIALLED, EMPTY, Scene},
    support::{DNS, Dialer, HTTP, ensure_eq, expect_refusal},
};

/// The time limit for a refusal. The kernel retransmits a SYN only after a second, so a faster refusal does
/// not come from the network.
const AT_ONCE: Duration = Duration::from_millis(500);

fn take_scene() -> Result<Lease<Scene>> {
    let scene = DIALLED.lease()?;
    let refusing = &scene.node.status()?["refusalMethod"];
    ensure_eq("refusalMethod", refusing, "bpf_set_retval")?;
    Ok(scene)
}

/// Asserts that an attempt is refused within [`AT_ONCE`] and counted once.
fn expect_refused_at_once<T>(node: &Node, attempt: impl FnOnce() -> io::Result<T>) -> Result<()> {
    let start = Instant::now();
    expect_refusal(node, "no_backend", Errno::ECONNREFUSED, attempt)?;
    let within = LoadScale::from_environment().timeout(AT_ONCE);
    ensure!(start.elapsed() < within, "after {:?}", start.elapsed());
    Ok(())
}

#[test]
fn a_tcp_connect_is_refused_at_once() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SetRetval])? {
        return Ok(());
    }
    let scene = take_scene()?;

    for (device, sandbox) in scene.devices() {
        for dialer in Dialer::TCP {
            for (kind, bound, blocks) in [
                ("plain", None, true),
                ("bound", Some(device.as_bytes()), true),
                ("without blocking", None, false),
            ] {
                let socket = dialer.tcp_socket(sandbox)?;
                socket.bind_device(bound)?;
                socket.set_nonblocking(!blocks)?;
                let connect =
                    || connect_within(&socket, dialer.address(EMPTY, HTTP), RESPONSE_TIMEOUT);
                expect_refused_at_once(&scene.node, connect)
                    .with_context(|| format!("{dialer:?}, {kind}, by {device}"))?;
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
    let scene = take_scene()?;

    for (device, sandbox) in scene.devices() {
        for dialer in Dialer::UDP {
            let to = dialer.address(EMPTY, DNS);
            for (kind, bound) in [("plain", None), ("bound", Some(device.as_bytes()))] {
                let what = || format!("{dialer:?}, {kind}, by {device}");
                let socket = Socket::from(dialer.udp_socket(sandbox)?);
                socket.bind_device(bound)?;
                let socket = UdpSocket::from(socket);
                expect_refused_at_once(&scene.node, || socket.connect(to)).with_context(what)?;
                expect_refused_at_once(&scene.node, || socket.send_to(b"who?", to))
                    .with_context(what)?;
            }
        }
    }
    scene.give_back()
}
