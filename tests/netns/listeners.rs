//! A Service whose address this node has too, and where something of it listens itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tunnel_tests::{
    place::{ANSWER, Place},
    wait,
};

use crate::{
    scene::Scene,
    support::{CHANGE, DNS, HTTP, Vip, Way, ask_to, http, ports, receive, same},
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
    address(&scene, "add", "nodad")?;
    Ok(scene)
}

/// Gives the link the address, or takes it away.
fn address(scene: &Scene, what: &str, how: &str) -> Result<()> {
    let Vip { v4, v6 } = CACHED;
    let host = scene.node.host();
    host.ip(&format!("addr {what} {v4}/32 dev lo"))?;
    host.ip(&format!("addr {what} {v6}/128 dev lo {how}"))
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
    let stream = way.connect(place, CACHED, HTTP)?;
    same("server", http(stream)?.as_str(), "backend")
}

fn backend_over_udp(place: &Place, way: Way) -> Result<()> {
    let (name, from) = ask_to(&way.udp(place)?, way.to(CACHED, DNS))?;
    same("server", name.as_str(), "backend")?;
    same("sender", from, way.shown(CACHED, DNS))
}

/// What listens on the host, over TCP and UDP, at one address of each family.
struct Cache {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl Cache {
    fn on(host: &Place, at: [IpAddr; 2]) -> Result<Self> {
        let [v4, v6] = at;
        let tcp = |at| -> Result<TcpListener> {
            let listener = host.listen((at, HTTP))?;
            SockRef::from(&listener).set_read_timeout(Some(ANSWER))?;
            Ok(listener)
        };
        Ok(Self {
            tcp: [tcp(v4)?, tcp(v6)?],
            udp: [host.udp((v4, DNS))?, host.udp((v6, DNS))?],
        })
    }

    const fn number(way: Way) -> usize {
        match way {
            Way::V4 | Way::Mapped | Way::V4OnV6 => 0,
            Way::V6 => 1,
        }
    }

    /// A connect comes here.
    fn accepts(&self, place: &Place, way: Way) -> Result<()> {
        let stream = way.connect(place, CACHED, HTTP)?;
        same("peer", stream.peer_addr()?, way.shown(CACHED, HTTP))?;
        let (_, from) = self.tcp[Self::number(way)].accept().context("accept")?;
        let own = stream.local_addr()?;
        same("port", from.port(), own.port())?;
        same("client", from.ip(), own.ip().to_canonical())
    }

    /// A datagram comes here, and its answer back.
    fn answers(&self, place: &Place, way: Way) -> Result<()> {
        let socket = way.udp(place)?;
        socket.send_to(b"who?", way.to(CACHED, DNS))?;
        let udp = &self.udp[Self::number(way)];
        let (_, from) = udp.recv_from(&mut [0; 16]).context("receive")?;
        udp.send_to(b"cache who?", from)?;
        let (name, from) = receive(&socket)?;
        same("server", name.as_str(), "cache")?;
        same("sender", from, way.shown(CACHED, DNS))
    }
}

#[test]
fn sockets_reach_what_listens_on_the_address_of_a_service_here_and_backends_when_it_has_gone()
-> Result<()> {
    let scene = prepared()?;
    let cached = [CACHED.v4.into(), CACHED.v6.into()];
    scene.node.start()?;
    dial(&scene, backend_over_tcp, backend_over_udp)?;

    let cache = Cache::on(scene.node.host(), cached)?;
    until_listener(&scene, true)?;
    dial(
        &scene,
        |place, way| cache.accepts(place, way),
        |place, way| cache.answers(place, way),
    )?;
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
    let cached = [CACHED.v4.into(), CACHED.v6.into()];
    let cache = Cache::on(scene.node.host(), cached)?;
    let to_cache = || {
        dial(
            &scene,
            |place, way| cache.accepts(place, way),
            |place, way| cache.answers(place, way),
        )
    };

    scene.node.start()?;
    to_cache()?;

    scene.node.stop()?;
    scene.node.start()?;
    to_cache()?;
    let logs = scene.node.logs();
    ensure!(!logs.contains("listens there no more"), "{logs}");

    // An address that has gone from the link leads to the backends again, whoever listens.
    address(&scene, "del", "")?;
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
