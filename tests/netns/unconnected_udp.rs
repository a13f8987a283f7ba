//! Tests UDP sockets that pass a destination with each datagram (`sendto`).

use std::net::UdpSocket;

use anyhow::Result;
use tunnel_tests::{sandbox::RESPONSE_TIMEOUT, wait};

use crate::{
    counters::until_released,
    fixture::{DIALLED, EMPTY, OTHER, Scene, TWIN, WEB},
    support::{DNS, DNS_TARGET, Dialer, Vip, count_during, ensure_eq, query, receive, server},
};

/// Sends a datagram to [`WEB`] on a socket that is connected to another peer. The kernel drops replies that
/// don't come from the peer, so this waits until the backend has counted the datagram.
fn send_to_web(scene: &Scene, socket: &UdpSocket, dialer: Dialer) -> Result<()> {
    let server = &scene.backend("backend")?.server;
    let asked = || server.record().map(|record| record.total().answered);
    let before = asked()?;
    socket.send_to(b"who?", dialer.address(WEB, DNS))?;
    wait::until(RESPONSE_TIMEOUT, || {
        asked().is_ok_and(|asked| asked == before + 1)
    })
}

#[test]
fn a_connected_socket_can_send_to_a_cluster_ip() -> Result<()> {
    let scene = DIALLED.lease()?;
    let elsewhere = Vip::of_pod(scene.backend("other")?);
    let backend = Vip::of_pod(scene.backend("backend")?);

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.connect_udp(sandbox, elsewhere, DNS_TARGET)?;
        send_to_web(&scene, &socket, dialer)?;
        ensure_eq("server", query(&socket)?, "other")?;
        let expected = dialer.reported_address(elsewhere, DNS_TARGET);
        ensure_eq("peer", socket.peer_addr()?, expected)?;

        socket.connect(dialer.address(backend, DNS_TARGET))?;
        dialer.expect_answer(&socket, WEB, DNS, "backend")
    })?;
    scene.give_back()
}

#[test]
fn a_socket_connected_to_a_cluster_ip_can_send_to_another() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.connect_udp(sandbox, OTHER, DNS)?;
        send_to_web(&scene, &socket, dialer)?;

        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(OTHER, DNS),
        )?;
        socket.send(b"who?")?;
        let expected = ("other".to_owned(), dialer.reported_address(OTHER, DNS));
        ensure_eq("answer", receive(&socket)?, expected)
    })?;
    scene.give_back()
}

#[test]
fn peeking_at_a_datagram_shows_the_cluster_ip_like_receiving_it() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        socket.send_to(b"who?", dialer.address(WEB, DNS))?;
        let mut answer = [0; 64];
        for _ in 0..2 {
            let (length, sender) = socket.peek_from(&mut answer)?;
            ensure_eq("peeked", server(&answer[..length])?, "backend")?;
            ensure_eq("sender", sender, dialer.reported_address(WEB, DNS))?;
        }
        let expected = ("backend".to_owned(), dialer.reported_address(WEB, DNS));
        ensure_eq("answer", receive(&socket)?, expected)
    })?;
    scene.give_back()
}

#[test]
fn a_datagram_is_received_without_requesting_its_sender() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        socket.send_to(b"who?", dialer.address(WEB, DNS))?;
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer)?;
        ensure_eq("server", server(&answer[..length])?, "backend")?;

        // Receiving without asking for the sender's address must not delete the stored cluster IP.
        dialer.expect_answer(&socket, WEB, DNS, "backend")
    })?;
    scene.give_back()
}

#[test]
fn each_answer_comes_from_the_cluster_ip_to_which_the_socket_sent() -> Result<()> {
    let scene = DIALLED.lease()?;
    let direct = Vip::of_pod(scene.backend("backend")?);

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        // Two of these Services have the same backend.
        for _ in 0..3 {
            for (vip, name) in [(WEB, "backend"), (TWIN, "backend"), (OTHER, "other")] {
                dialer.expect_answer(&socket, vip, DNS, name)?;
            }
        }
        // Both requests are sent before either reply is received.
        socket.send_to(b"who?", dialer.address(WEB, DNS))?;
        socket.send_to(b"who?", dialer.address(OTHER, DNS))?;
        for _ in 0..2 {
            let (server, sender) = receive(&socket)?;
            let vip = if server == "backend" { WEB } else { OTHER };
            ensure_eq("sender", sender, dialer.reported_address(vip, DNS))?;
        }
        // If the socket dialled a backend directly, the backend's own address is reported.
        let socket = dialer.udp_socket(sandbox)?;
        dialer.expect_answer(&socket, direct, DNS_TARGET, "backend")
    })?;
    scene.give_back()
}

#[test]
fn a_socket_is_tracked_and_released_once_whatever_it_dials() -> Result<()> {
    let scene = DIALLED.lease()?;
    let direct = Vip::of_pod(scene.backend("other")?);
    let reasons = ["socket_tracked", "socket_released"];

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        until_released(&scene.node)?;
        let ((), increases) = count_during(&scene.node, &reasons, || {
            let socket = dialer.udp_socket(sandbox)?;
            dialer.expect_answer(&socket, WEB, DNS, "backend")?;
            dialer.expect_answer(&socket, OTHER, DNS, "other")?;
            // Removes the last translation, but not the older one.
            socket.connect(dialer.address(direct, DNS_TARGET))?;
            ensure_eq("server", query(&socket)?, "other")?;
            let expected = dialer.reported_address(direct, DNS_TARGET);
            ensure_eq("peer", socket.peer_addr()?, expected)?;
            send_to_web(&scene, &socket, dialer)?;
            // A Service without a backend refuses the socket.
            let _refused = socket.connect(dialer.address(EMPTY, DNS));
            socket.connect(dialer.address(WEB, DNS))?;
            ensure_eq("server", query(&socket)?, "backend")?;
            drop(socket);
            until_released(&scene.node).map(drop)
        })?;
        ensure_eq("tracked, released", increases, vec![1, 1])
    })?;
    scene.give_back()
}
