//! Generates small random clusters that contain many corner cases.
//!
//! The objects are as an API server stores them, with a few exceptions that current API servers reject but
//! that exist in old clusters or in files: IPv4 addresses with leading zeros, cluster IPs without families,
//! ports without a name or number, and addresses that are never served.
//!
//! No result depends on cases that the contract leaves open. If an address is in two slices of a Service,
//! either its conditions are the same in both, or it is terminating in at least one of them. No two Services
//! share a node port or a health check node port. A node's `ExternalIP` is never its only address in an
//! address family.

mod node;
mod service;
mod slice;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use fastrand::Rng;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::{Cluster, ConnectionSource, Frontend, LocalNode, address::Family};

/// The load balancer addresses to choose from. There are only a few, so that Services share them. The node
/// itself may have some of them, and some are never served.
const LOAD_BALANCER_IPS: [&str; 6] = [
    "203.0.113.1",
    "203.0.113.2",
    "203.000.113.002",
    "2001:db8:f::1",
    "127.0.0.2",
    "fe80::2",
];

const ZONES: [&str; 3] = ["a", "b", "c"];

/// Generates a cluster, and chooses the node for which the model computes frontends. The result depends only
/// on the state of `rng`.
#[must_use]
pub fn cluster(rng: &mut Rng) -> (Cluster, LocalNode) {
    let mut generator = Generator {
        rng,
        nodes: Vec::new(),
        node_ports: 30_000,
        health_check_node_ports: 31_000,
        endpoints: 0,
        host_addresses: BTreeSet::new(),
    };
    generator.nodes = node::nodes(&mut generator);
    let here = node::here(&mut generator);
    let mut services = Vec::new();
    let mut slices = Vec::new();
    for number in 0..generator.rng.u16(1..=6) {
        let service = service::generate(&mut generator, number);
        slices.extend(slice::generate(&mut generator, &service));
        services.push(service);
    }
    // The order of the objects must not matter.
    generator.rng.shuffle(&mut services);
    generator.rng.shuffle(&mut slices);
    let cluster = Cluster {
        services,
        slices,
        nodes: generator.nodes,
    };
    (cluster, here)
}

/// Returns clients in a frontend's address family: a socket on the node, sockets in pods, and addresses from which packets
/// arrive: of hosts outside, of a pod on another node, and of a backend. Some of them are in source ranges that [`cluster`]
/// generates, and some are not.
#[must_use]
pub fn sources(frontend: &Frontend) -> Vec<ConnectionSource> {
    let (pods, outside) = match Family::of(frontend.address) {
        Family::Ipv4 => (
            ["10.244.0.200", "172.20.0.9"],
            ["192.0.2.7", "192.168.0.99", "10.1.2.3", "10.244.9.9"],
        ),
        Family::Ipv6 => (
            ["fd24::200", "fd25::9"],
            ["2001:db8:c::7", "fd00::99", "fd10::3", "fd24::909"],
        ),
    };
    let mut sources = vec![ConnectionSource::NodeSocket];
    sources.extend(addresses(&pods).map(ConnectionSource::PodSocket));
    sources.extend(addresses(&pods).map(ConnectionSource::PodPacket));
    sources.extend(addresses(&outside).map(ConnectionSource::Outside));
    let backend = frontend.cluster.first().map(SocketAddr::ip);
    sources.extend(backend.map(ConnectionSource::Outside));
    sources.extend(backend.map(ConnectionSource::PodPacket));
    sources
}

fn addresses(texts: &[&str]) -> impl Iterator<Item = IpAddr> {
    texts.iter().filter_map(|text| text.parse().ok())
}

/// The state of the generator for one cluster.
struct Generator<'a> {
    rng: &'a mut Rng,
    nodes: Vec<Node>,
    /// The most recently allocated node port.
    node_ports: i32,
    health_check_node_ports: i32,
    /// The number of endpoints so far, which makes the next endpoint's address unique.
    endpoints: u16,
    /// The node addresses that are already in use as endpoints.
    host_addresses: BTreeSet<String>,
}

impl Generator<'_> {
    fn one_in(&mut self, one_in: u32) -> bool {
        self.rng.u32(0..one_in) == 0
    }

    fn pick<T: Copy, const N: usize>(&mut self, items: [T; N]) -> T {
        items[self.rng.usize(0..N)]
    }

    fn node(&mut self) -> &Node {
        &self.nodes[self.rng.usize(0..self.nodes.len())]
    }

    /// Returns a random subset of the items in their original order. Each item is included with a probability
    /// of one in `one_in`.
    fn subset<const N: usize>(&mut self, items: [&str; N], one_in: u32) -> Vec<String> {
        let some = items.into_iter().filter(|_| self.one_in(one_in));
        some.map(str::to_owned).collect()
    }
}

fn add_label(metadata: &mut ObjectMeta, key: &str, value: &str) {
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(key.to_owned(), value.to_owned());
}
