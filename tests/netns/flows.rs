//! What a UDP socket remembers of its choice, and what becomes of sockets that can't remember.

use std::{collections::BTreeSet, net::UdpSocket, sync::Arc};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    feature::{self, Feature},
    manifest::Service,
    node::Node,
    pod::Pod,
    test_name, wait,
};

use crate::support::{
    Backends, CHANGE, DNS, HTTP, HTTP_TARGET, Vip, Way, ask, ask_to, counted, errno, http, ports,
    same, until_backends,
};

const WEB: Vip = Vip::of(10);

/// A node with a client, and a Service with three backends.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    backends: Backends,
}

impl Stage {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let client = node.pod("client")?;
        let backends = Backends::new(&node, &["one", "two", "three"])?;
        let stage = Self {
            node,
            client,
            backends,
        };
        stage.node.apply(stage.without(""))?;
        stage.node.start()?;
        Ok(stage)
    }

    /// The Service without the backend of this name.
    fn without(&self, name: &str) -> Service {
        WEB.service("web").backends(self.backends.without(name))
    }

    /// The addresses of the backend of this name.
    fn addresses_of(&self, name: &str) -> Result<Vip> {
        Ok(Vip::of_pod(self.backends.named(name)?))
    }

    /// Waits until the Service has no backend any more that is only finishing what it has.
    fn until_left(&self) -> Result<()> {
        wait::until(CHANGE, || {
            let services = self.node.services().unwrap_or_default();
            let ports = ports(&services, "web");
            let is_empty =
                |port: &serde_json::Value| port["leaving"].as_array().is_some_and(Vec::is_empty);
            !ports.is_empty() && ports.iter().all(is_empty)
        })
    }
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
    let stage = Stage::new()?;

    for way in Way::UDP {
        let socket = way.udp(&stage.client)?;
        let (first, grown) = counted(&stage.node, &["translated", "translated_sticky"], || {
            steady(&socket, way, 100)
        })?;
        same("counted", grown, vec![1, 99])?;

        let leaving = stage.addresses_of(&first)?;
        let terminating = stage
            .without(&first)
            .terminating(leaving.v4.into())
            .terminating(leaving.v6.into());
        stage.node.apply(terminating)?;
        until_backends(&stage.node, "web", 2)?;
        same("while it ends", steady(&socket, way, 10)?, first.clone())?;
        for _ in 0..20 {
            let fresh = ask_to(&way.udp(&stage.client)?, way.to(WEB, DNS))?.0;
            ensure!(
                fresh != first,
                "a new socket was sent to a backend that ends"
            );
        }

        stage.node.apply(stage.without(&first))?;
        stage.until_left()?;
        let second = steady(&socket, way, 10)?;
        ensure!(second != first, "still at {first}, which has gone");

        stage.node.apply(stage.without(""))?;
        until_backends(&stage.node, "web", 3)?;
        same("after its return", steady(&socket, way, 10)?, second)?;
    }
    Ok(())
}

#[test]
fn new_sockets_are_spread_over_all_backends() -> Result<()> {
    let stage = Stage::new()?;
    for way in [Way::V4, Way::V6, Way::Mapped] {
        let mut tcp = BTreeSet::new();
        let mut connected = BTreeSet::new();
        let mut unconnected = BTreeSet::new();
        // The chance that one of three isn't met in 60 tries is 10^-10.
        for _ in 0..60 {
            tcp.insert(http(way.connect(&stage.client, WEB, HTTP)?)?);
            let socket = way.udp(&stage.client)?;
            unconnected.insert(ask_to(&socket, way.to(WEB, DNS))?.0);
            let socket = way.udp(&stage.client)?;
            socket.connect(way.to(WEB, DNS))?;
            connected.insert(ask(&socket)?);
        }
        let servers = [tcp.len(), connected.len(), unconnected.len()];
        same("servers", servers, [3; 3])?;
    }
    Ok(())
}

#[test]
fn a_socket_without_room_to_remember_is_counted_and_udp_is_refused() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::OwnOptmem])? {
        return Ok(());
    }
    let stage = Stage::new()?;
    let reasons = ["translated_untracked", "storage_full", "socket_tracked"];
    let room = "net.core.optmem_max";
    let before = stage
        .client
        .run(&["cat", "/proc/sys/net/core/optmem_max"])?;
    stage.client.sysctl(room, "1")?;

    for way in Way::TCP {
        let (stream, grown) = counted(&stage.node, &reasons, || {
            Ok(way.connect(&stage.client, WEB, HTTP)?)
        })?;
        same("counted", grown, vec![1, 0, 0])?;
        // Nothing is remembered, so the peer is who it is.
        same("port", stream.peer_addr()?.port(), HTTP_TARGET)?;
        ensure!(!http(stream)?.is_empty());
    }
    for way in Way::UDP {
        let (failed, grown) = counted(&stage.node, &reasons, || {
            let socket = way.udp(&stage.client)?;
            let to = way.to(WEB, DNS);
            Ok([
                errno(socket.connect(to)),
                errno(socket.send_to(b"who?", to)),
            ])
        })?;
        same("errors", failed, [Errno::ENOMEM; 2])?;
        same("counted", grown, vec![0, 2, 0])?;
    }

    stage.client.sysctl(room, before.trim())?;
    for way in Way::TCP {
        let (stream, grown) = counted(&stage.node, &reasons, || {
            Ok(way.connect(&stage.client, WEB, HTTP)?)
        })?;
        same("counted", grown, vec![0, 0, 1])?;
        same("peer", stream.peer_addr()?, way.shown(WEB, HTTP))?;
    }
    Ok(())
}
