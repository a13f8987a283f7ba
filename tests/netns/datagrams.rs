//! UDP sockets that name the destination with each datagram.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use tunnel_tests::{
    node::Node,
    place::{ANSWER, Place},
    pod::{Pod, Server},
    wait,
};

use crate::support::{
    DNS, DNS_TARGET, Vip, Way, addresses, ask, ask_to, clients, receive, same, serve, server,
};

const WEB: Vip = Vip::of(10);
/// Leads to another backend.
const OTHER: Vip = Vip::of(11);
/// Leads to the same backend and port as [`WEB`].
const TWIN: Vip = Vip::of(13);

struct Stage {
    node: Node,
    client: Arc<Pod>,
    backend: Arc<Pod>,
    servers: [Server; 2],
}

impl Stage {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let (client, backend) = (node.pod("client")?, node.pod("backend")?);
        let other = node.pod("other")?;
        node.apply(WEB.service("web").backends(addresses(&[&*backend])))?;
        node.apply(TWIN.service("twin").backends(addresses(&[&*backend])))?;
        node.apply(OTHER.service("other").backends(addresses(&[&*other])))?;
        let servers = [serve(&backend)?, serve(&other)?];
        node.start()?;
        Ok(Self {
            node,
            client,
            backend,
            servers,
        })
    }

    /// How many datagrams the first backend has answered.
    fn asked(&self) -> Result<u64> {
        Ok(self.servers[0].record()?.total().answered)
    }

    /// Does something from the host and a pod in each way that UDP has.
    fn each(&self, story: impl Fn(&Place, Way) -> Result<()>) -> Result<()> {
        for (from, place) in clients(self.node.host(), &self.client) {
            for way in Way::UDP {
                story(place, way).with_context(|| format!("{way:?} from the {from}"))?;
            }
        }
        Ok(())
    }
}

#[test]
fn the_answer_to_a_datagram_comes_from_the_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;

    stage.each(|place, way| {
        let socket = way.udp(place)?;
        for _ in 0..2 {
            let (name, sender) = ask_to(&socket, way.to(WEB, DNS))?;
            same("server", name, "backend".to_owned())?;
            same("sender", sender, way.shown(WEB, DNS))?;
        }
        Ok(())
    })
}

#[test]
fn a_connected_socket_can_ask_a_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;
    let elsewhere = Vip::of_pod(&*stage.node.pod("other")?);
    let backend = Vip::of_pod(&stage.backend);

    stage.each(|place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(elsewhere, DNS_TARGET))?;
        let before = stage.asked()?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        // The kernel keeps answers of all but the peer from a connected socket.
        wait::until(ANSWER, || {
            stage.asked().is_ok_and(|asked| asked == before + 1)
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
    })
}

#[test]
fn a_socket_connected_to_a_cluster_ip_can_ask_another() -> Result<()> {
    let stage = Stage::new()?;

    stage.each(|place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(OTHER, DNS))?;
        let before = stage.asked()?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        wait::until(ANSWER, || {
            stage.asked().is_ok_and(|asked| asked == before + 1)
        })?;

        same("peer", socket.peer_addr()?, way.shown(OTHER, DNS))?;
        socket.send(b"who?")?;
        let (server, sender) = receive(&socket)?;
        same("server", server, "other".to_owned())?;
        same("sender", sender, way.shown(OTHER, DNS))
    })
}

#[test]
fn a_look_at_a_datagram_shows_the_cluster_ip_like_its_receipt() -> Result<()> {
    let stage = Stage::new()?;

    stage.each(|place, way| {
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
    })
}

#[test]
fn a_datagram_is_received_by_who_does_not_ask_for_its_sender() -> Result<()> {
    let stage = Stage::new()?;

    stage.each(|place, way| {
        let socket = way.udp(place)?;
        socket.send_to(b"who?", way.to(WEB, DNS))?;
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer)?;
        same("server", server(&answer[..length])?, "backend".to_owned())?;

        // What was received without a look at the sender is no reason to forget the cluster IP.
        let (_, sender) = ask_to(&socket, way.to(WEB, DNS))?;
        same("sender", sender, way.shown(WEB, DNS))
    })
}

#[test]
fn answers_to_one_socket_come_from_the_cluster_ip_that_each_was_asked_of() -> Result<()> {
    let stage = Stage::new()?;
    let direct = Vip::of_pod(&stage.backend);

    stage.each(|place, way| {
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
    })
}

#[test]
fn two_cluster_ips_with_one_backend_are_told_apart_when_asked_in_turn() -> Result<()> {
    let stage = Stage::new()?;

    stage.each(|place, way| {
        let socket = way.udp(place)?;
        for vip in [WEB, TWIN, WEB, TWIN] {
            let (server, sender) = ask_to(&socket, way.to(vip, DNS))?;
            same("server", server, "backend".to_owned())?;
            same("sender", sender, way.shown(vip, DNS))?;
        }
        Ok(())
    })
}
