//! The backend that is stored with a UDP socket, and sockets without memory to store one.

use std::{collections::BTreeSet, net::UdpSocket};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    feature::{self, Feature},
    manifest::Service,
    shared::Shared,
    test_name,
};

use crate::{
    scene::{Scene, WEB},
    support::{
        DNS, HTTP, HTTP_TARGET, Way, ask, ask_to, counted, errno, http, run, same, until_backends,
        until_each_has,
    },
};

static SCENE: Shared<Scene> = Shared::new(|| Scene::web(&["one", "two", "three"])?.freeze());

/// Sends this many datagrams, and expects the same server to answer all; returns its name.
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

        let leaving = scene.addresses(&[&first])?.into_iter();
        let terminating = leaving.fold(without(&first), Service::terminating);
        scene.node.apply(terminating)?;
        until_backends(&scene.node, "web", 2)?;
        same("server while the backend terminates", steady(&socket, way, 10)?, first.clone())?;
        for _ in 0..20 {
            let (fresh, _) = ask_to(&way.udp(&scene.client)?, way.to(WEB, DNS))?;
            ensure!(
                fresh != first,
                "a new socket got the terminating backend"
            );
        }

        scene.node.apply(without(&first))?;
        until_each_has(&scene.node, "web", "draining", 0)?;
        let second = steady(&socket, way, 10)?;
        ensure!(second != first, "the socket still uses the removed backend {first}");

        scene.node.apply(without(""))?;
        until_backends(&scene.node, "web", 3)?;
        same("server after the return of the backend", steady(&socket, way, 10)?, second)?;
    }
    scene.give_back()
}

#[test]
fn new_sockets_are_spread_over_all_backends() -> Result<()> {
    let scene = SCENE.take()?;
    for way in [Way::V4, Way::V6, Way::Mapped] {
        let [mut tcp, mut connected, mut unconnected] = [const { BTreeSet::new() }; 3];
        // The probability that one of three backends is never chosen in 60 attempts is 10^-10.
        for _ in 0..60 {
            tcp.insert(way.dial(&scene.client, WEB, HTTP)?);
            let socket = way.udp(&scene.client)?;
            unconnected.insert(ask_to(&socket, way.to(WEB, DNS))?.0);
            connected.insert(ask(&way.connected(&scene.client, WEB, DNS)?)?);
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
    let reasons = [
        "translated_untracked",
        "socket_storage_full",
        "socket_tracked",
    ];
    let room = "net.core.optmem_max";
    let before = run(&scene.client, "cat /proc/sys/net/core/optmem_max")?;
    scene.client.sysctl(room, "1")?;

    for way in Way::TCP {
        let (stream, grown) = counted(&scene.node, &reasons, || {
            Ok(way.connect(&scene.client, WEB, HTTP)?)
        })?;
        same("counted", grown, vec![1, 0, 0])?;
        // Without socket storage, the peer is the backend itself.
        same("port", stream.peer_addr()?.port(), HTTP_TARGET)?;
        ensure!(!http(stream)?.is_empty());
    }
    for way in Way::UDP {
        let (failed, grown) = counted(&scene.node, &reasons, || {
            let socket = way.udp(&scene.client)?;
            let to = way.to(WEB, DNS);
            let refused = [socket.connect(to), socket.send_to(b"who?", to).map(drop)];
            Ok(refused.map(errno))
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
