//! Services whose address the node itself has, with a local listener on that address.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tunnel_tests::place::{ANSWER, Place};
use tunnel_userspace::model::Family;

use crate::{
    scene::Scene,
    support::{DNS, HTTP, Vip, Way, ports, receive, same, until_same},
};

/// The Service's addresses. They are not in the range of ClusterIPs, to which pods have no route.
const CACHED: Vip = Vip {
    v4: Ipv4Addr::new(169, 254, 20, 10),
    v6: Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 0x10),
};
const NAME: &str = "cached";

/// Creates a node with a Service whose addresses are also on the node's loopback interface.
fn prepared() -> Result<Scene> {
    let scene = Scene::new(&["backend"])?;
    scene.lead(CACHED, NAME, &["backend"])?;
    CACHED.add_to(scene.node.host(), "lo")?;
    Ok(scene)
}

/// Waits until the status reports a local listener for each frontend, or for no frontend.
fn until_listener(scene: &Scene, is_there: bool) -> Result<()> {
    until_same("listeners", vec![is_there; 4], || {
        let ports = ports(&scene.node.services()?, NAME);
        let fronts = ports.iter().filter_map(|port| port["frontends"].as_array());
        let has_listener = fronts.flatten().map(|front| front["localListener"].clone());
        Ok(has_listener.collect::<Vec<_>>())
    })
}

/// Dials the Service from the host and the client pod, over TCP and UDP; expects answers from the
/// backend.
fn backend_is_dialled(scene: &Scene) -> Result<()> {
    scene.reaches(CACHED, "backend")?;
    scene.each(&Way::UDP, |place, way| {
        way.is_answered(&way.udp(place)?, CACHED, DNS, "backend")
    })
}

/// The TCP and UDP sockets with which a test listens in a place, on one address of each family.
pub(crate) struct Listening {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl Listening {
    pub(crate) fn at(place: &Place, ips: [IpAddr; 2], [http, dns]: [u16; 2]) -> Result<Self> {
        let tcp = ips.map(|ip| {
            let listener = place.listen((ip, http))?;
            SockRef::from(&listener).set_read_timeout(Some(ANSWER))?;
            io::Result::Ok(listener)
        });
        let udp = ips.map(|ip| place.udp((ip, dns)));
        let ([tcp4, tcp6], [udp4, udp6]) = (tcp, udp);
        Ok(Self {
            tcp: [tcp4?, tcp6?],
            udp: [udp4?, udp6?],
        })
    }

    /// Accepts the next connection of this dialer's family; returns the client's address.
    pub(crate) fn accept(&self, way: Way) -> Result<SocketAddr> {
        let listener = of_family(&self.tcp, way);
        Ok(listener.accept().context("accept")?.1)
    }

    /// Returns the socket that receives the datagrams of this dialer.
    pub(crate) const fn udp(&self, way: Way) -> &UdpSocket {
        of_family(&self.udp, way)
    }
}

const fn of_family<T>([v4, v6]: &[T; 2], way: Way) -> &T {
    match way.family() {
        Family::V4 => v4,
        Family::V6 => v6,
    }
}

/// Listeners on the host at the addresses of the Service, like a node-local DNS cache.
struct Cache(Listening);

impl Cache {
    fn on(host: &Place) -> Result<Self> {
        Listening::at(host, CACHED.ips(), [HTTP, DNS]).map(Self)
    }

    /// Dials the Service from the host and the client pod, over TCP and UDP; expects all connections and
/// datagrams to arrive at these listeners.
    fn is_dialled(&self, scene: &Scene) -> Result<()> {
        scene.each(&Way::TCP, |place, way| self.accepts(place, way))?;
        scene.each(&Way::UDP, |place, way| self.answers(place, way))
    }

    /// Connects to the Service; expects the connection to arrive at these listeners.
    fn accepts(&self, place: &Place, way: Way) -> Result<()> {
        let stream = way.connect(place, CACHED, HTTP)?;
        same("peer", stream.peer_addr()?, way.shown(CACHED, HTTP))?;
        let from = self.0.accept(way)?;
        let own = stream.local_addr()?;
        same("port", from.port(), own.port())?;
        same("client", from.ip(), own.ip().to_canonical())
    }

    /// Sends a datagram to the Service; expects it to arrive at these listeners, and their answer to return.
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
    backend_is_dialled(&scene)?;

    let cache = Cache::on(scene.node.host())?;
    until_listener(&scene, true)?;
    cache.is_dialled(&scene)?;
    let shown = scene.node.culvert(&["services", NAME])?.stdout;
    let told = shown.matches("not translated: local listener");
    ensure!(told.count() == 8, "expected the words for four states and four frontends:\n{shown}");

    drop(cache);
    until_listener(&scene, false)?;
    backend_is_dialled(&scene)
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
    ensure!(!logs.contains("local listener gone"), "{logs}");

    // Once the address is removed from the interface, the Service leads to its backends again, even with
    // listeners.
    CACHED.delete_from(scene.node.host(), "lo")?;
    until_listener(&scene, false)?;
    backend_is_dialled(&scene)
}

#[test]
fn what_listens_on_all_addresses_of_the_node_takes_no_service() -> Result<()> {
    let scene = prepared()?;
    let host = scene.node.host();
    for all in ["0.0.0.0", "::"] {
        let _everywhere = (host.listen((all, HTTP))?, host.udp((all, DNS))?);
        scene.node.start()?;
        let dialled = backend_is_dialled(&scene);
        dialled.with_context(|| format!("with a listener on {all}"))?;
        scene.node.stop()?;
    }
    Ok(())
}
