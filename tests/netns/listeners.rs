//! A Service whose address this node has too, and where something of it listens itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{place::Place, wait};

use crate::{
    scene::Scene,
    support::{CHANGE, DNS, HTTP, Listening, Vip, Way, ports, receive, same},
};

/// An address that pods have a way to: it is not of the range of Services, which leads nowhere.
const CACHED: Vip = Vip {
    v4: Ipv4Addr::new(169, 254, 20, 10),
    v6: Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 0x10),
};
const NAME: &str = "cached";

/// A Service with a backend, at an address that the node's loopback link has too.
fn prepared() -> Result<Scene> {
    let scene = Scene::new(&["backend"])?;
    scene
        .node
        .apply(CACHED.service(NAME).backends(scene.all()))?;
    CACHED.add_to(scene.node.host(), "lo")?;
    Ok(scene)
}

/// From each place, in each way of TCP and UDP.
fn dial(
    scene: &Scene,
    tcp: impl Fn(&Place, Way) -> Result<()>,
    udp: impl Fn(&Place, Way) -> Result<()>,
) -> Result<()> {
    scene.each(&Way::TCP, tcp).context("TCP")?;
    scene.each(&Way::UDP, udp).context("UDP")
}

/// Waits until the daemon says of all fronts whether this node listens there, or doesn't.
fn until_listener(scene: &Scene, is_there: bool) -> Result<()> {
    let known = || {
        let services = scene.node.services().unwrap_or_default();
        let ports = ports(&services, NAME);
        let fronts = ports.iter().filter_map(|port| port["fronts"].as_array());
        let fronts: Vec<_> = fronts.flatten().collect();
        fronts.len() == 4 && fronts.iter().all(|front| front["hasListener"] == is_there)
    };
    wait::until(CHANGE, known).with_context(|| format!("listeners are not {is_there}"))
}

fn backend_over_tcp(place: &Place, way: Way) -> Result<()> {
    way.is_served(place, CACHED, HTTP, "backend")
}

fn backend_over_udp(place: &Place, way: Way) -> Result<()> {
    way.is_answered(&way.udp(place)?, CACHED, DNS, "backend")
}

/// What listens on the host at the address of the Service.
struct Cache(Listening);

impl Cache {
    fn on(host: &Place) -> Result<Self> {
        Listening::at(host, CACHED.ips(), [HTTP, DNS]).map(Self)
    }

    /// Gets what is dialled from each place, in each way of TCP and UDP.
    fn is_dialled(&self, scene: &Scene) -> Result<()> {
        dial(
            scene,
            |place, way| self.accepts(place, way),
            |place, way| self.answers(place, way),
        )
    }

    /// A connect comes here.
    fn accepts(&self, place: &Place, way: Way) -> Result<()> {
        let stream = way.connect(place, CACHED, HTTP)?;
        same("peer", stream.peer_addr()?, way.shown(CACHED, HTTP))?;
        let from = self.0.accept(way)?;
        let own = stream.local_addr()?;
        same("port", from.port(), own.port())?;
        same("client", from.ip(), own.ip().to_canonical())
    }

    /// A datagram comes here, and its answer back.
    fn answers(&self, place: &Place, way: Way) -> Result<()> {
        let socket = way.udp(place)?;
        socket.send_to(b"who?", way.to(CACHED, DNS))?;
        let udp = self.0.udp(way);
        let (_, from) = udp.recv_from(&mut [0; 16]).context("receive")?;
        udp.send_to(b"cache who?", from)?;
        let expected = ("cache".to_owned(), way.shown(CACHED, DNS));
        same("answer", receive(&socket)?, expected)
    }
}

#[test]
fn sockets_reach_what_listens_on_the_address_of_a_service_here_and_backends_when_it_has_gone()
-> Result<()> {
    let scene = prepared()?;
    scene.node.start()?;
    dial(&scene, backend_over_tcp, backend_over_udp)?;

    let cache = Cache::on(scene.node.host())?;
    until_listener(&scene, true)?;
    cache.is_dialled(&scene)?;
    let shown = scene.node.culvert(&["services", NAME])?.stdout;
    let told = shown.matches("left alone: this node listens there itself");
    ensure!(told.count() == 8, "four states and four fronts:\n{shown}");

    drop(cache);
    until_listener(&scene, false)?;
    dial(&scene, backend_over_tcp, backend_over_udp)
}

#[test]
fn what_listens_before_the_daemon_is_left_alone_from_its_first_write() -> Result<()> {
    let scene = prepared()?;
    let cache = Cache::on(scene.node.host())?;

    scene.node.start()?;
    cache.is_dialled(&scene)?;

    scene.node.stop()?;
    scene.node.start()?;
    cache.is_dialled(&scene)?;
    let logs = scene.node.logs();
    ensure!(!logs.contains("listens there no more"), "{logs}");

    // An address that has gone from the link leads to the backends again, whoever listens.
    CACHED.delete_from(scene.node.host(), "lo")?;
    until_listener(&scene, false)?;
    dial(&scene, backend_over_tcp, backend_over_udp)
}

#[test]
fn what_listens_on_all_addresses_of_the_node_takes_no_service() -> Result<()> {
    let scene = prepared()?;
    let host = scene.node.host();
    let all: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    for all in all {
        let _everywhere = (host.listen((all, HTTP))?, host.udp((all, DNS))?);
        scene.node.start()?;
        dial(&scene, backend_over_tcp, backend_over_udp)
            .with_context(|| format!("while {all} is listened on"))?;
        scene.node.stop()?;
    }
    Ok(())
}
