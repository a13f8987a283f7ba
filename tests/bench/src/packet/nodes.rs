//! The nodes of the benchmark of packets: what translates on each of them, their Services, and their servers.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Type};
use tunnel_common::table::MapSizes;
use tunnel_tests::{
    culvert_instance::{self, InstanceSettings},
    kube_proxy_rules::{NodePortService, iptables, nft},
    manifest::{Protocol, Service},
    node::Node,
    node_network::HOST_V4,
    pod::Server,
    sandbox::{Process, RESPONSE_TIMEOUT, Sandbox, connect_within},
    server::{Listener, ServerKind},
    wait,
};

use super::refusals;
use crate::services::{files_of, service};

/// The node's address.
pub(super) const NODE: Ipv4Addr = HOST_V4;

const PORT: u16 = 80;
/// The first port of the servers. Services that a client uses have different ones, so that their connections are not one
/// connection between the node's programs.
const TARGET_PORT: u16 = 9000;

/// The address of the server on another node, and the node's address on the link to it.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);

/// The port of the server for streams of packets, and its node port.
const STREAM_PORT: u16 = 9100;
pub(super) const STREAM_NODE_PORT: u16 = 32_002;

/// The first node port for each place, and the maximum number of node ports for each.
const FIRST_NODE_PORTS: [u16; 2] = [30_000, 31_000];
const MAX_NODE_PORTS: u32 = 500;
/// The number of node ports that a client uses.
pub(super) const USED: u16 = 5;

/// The time limit for Services and rules to take effect.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The node of a backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    Here,
    Elsewhere,
}

impl Place {
    /// Services with even numbers have their backend on the node.
    const fn of(number: u32) -> Self {
        if number.is_multiple_of(2) {
            Self::Here
        } else {
            Self::Elsewhere
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Here => 0,
            Self::Elsewhere => 1,
        }
    }
}

/// The translation of packets on a node.
pub(super) enum Translator {
    None,
    EmptyPrograms,
    Culvert(u32, InstanceSettings),
    Nft(u32),
    Iptables(u32),
}

impl Translator {
    /// Returns true for the name of a node with rules like kube-proxy's.
    pub(super) fn is_rules(name: &str) -> bool {
        name.contains("nft") || name.contains("iptables")
    }
}

/// The ports that a client sends requests to, spread evenly over all node ports of a place.
pub(super) struct Ports {
    pub(super) first: u16,
    pub(super) count: u16,
    pub(super) apart: u16,
}

pub(super) fn ports(services: u32, place: Place) -> Ports {
    let all = u16::try_from(node_ports(services)).unwrap_or(u16::MAX);
    let count = all.clamp(1, USED);
    Ports {
        first: FIRST_NODE_PORTS[place.index()],
        count,
        apart: (all / count).max(1),
    }
}

/// Returns the number of node ports for each place.
fn node_ports(services: u32) -> u32 {
    (services / 2).min(MAX_NODE_PORTS)
}

/// Returns the node port of a Service. The Services that have one are spread evenly over all.
fn node_port(services: u32, number: u32) -> Option<u16> {
    let count = node_ports(services).max(1);
    let apart = (services / 2 / count).max(1);
    let pair = number / 2;
    let index = u16::try_from(pair / apart).ok()?;
    let has_port = pair.is_multiple_of(apart) && u32::from(index) < count;
    has_port.then(|| FIRST_NODE_PORTS[Place::of(number).index()] + index)
}

/// Returns the server's port for a Service.
fn target_port(services: u32, number: u32) -> u16 {
    let place = Place::of(number);
    let Some(port) = node_port(services, number) else {
        return TARGET_PORT;
    };
    let index = port - FIRST_NODE_PORTS[place.index()];
    TARGET_PORT + index / ports(services, place).apart % USED
}

/// The benchmark's nodes. They are removed on drop.
#[derive(Default)]
pub(super) struct Nodes(Vec<BenchNode>);

/// A node with its servers.
pub(super) struct BenchNode {
    name: String,
    backends: [SocketAddr; 2],
    _servers: (Server, Server),
    _processes: (Process, Option<Process>),
    _elsewhere: Sandbox,
    node: Node,
}

