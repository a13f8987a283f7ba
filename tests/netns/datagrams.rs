//! UDP sockets that name the destination with each datagram.

use anyhow::Result;
use tunnel_tests::{place::ANSWER, wait};

use crate::{
    scene::{DIALLED, OTHER, Scene, TWIN, WEB},
    support::{DNS, DNS_TARGET, Vip, Way, ask, ask_to, receive, same, server},
};

/// Counts the datagrams that the first backend has answered.
fn asked(scene: &Scene) -> Result<u64> {
    Ok(scene.backend("backend")?.server.record()?.total().answered)
}

#[test]
fn the_answer_to_a_datagram_comes_from_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        for _ in 0..2 {
            let (name, sender) = ask_to(&socket, way.to(WEB, DNS))?;
            same("server", name, "backend".to_owned())?;
            same("sender", sender, way.shown(WEB, DNS))?;
        }
        Ok(())
    })?;
    scene.give_back()
}

#[test]
fn a_connected_socket_can_ask_a_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;
    let elsewhere = Vip::of_pod(scene.backend("other")?);
    let backend = Vip::of_pod(scene.backend("backend")?);

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(elsewhere, DNS_TARGET))?;
        let before = asked(&scene)?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        // The kernel keeps answers of all but the peer from a connected socket.
        wait::until(ANSWER, || {
            asked(&scene).is_ok_and(|asked| asked == before + 1)
        })?;
        same("server", ask(&socket)?, "other".to_owned())?;
        same(
            "peer",
            socket.peer_addr()?,
            way.shown(elsewhere, DNS_TARGET),
        )?;

        socket.connect(way.to(backend, DNS_TARGET))?;
        let (server, sender) = ask_to(&socket, way.to(WEB, DNS))?;
        same("server", server, "backend".to_owned())?;
        same("sender", sender, way.shown(WEB, DNS))
    })?;
    scene.give_back()
}

#[test]
fn a_socket_connected_to_a_cluster_ip_can_ask_another() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(OTHER, DNS))?;
        let before = asked(&scene)?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        wait::until(ANSWER, || {
            asked(&scene).is_ok_and(|asked| asked == before + 1)
        })?;

        same("peer", socket.peer_addr()?, way.shown(OTHER, DNS))?;
        socket.send(b"who?")?;
        let (server, sender) = receive(&socket)?;
        same("server", server, "other".to_owned())?;
        same("sender", sender, way.shown(OTHER, DNS))
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
            same("peeked", server(&answer[..length])?, "backend".to_owned())?;
            same("sender", sender, way.shown(WEB, DNS))?;
        }
        let (name, sender) = receive(&socket)?;
        same("server", name, "backend".to_owned())?;
        same("sender", sender, way.shown(WEB, DNS))
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
        same("server", server(&answer[..length])?, "backend".to_owned())?;

        // What was received without a look at the sender is no reason to forget the cluster IP.
        let (_, sender) = ask_to(&socket, way.to(WEB, DNS))?;
        same("sender", sender, way.shown(WEB, DNS))
    })?;
    scene.give_back()
}

#[test]
fn answers_to_one_socket_come_from_the_cluster_ip_that_each_was_asked_of() -> Result<()> {
    let scene = DIALLED.take()?;
    let direct = Vip::of_pod(scene.backend("backend")?);

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        for _ in 0..3 {
            for (vip, name) in [(WEB, "backend"), (OTHER, "other")] {
                let (server, sender) = ask_to(&socket, way.to(vip, DNS))?;
                same("server", server, name.to_owned())?;
                same("sender", sender, way.shown(vip, DNS))?;
            }
        }
        // Both are asked before either is heard.
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        socket.send_to(b"who?", way.to(OTHER, DNS))?;
        for _ in 0..2 {
            let (server, sender) = receive(&socket)?;
            let vip = if server == "backend" { WEB } else { OTHER };
            same("sender", sender, way.shown(vip, DNS))?;
        }
        // A backend that no cluster IP was asked for by this socket keeps its own address.
        let socket = way.udp(place)?;
        let (_, sender) = ask_to(&socket, way.to(direct, DNS_TARGET))?;
        same("sender", sender, way.shown(direct, DNS_TARGET))
    })?;
    scene.give_back()
}

#[test]
fn two_cluster_ips_with_one_backend_are_told_apart_when_asked_in_turn() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        for vip in [WEB, TWIN, WEB, TWIN] {
            let (server, sender) = ask_to(&socket, way.to(vip, DNS))?;
            same("server", server, "backend".to_owned())?;
            same("sender", sender, way.shown(vip, DNS))?;
        }
        Ok(())
    })?;
    scene.give_back()
}
