//! UDP sockets that pass the destination with each datagram (`sendto`).

use std::net::UdpSocket;

use anyhow::Result;
use tunnel_tests::{place::ANSWER, wait};

use crate::{
    scene::{DIALLED, OTHER, Scene, TWIN, WEB},
    support::{DNS, DNS_TARGET, Vip, Way, ask, receive, same, server},
};

/// Sends to [`WEB`] on a socket with another peer. The kernel drops answers that are not from the peer,
/// so this waits until the backend has counted the datagram.
fn ask_besides(scene: &Scene, socket: &UdpSocket, way: Way) -> Result<()> {
    let server = &scene.backend("backend")?.server;
    let asked = || server.record().map(|record| record.total().answered);
    let before = asked()?;
    socket.send_to(b"who?", way.to(WEB, DNS))?;
    wait::until(ANSWER, || asked().is_ok_and(|asked| asked == before + 1))
}

#[test]
fn a_connected_socket_can_ask_a_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;
    let elsewhere = Vip::of_pod(scene.backend("other")?);
    let backend = Vip::of_pod(scene.backend("backend")?);

    scene.each(&Way::UDP, |place, way| {
        let socket = way.connected(place, elsewhere, DNS_TARGET)?;
        ask_besides(&scene, &socket, way)?;
        same("server", ask(&socket)?, "other")?;
        let shown = way.shown(elsewhere, DNS_TARGET);
        same("peer", socket.peer_addr()?, shown)?;

        socket.connect(way.to(backend, DNS_TARGET))?;
        way.is_answered(&socket, WEB, DNS, "backend")
    })?;
    scene.give_back()
}

#[test]
fn a_socket_connected_to_a_cluster_ip_can_ask_another() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.connected(place, OTHER, DNS)?;
        ask_besides(&scene, &socket, way)?;

        same("peer", socket.peer_addr()?, way.shown(OTHER, DNS))?;
        socket.send(b"who?")?;
        let expected = ("other".to_owned(), way.shown(OTHER, DNS));
        same("answer", receive(&socket)?, expected)
    })?;
    scene.give_back()
}

#[test]
fn a_look_at_a_datagram_shows_the_cluster_ip_like_its_receipt() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        let mut answer = [0; 64];
        for _ in 0..2 {
            let (length, sender) = socket.peek_from(&mut answer)?;
            same("peeked", server(&answer[..length])?, "backend")?;
            same("sender", sender, way.shown(WEB, DNS))?;
        }
        let expected = ("backend".to_owned(), way.shown(WEB, DNS));
        same("answer", receive(&socket)?, expected)
    })?;
    scene.give_back()
}

#[test]
fn a_datagram_is_received_by_who_does_not_ask_for_its_sender() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer)?;
        same("server", server(&answer[..length])?, "backend")?;

        // A receive that does not request the sender must not delete the stored cluster IP.
        way.is_answered(&socket, WEB, DNS, "backend")
    })?;
    scene.give_back()
}

#[test]
fn answers_to_one_socket_come_from_the_cluster_ip_that_each_was_asked_of() -> Result<()> {
    let scene = DIALLED.take()?;
    let direct = Vip::of_pod(scene.backend("backend")?);

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        // Two of the Services have the same backend.
        for _ in 0..3 {
            for (vip, name) in [(WEB, "backend"), (TWIN, "backend"), (OTHER, "other")] {
                way.is_answered(&socket, vip, DNS, name)?;
            }
        }
        // Both requests are sent before either answer is received.
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        socket.send_to(b"who?", way.to(OTHER, DNS))?;
        for _ in 0..2 {
            let (server, sender) = receive(&socket)?;
            let vip = if server == "backend" { WEB } else { OTHER };
            same("sender", sender, way.shown(vip, DNS))?;
        }
        // A backend that the socket dialled directly is reported with its own address.
        let socket = way.udp(place)?;
        way.is_answered(&socket, direct, DNS_TARGET, "backend")
    })?;
    scene.give_back()
}