impl Nodes {
    /// Creates a node whose servers run on the given CPU, and waits until it translates.
    pub(super) fn create(&mut self, translator: Translator, cpu: u32) -> Result<&BenchNode> {
        let created = BenchNode::new(translator, cpu)?;
        self.0.push(created);
        self.last()
    }

    pub(super) fn last(&self) -> Result<&BenchNode> {
        self.0.last().context("there is no node")
    }
}

impl BenchNode {
    fn new(translator: Translator, cpu: u32) -> Result<Self> {
        let (settings, services) = match &translator {
            Translator::Culvert(services, settings) => {
                (with_room_for(*services, settings), Some(*services))
            }
            Translator::None | Translator::EmptyPrograms => {
                (InstanceSettings::from_environment()?, None)
            }
            Translator::Nft(services) | Translator::Iptables(services) => {
                (InstanceSettings::from_environment()?, Some(*services))
            }
        };
        let node = Node::with_settings(settings)?;
        let backend = node.pod("backend")?;
        let listeners: Vec<_> = (TARGET_PORT..TARGET_PORT + USED)
            .map(|port| Listener::new(ServerKind::Answer, port))
            .collect();
        let server = backend.serve_on(&listeners, Some(cpu))?;
        let elsewhere = create_elsewhere(&node)?;
        let directory = node.network().lab().directory();
        let remote = Server::start_in(&elsewhere, directory, "elsewhere", &listeners, Some(cpu))?;
        let streams = elsewhere
            .lab_command(&["load", "receive"])?
            .option("--port", STREAM_PORT)
            .cpu(cpu);
        let streams =
            streams.start_until("listening", &directory.join("streams.log"), READY_TIMEOUT)?;
        // The client sends single packets, however long a chunk of a stream is.
        let single = ["ip", "link", "set", "eth0", "gso_max_segs", "1"];
        node.outside().run(&single)?;
        let backends = [
            backend.addr_v4(TARGET_PORT),
            SocketAddr::from((ELSEWHERE, TARGET_PORT)),
        ];
        let (name, programs) = translate(&node, &translator, backends)?;
        let created = Self {
            name,
            backends,
            _servers: (server, remote),
            _processes: (streams, programs),
            _elsewhere: elsewhere,
            node,
        };
        for place in [Place::Here, Place::Elsewhere] {
            let to = match services {
                Some(services) => SocketAddr::from((NODE, ports(services, place).first)),
                None => created.backend(place),
            };
            wait::until(READY_TIMEOUT, || created.is_served(to))
                .with_context(|| format!("{}: no connection to {to}", created.name))?;
        }
        Ok(created)
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn client(&self) -> Sandbox {
        self.node.outside().clone()
    }

    /// Returns the sandbox of a pod that is a client.
    pub(super) fn client_pod(&self) -> Result<Sandbox> {
        Ok(Sandbox::clone(&*self.node.pod("client")?))
    }

    pub(super) const fn backend(&self, place: Place) -> SocketAddr {
        self.backends[place.index()]
    }

    /// Returns the address of the server for streams of packets, which is on another node.
    pub(super) fn streams(&self) -> SocketAddr {
        SocketAddr::from((ELSEWHERE, STREAM_PORT))
    }

    fn is_served(&self, to: SocketAddr) -> bool {
        let socket = self
            .node
            .outside()
            .socket(Domain::for_address(to), Type::STREAM);
        socket.is_ok_and(|socket| connect_within(&socket, to, RESPONSE_TIMEOUT).is_ok())
    }
}

fn with_room_for(services: u32, settings: &InstanceSettings) -> InstanceSettings {
    let capacity = services.saturating_add(services / 4).max(1024);
    InstanceSettings {
        maps: MapSizes {
            frontends: capacity.saturating_add(4 * MAX_NODE_PORTS),
            slots: capacity.saturating_mul(2),
            backends: capacity,
            ..MapSizes::default()
        },
        ..settings.clone()
    }
}

/// Creates the network namespace of a server on another node, to which the node has a second uplink.
fn create_elsewhere(node: &Node) -> Result<Sandbox> {
    let sandbox = node.network().create_unconnected("elsewhere")?;
    let pid = sandbox.pid();
    node.host().ip(&format!(
        "link add uplink2 type veth peer name eth0 netns {pid}\n\
         link set uplink2 up\n\
         addr add {GATEWAY}/24 dev uplink2\n"
    ))?;
    sandbox.ip(&format!(
        "link set lo up\n\
         link set eth0 up\n\
         addr add {ELSEWHERE}/24 dev eth0\n\
         route add default via {GATEWAY}\n"
    ))?;
    Ok(sandbox)
}

/// Sets up the translation. Returns its name, and the process that keeps it in place, if it needs one.
fn translate(
    node: &Node,
    translator: &Translator,
    backends: [SocketAddr; 2],
) -> Result<(String, Option<Process>)> {
    let directory = node.network().lab().directory();
    let of_services = |services: u32| -> Vec<_> {
        let all = (0..services).map(|number| NodePortService {
            number,
            protocol: "tcp",
            port: PORT,
            node_port: node_port(services, number),
            endpoint: SocketAddr::new(
                backends[Place::of(number).index()].ip(),
                target_port(services, number),
            ),
        });
        let streams = ["tcp", "udp"].into_iter().zip(services..);
        let streams = streams.map(|(protocol, number)| NodePortService {
            number,
            protocol,
            port: PORT,
            node_port: Some(STREAM_NODE_PORT),
            endpoint: SocketAddr::from((ELSEWHERE, STREAM_PORT)),
        });
        all.chain(streams).collect()
    };
    match translator {
        Translator::None => Ok((String::new(), None)),
        Translator::EmptyPrograms => {
            let command = node
                .host()
                .lab_command(&["attach-empty", "uplink", "uplink2"])?;
            let output = directory.join("attach-empty.log");
            let process = command.start_until("attached", &output, READY_TIMEOUT)?;
            Ok((String::new(), Some(process)))
        }
        Translator::Culvert(services, _) => {
            let files = files_of(*services, |number| {
                let place = Place::of(number);
                let mut service =
                    service(number).port(Protocol::TCP, PORT, target_port(*services, number));
                if let Some(port) = node_port(*services, number) {
                    service = service.node_port(port);
                }
                if place == Place::Here {
                    service = service.on_node(culvert_instance::NODE_NAME);
                }
                service.backend(backends[place.index()].ip())
            });
            for file in files {
                node.apply(file)?;
            }
            node.apply(refusals::service())?;
            node.apply(stream_service())?;
            node.start()?;
            Ok((format!("{services} services"), None))
        }
        Translator::Nft(services) => {
            let rules = nft::node_ports(IpAddr::V4(NODE), &of_services(*services));
            nft::loader(node.host()).load(directory, "rules.nft", &rules)?;
            Ok((format!("{services}, nft"), None))
        }
        Translator::Iptables(services) => {
            let (program, loader) = iptables::loader(node.host())?;
            let rules = iptables::node_ports(&of_services(*services));
            loader.load(directory, "rules.iptables", &rules)?;
            Ok((format!("{services}, {program}"), None))
        }
    }
}

/// Returns the Service of the server for streams of packets.
fn stream_service() -> Service {
    let address = IpAddr::from([10, 98, 0, 2]);
    Service::new("streams", [address])
        .port(Protocol::TCP, PORT, STREAM_PORT)
        .node_port(STREAM_NODE_PORT)
        .port(Protocol::UDP, PORT, STREAM_PORT)
        .node_port(STREAM_NODE_PORT)
        .backend(IpAddr::V4(ELSEWHERE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_ports_are_spread_over_all_services() {
        for services in [10, 10_000, 100_000] {
            let with_port = (0..services).filter_map(|number| {
                let port = node_port(services, number)?;
                Some((port, number))
            });
            let with_port: std::collections::BTreeMap<_, _> = with_port.collect();
            assert_eq!(
                with_port.len(),
                usize::try_from(2 * node_ports(services)).unwrap()
            );
            for place in [Place::Here, Place::Elsewhere] {
                let ports = ports(services, place);
                for index in 0..ports.count {
                    let number = with_port[&(ports.first + index * ports.apart)];
                    assert_eq!(Place::of(number), place);
                }
            }
        }
    }
}
