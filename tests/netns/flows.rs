//! What a UDP socket remembers of its choice, and what becomes of sockets that can't remember.

use std::{collections::BTreeSet, net::UdpSocket};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    feature::{self, Feature},
    manifest::Service,
    node::Node,
    shared::Shared,
    test_name, wait,
};

use crate::{
    scene::{Scene, WEB},
    support::{
        CHANGE, DNS, HTTP, HTTP_TARGET, Way, ask, ask_to, counted, errno, http, ports, same,
        until_backends,
    },
};

static SCENE: Shared<Scene> = Shared::new(|| Scene::web(&["one", "two", "three"])?.freeze());

/// Waits until the Service has no backend any more that is only finishing what it has.
fn until_left(node: &Node) -> Result<()> {
    wait::until(CHANGE, || {
        let services = node.services().unwrap_or_default();
        let ports = ports(&services, "web");
        let is_empty =
            |port: &serde_json::Value| port["leaving"].as_array().is_some_and(Vec::is_empty);
        !ports.is_empty() && ports.iter().all(is_empty)
    })
}

/// The one server that answers so many datagrams.
fn steady(socket: &UdpSocket, way: Way, count: u32) -> Result<String> {
    let (first, _) = ask_to(socket, way.to(WEB, DNS))?;
    for number in 1..count {
        let (name, sender) = ask_to(socket, way.to(WEB, DNS))?;
        same(&format!("datagram {number}"), &name, &first)?;
        same("sender", sender, way.shown(WEB, DNS))?;
    }
    Ok(first)
}

#[test]
fn datagrams_of_a_socket_stay_with_their_backend_until_it_goes_away() -> Result<()> {
    let scene = SCENE.take()?;
    let without = |name: &str| WEB.service("web").backends(scene.without(name));

    for way in Way::UDP {
        let socket = way.udp(&scene.client)?;
        let (first, grown) = counted(&scene.node, &["translated", "translated_sticky"], || {
            steady(&socket, way, 100)
        })?;
        same("counted", grown, vec![1, 99])?;

        let leaving = scene.addresses(&[&first])?;
        let terminating = leaving
            .into_iter()
            .fold(without(&first), Service::terminating);
        scene.node.apply(terminating)?;
        until_backends(&scene.node, "web", 2)?;
        same("while it ends", steady(&socket, way, 10)?, first.clone())?;
        for _ in 0..20 {
            let fresh = ask_to(&way.udp(&scene.client)?, way.to(WEB, DNS))?.0;
            ensure!(
                fresh != first,
                "a new socket was sent to a backend that ends"
            );
        }

        scene.node.apply(without(&first))?;
        until_left(&scene.node)?;
        let second = steady(&socket, way, 10)?;
        ensure!(second != first, "still at {first}, which has gone");

        scene.node.apply(without(""))?;
        until_backends(&scene.node, "web", 3)?;
        same("after its return", steady(&socket, way, 10)?, second)?;
    }
    scene.give_back()
}

#[test]
fn new_sockets_are_spread_over_all_backends() -> Result<()> {
    let scene = SCENE.take()?;
    for way in [Way::V4, Way::V6, Way::Mapped] {
        let mut tcp = BTreeSet::new();
        let mut connected = BTreeSet::new();
        let mut unconnected = BTreeSet::new();
        // The chance that one of three isn't met in 60 tries is 10^-10.
        for _ in 0..60 {
            tcp.insert(http(way.connect(&scene.client, WEB, HTTP)?)?);
            let socket = way.udp(&scene.client)?;
            unconnected.insert(ask_to(&socket, way.to(WEB, DNS))?.0);
            let socket = way.udp(&scene.client)?;
            socket.connect(way.to(WEB, DNS))?;
            connected.insert(ask(&socket)?);
        }
        let servers = [tcp.len(), connected.len(), unconnected.len()];
        same("servers", servers, [3; 3])?;
    }
    scene.give_back()
}

#[test]
fn a_socket_without_room_to_remember_is_counted_and_udp_is_refused() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::OwnOptmem])? {
        return Ok(());
    }
    let scene = SCENE.take()?;
    let reasons = ["translated_untracked", "storage_full", "socket_tracked"];
    let room = "net.core.optmem_max";
    let before = scene
        .client
        .run(&["cat", "/proc/sys/net/core/optmem_max"])?;
    scene.client.sysctl(room, "1")?;

    for way in Way::TCP {
        let (stream, grown) = counted(&scene.node, &reasons, || {
            Ok(way.connect(&scene.client, WEB, HTTP)?)
        })?;
        same("counted", grown, vec![1, 0, 0])?;
        // Nothing is remembered, so the peer is who it is.
        same("port", stream.peer_addr()?.port(), HTTP_TARGET)?;
        ensure!(!http(stream)?.is_empty());
    }
    for way in Way::UDP {
        let (failed, grown) = counted(&scene.node, &reasons, || {
            let socket = way.udp(&scene.client)?;
            let to = way.to(WEB, DNS);
            Ok([
                errno(socket.connect(to)),
                errno(socket.send_to(b"who?", to)),
            ])
        })?;
        same("errors", failed, [Errno::ENOMEM; 2])?;
        same("counted", grown, vec![0, 2, 0])?;
    }

    scene.client.sysctl(room, before.trim())?;
    for way in Way::TCP {
        let (stream, grown) = counted(&scene.node, &reasons, || {
            Ok(way.connect(&scene.client, WEB, HTTP)?)
        })?;
        same("counted", grown, vec![0, 0, 1])?;
        same("peer", stream.peer_addr()?, way.shown(WEB, HTTP))?;
    }
    scene.give_back()
}
