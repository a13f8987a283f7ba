//! The fixture for the first part of the demo: a node, its pods, their servers, and the manifests.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use anyhow::Result;
use tunnel_tests::{
    culvert_instance::{self, InstanceSettings},
    manifest::{Protocol, Service},
    node::Node,
    node_network,
    pod::{Pod, Server},
    server::{Listener, ServerKind},
};

const fn v4(last: u8, port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 96, 0, last)), port)
}

const fn v6(last: u16, port: u16) -> SocketAddr {
    let address = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, last);
    SocketAddr::new(std::net::IpAddr::V6(address), port)
}

/// The IPv4 address and port of the Service `web`.
pub(crate) const VIP_WEB: SocketAddr = v4(10, 80);
/// The IPv6 address and port of the Service `web`.
pub(crate) const VIP_WEB6: SocketAddr = v6(0x10, 80);
/// The IPv4 address and port of the Service `dns`.
pub(crate) const VIP_DNS: SocketAddr = v4(53, 53);
/// The IPv6 address and port of the Service `dns`.
pub(crate) const VIP_DNS6: SocketAddr = v6(0x53, 53);
/// The node port of the Service `web`.
pub(crate) const NODE_WEB: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(node_network::HOST_V4), 30_080);
/// The load balancer's address and the port of the Service `web`.
pub(crate) const BALANCER_WEB: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(198, 51, 100, 80)), 80);
/// The address and port of the Service `empty`, which has no endpoints.
pub(crate) const VIP_EMPTY: SocketAddr = v4(30, 80);

const HTTP: u16 = 8080;
const UDP: u16 = 5353;
const BACKENDS: usize = 4;

/// The node and its pods.
#[derive(Debug)]
pub(crate) struct Fixture {
    /// The servers in the backend pods, in the same order as `backends`.
    pub(crate) servers: Vec<Server>,
    backends: Vec<Arc<Pod>>,
    /// The client pods.
    pub(crate) clients: [Arc<Pod>; 2],
    /// The node.
    pub(crate) node: Node,
}

impl Fixture {
    /// Creates the node, starts the servers and writes the manifests, but does not start the daemon.
    pub(crate) fn new(settings: InstanceSettings) -> Result<Self> {
        let node = Node::with_settings(settings)?;
        let clients = [node.pod("client-1")?, node.pod("client-2")?];
        let mut backends = Vec::new();
        let mut servers = Vec::new();
        for number in 1..=BACKENDS {
            let pod = node.pod(&format!("backend-{number}"))?;
            servers.push(pod.serve(&[
                Listener::new(ServerKind::Http, HTTP).for_service("web"),
                Listener::new(ServerKind::Udp, UDP).for_service("dns"),
            ])?);
            backends.push(pod);
        }
        let fixture = Self {
            servers,
            backends,
            clients,
            node,
        };
        fixture.apply_web(&[1, 2, 3])?;
        let dns = Service::new("dns", [VIP_DNS.ip(), VIP_DNS6.ip()]).port(Protocol::UDP, 53, UDP);
        fixture.node.apply(fixture.with_backends(dns, &[1, 2]))?;
        let empty = Service::cluster_ip("empty", VIP_EMPTY, Protocol::TCP);
        fixture.node.apply(empty)?;
        Ok(fixture)
    }

    /// Writes the manifest for the Service `web` with the given backends, which are numbered from 1.
    pub(crate) fn apply_web(&self, backends: &[usize]) -> Result<()> {
        let web = Service::new("web", [VIP_WEB.ip(), VIP_WEB6.ip()])
            .port(Protocol::TCP, 80, HTTP)
            .node_port(NODE_WEB.port())
            .load_balancer(&format!("{{ ip: {} }}", BALANCER_WEB.ip()))
            .spec("externalTrafficPolicy: Local")
            .on_node(culvert_instance::NODE_NAME);
        self.node.apply(self.with_backends(web, backends))
    }

    fn with_backends(&self, service: Service, backends: &[usize]) -> Service {
        let chosen = backends.iter().map(|number| &self.backends[number - 1]);
        let with = |service: Service, pod: &Arc<Pod>| service.backends([pod.v4(), pod.v6()]);
        chosen.fold(service, with)
    }

    /// Lists the files in the manifest directory.
    pub(crate) fn manifests(&self) -> Result<String> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.node.manifests())? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(format!("manifests: {}", names.join(", ")))
    }
}
