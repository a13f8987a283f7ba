//! Packets that are refused: the sender gets a reset or an ICMP error from the address that it has dialled.

use std::{io, net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tokio::time::Instant;
use tunnel_tests::{manifest::Service, sandbox::Sandbox};

use super::{ADDRESSES, ENABLED, REMOTE, route_to_node, service};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{Dialer, Vip, ensure_eq},
};

/// Starts a node with a route from outside, and programs a Service.
fn scene_with(setting: &str, service: Service) -> Result<Scene> {
    let scene = configured(setting)?;
    route_to_node(&scene)?;
    scene.node.start()?;
    scene.program(service)?;
    Ok(scene)
}

/// Sends a datagram to an address, and returns the error that comes back.
pub(super) fn error_of_datagram(socket: &UdpSocket) -> io::Result<io::Error> {
    socket.send(&[7; 1000])?;
    match socket.recv(&mut [0; 16]) {
        Err(error) => Ok(error),
        Ok(_) => Err(io::Error::other("an answer")),
    }
}

/// Asserts that a connection and a datagram over one family are refused.
pub(super) fn expect_refused(
    client: &Sandbox,
    dialer: Dialer,
    (vip, [http, dns]): (Vip, [u16; 2]),
) -> Result<()> {
    let error = dialer.connect(client, vip, http).err();
    let kind = error.context("a connection")?.kind();
    ensure_eq("TCP", kind, io::ErrorKind::ConnectionRefused)?;
    let socket = dialer.udp_socket(client)?;
    socket.connect(dialer.address(vip, dns))?;
    let error = error_of_datagram(&socket)?;
    ensure_eq("UDP", error.kind(), io::ErrorKind::ConnectionRefused)
}

#[test]
fn a_service_without_endpoints_refuses_clients_outside_at_once() -> Result<()> {
    let scene = scene_with(ENABLED, service("Cluster"))?;
    let client = scene.node.outside();
    for (what, vip, ports) in ADDRESSES {
        for dialer in [Dialer::V4, Dialer::V6] {
            let check = || {
                let started = Instant::now();
                expect_refused(client, dialer, (vip, ports))?;
                // Neither waits for a retransmission or a timeout.
                ensure!(started.elapsed().as_millis() < 500, "slow");
                Ok(())
            };
            check().with_context(|| format!("{what}, {dialer:?}"))?;
        }
    }
    ensure_eq("refused", scene.node.reason_count("no_backend")?, 16)?;
    ensure_eq("unanswered", scene.node.reason_count("refusal_unsent")?, 0)
}

#[test]
fn policy_local_without_a_local_endpoint_drops_packets_silently() -> Result<()> {
    let scene = scene_with(ENABLED, service("Local").backends(REMOTE.ips()))?;
    let client = scene.node.outside();
    let (_, vip, [http, dns]) = ADDRESSES[1];
    let socket = Dialer::V4.tcp_socket(client)?;
    socket.set_nonblocking(true)?;
    let started = socket.connect(&Dialer::V4.address(vip, http).into());
    ensure_eq(
        "connect",
        started.map_err(|error| error.raw_os_error()),
        Err(Some(Errno::EINPROGRESS as i32)),
    )?;
    let udp = Dialer::V6.udp_socket(client)?;
    udp.connect(Dialer::V6.address(vip, dns))?;
    udp.set_read_timeout(Some(Duration::from_millis(300)))?;
    let error = error_of_datagram(&udp)?;
    ensure_eq("UDP", error.kind(), io::ErrorKind::WouldBlock)?;
    ensure_eq("TCP", socket.take_error()?.map(|error| error.kind()), None)?;
    ensure!(
        scene.node.reason_count("no_local_backend")? >= 2,
        "not counted"
    );
    Ok(())
}

#[test]
fn refusals_beyond_the_limit_are_not_answered() -> Result<()> {
    let setting = "packets: { enabled: true, refusalsPerSecond: 20 }";
    let scene = scene_with(setting, service("Cluster"))?;
    let client = scene.node.outside();
    let (_, vip, [_, dns]) = ADDRESSES[1];
    let started = Instant::now();
    let mut answered = 0_u64;
    const SENT: u64 = 500;
    for _ in 0..SENT {
        let socket = Dialer::V4.udp_socket(client)?;
        socket.connect(Dialer::V4.address(vip, dns))?;
        socket.set_nonblocking(true)?;
        // The answer arrives while send() runs, because both ends are on this machine.
        let error = error_of_datagram(&socket)?;
        answered += u64::from(error.kind() == io::ErrorKind::ConnectionRefused);
    }
    let seconds = started.elapsed().as_secs() + 2;
    ensure!(
        (10..=20 * seconds).contains(&answered),
        "{answered} in {seconds} s"
    );
    let unsent = scene.node.reason_count("refusal_unsent")?;
    ensure!(unsent + 20 * seconds >= SENT, "{unsent}");
    Ok(())
}
