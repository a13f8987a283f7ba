//! Tests Services whose address is also assigned to the node, where a local process listens on it.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::sandbox::{RESPONSE_TIMEOUT, Sandbox};
use tunnel_userspace::model::Family;

use crate::{
    fixture::Scene,
    support::{DNS, Dialer, HTTP, Vip, ensure_eq, ports, receive, until_eq},
};

/// The Service's addresses. They are outside the ClusterIP range, for which pods have no route.
pub(crate) const CACHED: Vip = Vip {
    v4: Ipv4Addr::new(198, 51, 100, 10),
    v6: Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 0x10),
};
pub(crate) const NAME: &str = "cached";

/// Creates a node with a Service whose addresses are also assigned to the node's loopback interface, and with
/// the given line in the config's `service` section.
pub(crate) fn prepared(setting: &str) -> Result<Scene> {
    let scene = Scene::with(&["backend"], |settings| {
        setting.clone_into(&mut settings.node_ports);
    })?;
    scene.apply_service(CACHED, NAME, &["backend"])?;
    CACHED.add_to(scene.node.host(), "lo")?;
    Ok(scene)
}

/// Waits until the status reports a local listener for every frontend, or for none of them.
pub(crate) fn until_listener(scene: &Scene, is_there: bool) -> Result<()> {
    until_eq("listeners", vec![is_there; 4], || {
        let ports = ports(&scene.node.services()?, NAME);
        let frontends = ports.iter().filter_map(|port| port["frontends"].as_array());
        let has_listener = frontends
            .flatten()
            .map(|frontend| frontend["localListener"].clone());
        Ok(has_listener.collect::<Vec<_>>())
    })
}

/// Dials the Service from the host and from the client pod, over TCP and UDP. The backend must answer.
pub(crate) fn expect_backend(scene: &Scene) -> Result<()> {
    scene.expect_served(CACHED, "backend")?;
    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        dialer.expect_answer(&dialer.udp_socket(sandbox)?, CACHED, DNS, "backend")
    })
}

/// TCP and UDP sockets that a test listens on in a sandbox, at one IPv4 and one IPv6 address.
pub(crate) struct TestListeners {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl TestListeners {
    pub(crate) fn at(sandbox: &Sandbox, ips: [IpAddr; 2], ports: [u16; 2]) -> Result<Self> {
        Self::of_user(sandbox, ips, ports, 0)
    }

    /// Listens with sockets that belong to a user.
    fn of_user(
        sandbox: &Sandbox,
        ips: [IpAddr; 2],
        [http, dns]: [u16; 2],
        user: u32,
    ) -> Result<Self> {
        let bind = |ip: IpAddr, kind, port| {
            let socket =
                sandbox.socket_of_user(Domain::for_address((ip, port).into()), kind, user)?;
            socket.set_reuse_address(kind == Type::STREAM)?;
            socket.bind(&SocketAddr::from((ip, port)).into())?;
            socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
            io::Result::Ok(socket)
        };
        let tcp = ips.map(|ip| {
            let socket = bind(ip, Type::STREAM, http)?;
            socket.listen(BACKLOG)?;
            io::Result::Ok(TcpListener::from(socket))
        });
        let udp = ips.map(|ip| bind(ip, Type::DGRAM, dns).map(UdpSocket::from));
        let ([tcp4, tcp6], [udp4, udp6]) = (tcp, udp);
        Ok(Self {
            tcp: [tcp4?, tcp6?],
            udp: [udp4?, udp6?],
        })
    }

    /// Accepts the next connection in the dialer's address family, and returns the client's address.
    pub(crate) fn accept(&self, dialer: Dialer) -> Result<SocketAddr> {
        let listener = of_family(&self.tcp, dialer);
        Ok(listener.accept().context("accept")?.1)
    }

    /// Returns the socket that receives the dialer's datagrams.
    pub(crate) const fn udp(&self, dialer: Dialer) -> &UdpSocket {
        of_family(&self.udp, dialer)
    }
}

/// The accept backlog of the listeners.
const BACKLOG: i32 = 1024;

const fn of_family<T>([v4, v6]: &[T; 2], dialer: Dialer) -> &T {
    match dialer.family() {
        Family::V4 => v4,
        Family::V6 => v6,
    }
}

/// Listeners on the host at the Service's addresses, like a node-local DNS cache's.
pub(crate) struct NodeLocalCache(TestListeners);

impl NodeLocalCache {
    pub(crate) fn on(host: &Sandbox) -> Result<Self> {
        TestListeners::at(host, CACHED.ips(), [HTTP, DNS]).map(Self)
    }

