//! A Service whose address this node has too, and where something of it listens itself.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tunnel_tests::{
    node::Node,
    place::{ANSWER, Place},
    pod::{Pod, Server},
    wait,
};

use crate::support::{
    CHANGE, DNS, HTTP, Vip, Way, addresses, ask_to, clients, http, ports, receive, same, serve,
};

/// An address that pods have a way to: it is not of the range of Services, which leads nowhere.
const CACHED: Vip = Vip {
    v4: Ipv4Addr::new(169, 254, 20, 10),
    v6: Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 0x10),
};
const NAME: &str = "cached";

/// A Service with a backend, at an address that the node's loopback link has too.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    _serving: Server,
}

impl Stage {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let (client, backend) = (node.pod("client")?, node.pod("backend")?);
        let serving = serve(&backend)?;
        let service = CACHED.service(NAME);
        node.apply(service.backends(addresses(&[&backend])))?;
        let stage = Self {
            node,
            client,
            _serving: serving,
        };
        stage.address("add", "nodad")?;
        Ok(stage)
    }

    /// Gives the link the address, or takes it away.
    fn address(&self, what: &str, how: &str) -> Result<()> {
        let Vip { v4, v6 } = CACHED;
        let host = self.node.host();
        host.ip(&format!("addr {what} {v4}/32 dev lo"))?;
        host.ip(&format!("addr {what} {v6}/128 dev lo {how}"))
    }

    /// Each place, and each way of TCP and UDP from there.
    fn each(
        &self,
        tcp: impl Fn(&Place, Way) -> Result<()>,
        udp: impl Fn(&Place, Way) -> Result<()>,
    ) -> Result<()> {
        for (name, place) in clients(self.node.host(), &self.client) {
            for way in Way::TCP {
                tcp(place, way).with_context(|| format!("{way:?}, TCP from the {name}"))?;
            }
            for way in Way::UDP {
                udp(place, way).with_context(|| format!("{way:?}, UDP from the {name}"))?;
            }
        }
        Ok(())
    }

    /// Waits until the daemon says of all fronts whether this node listens there, or doesn't.
    fn until_listener(&self, is_there: bool) -> Result<()> {
        let known = || {
            let services = self.node.services().unwrap_or_default();
            let ports = ports(&services, NAME);
            let fronts = ports.iter().filter_map(|port| port["fronts"].as_array());
            let fronts: Vec<_> = fronts.flatten().collect();
            fronts.len() == 4 && fronts.iter().all(|front| front["hasListener"] == is_there)
        };
        wait::until(CHANGE, known).with_context(|| format!("listeners are not {is_there}"))
    }
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
    let stage = Stage::new()?;
    let cached = [CACHED.v4.into(), CACHED.v6.into()];
    stage.node.start()?;
    stage.each(backend_over_tcp, backend_over_udp)?;

    let cache = Cache::on(stage.node.host(), cached)?;
    stage.until_listener(true)?;
    stage.each(
        |place, way| cache.accepts(place, way),
        |place, way| cache.answers(place, way),
    )?;
    let shown = stage.node.culvert(&["services", NAME])?.stdout;
    let told = shown.matches("left alone: this node listens there itself");
    ensure!(told.count() == 8, "four states and four fronts:\n{shown}");

    drop(cache);
    stage.until_listener(false)?;
    stage.each(backend_over_tcp, backend_over_udp)
}

#[test]
fn what_listens_before_the_daemon_is_left_alone_from_its_first_write() -> Result<()> {
    let stage = Stage::new()?;
    let cached = [CACHED.v4.into(), CACHED.v6.into()];
    let cache = Cache::on(stage.node.host(), cached)?;
    let to_cache = || {
        stage.each(
            |place, way| cache.accepts(place, way),
            |place, way| cache.answers(place, way),
        )
    };

    stage.node.start()?;
    to_cache()?;

    stage.node.stop()?;
    stage.node.start()?;
    to_cache()?;
    let logs = stage.node.logs();
    ensure!(!logs.contains("listens there no more"), "{logs}");

    // An address that has gone from the link leads to the backends again, whoever listens.
    stage.address("del", "")?;
    stage.until_listener(false)?;
    stage.each(backend_over_tcp, backend_over_udp)
}

#[test]
fn what_listens_on_all_addresses_of_the_node_takes_no_service() -> Result<()> {
    let stage = Stage::new()?;
    let host = stage.node.host();
    let all: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    for all in all {
        let _everywhere = (host.listen((all, HTTP))?, host.udp((all, DNS))?);
        stage.node.start()?;
        stage
            .each(backend_over_tcp, backend_over_udp)
            .with_context(|| format!("while {all} is listened on"))?;
        stage.node.stop()?;
    }
    Ok(())
}