    /// Listens with sockets that belong to a user.
    pub(crate) fn of_user(host: &Sandbox, user: u32) -> Result<Self> {
        TestListeners::of_user(host, CACHED.ips(), [HTTP, DNS], user).map(Self)
    }

    /// Dials the Service from the host and from the client pod, over TCP and UDP. All connections and
    /// datagrams must arrive at these listeners.
    pub(crate) fn expect_all_traffic(&self, scene: &Scene) -> Result<()> {
        scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
            self.expect_connection(sandbox, dialer)
        })?;
        scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
            self.expect_datagram(sandbox, dialer)
        })
    }

    /// Connects to the Service; these listeners must accept the connection.
    fn expect_connection(&self, sandbox: &Sandbox, dialer: Dialer) -> Result<()> {
        let stream = dialer.connect(sandbox, CACHED, HTTP)?;
        ensure_eq(
            "peer",
            stream.peer_addr()?,
            dialer.reported_address(CACHED, HTTP),
        )?;
        let from = self.0.accept(dialer)?;
        let own = stream.local_addr()?;
        ensure_eq("port", from.port(), own.port())?;
        ensure_eq("client", from.ip(), own.ip().to_canonical())
    }

    /// Sends a datagram to the Service. It must arrive at these listeners, and their reply must reach the
    /// client.
    fn expect_datagram(&self, sandbox: &Sandbox, dialer: Dialer) -> Result<()> {
        let socket = dialer.udp_socket(sandbox)?;
        socket.send_to(b"who?", dialer.address(CACHED, DNS))?;
        let udp = self.0.udp(dialer);
        let (_, from) = udp.recv_from(&mut [0; 16]).context("receive")?;
        udp.send_to(b"cache who?", from)?;
        let expected = ("cache".to_owned(), dialer.reported_address(CACHED, DNS));
        ensure_eq("answer", receive(&socket)?, expected)
    }
}

#[test]
fn sockets_reach_a_local_listener_at_a_service_address_and_backends_once_it_is_closed() -> Result<()>
{
    let scene = prepared("")?;
    scene.node.start()?;
    expect_backend(&scene)?;

    let cache = NodeLocalCache::on(scene.node.host())?;
    until_listener(&scene, true)?;
    cache.expect_all_traffic(&scene)?;
    let status = scene.node.culvert(&["services", NAME])?.stdout;
    let words = status.matches("not translated: local listener");
    ensure!(
        words.count() == 8,
        "expected the words for four states and four frontends:\n{status}"
    );

    drop(cache);
    until_listener(&scene, false)?;
    expect_backend(&scene)
}

#[test]
fn a_listener_from_before_the_start_is_left_alone_from_the_first_write() -> Result<()> {
    let scene = prepared("")?;
    let cache = NodeLocalCache::on(scene.node.host())?;

    scene.node.start()?;
    cache.expect_all_traffic(&scene)?;

    scene.node.stop()?;
    scene.node.start()?;
    cache.expect_all_traffic(&scene)?;
    let logs = scene.node.logs();
    ensure!(!logs.contains("local listener gone"), "{logs}");

    // Once the addresses are removed from the interface, the Service leads to its backends again, even though
    // the sockets are still listening.
    CACHED.delete_from(scene.node.host(), "lo")?;
    until_listener(&scene, false)?;
    expect_backend(&scene)
}

#[test]
fn a_listener_on_all_addresses_gets_no_connects_to_a_service() -> Result<()> {
    let scene = prepared("")?;
    let host = scene.node.host();
    for all in ["0.0.0.0", "::"] {
        let _everywhere = (host.listen((all, HTTP))?, host.udp((all, DNS))?);
        scene.node.start()?;
        let dialled = expect_backend(&scene);
        dialled.with_context(|| format!("with a listener on {all}"))?;
        scene.node.stop()?;
    }
    Ok(())
}
