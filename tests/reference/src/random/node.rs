//! Generates Node objects, and the node for which the model computes frontends, including its settings.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use k8s_openapi::{
    api::core::v1::{Node, NodeAddress, NodeStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{Generator, ZONES, add_label};
use crate::{
    ExternalIps, LocalNode, LocalSenders, NodePortEntry, OwnAddresses, TopologyKeys,
    address::{Cidr, parse},
};

/// Ranges for `nodePortAddresses` that contain all, some or none of the node's addresses.
const NODE_PORT_RANGES: [&str; 11] = [
    "192.168.0.0/24",
    "192.168.1.0/24",
    "172.16.0.0/12",
    "198.51.100.0/24",
    "127.0.0.0/8",
    "127.0.0.1/32",
    "0.0.0.0/0",
    "fd00::/64",
    "fd17::/16",
    "::1/128",
    "::/0",
];

pub(super) fn nodes(generator: &mut Generator<'_>) -> Vec<Node> {
    let count = generator.rng.u8(1..=4);
    (0..count).map(|number| node(generator, number)).collect()
}

fn node(generator: &mut Generator<'_>, number: u8) -> Node {
    let mut metadata = ObjectMeta {
        name: Some(format!("node-{number}")),
        ..ObjectMeta::default()
    };
    match generator.rng.u8(0..8) {
        0 => {}
        1 => add_label(&mut metadata, "topology.kubernetes.io/zone", ""),
        _ => {
            let zone = generator.pick(ZONES);
            add_label(&mut metadata, "topology.kubernetes.io/zone", zone);
        }
    }
    if let Some(pool) = generator.pick([Some("p"), Some("p"), Some("q"), Some(""), None]) {
        add_label(&mut metadata, "apps.openyurt.io/nodepool", pool);
    }
    let host = 10 + number;
    let v4 = ("InternalIP", format!("192.168.0.{host}"));
    let v6 = ("InternalIP", format!("fd00::{host}"));
    let mut addresses = vec![("Hostname", format!("node-{number}"))];
    addresses.extend(match generator.rng.u8(0..10) {
        0 | 1 => vec![v4],
        2 => vec![v6],
        3 | 4 => vec![v6, v4],
        _ => vec![v4, v6],
    });
    if addresses[1].1.contains('.') {
        if generator.one_in(4) {
            addresses.push(("InternalIP", format!("192.168.1.{host}")));
        }
        if generator.one_in(4) {
            addresses.push(("ExternalIP", format!("198.18.0.{host}")));
        }
    }
    let addresses = addresses.into_iter().map(|(type_, address)| NodeAddress {
        type_: type_.to_owned(),
        address,
    });
    Node {
        metadata,
        status: Some(NodeStatus {
            addresses: Some(addresses.collect()),
            ..NodeStatus::default()
        }),
        ..Node::default()
    }
}

/// Generates the node for which the model computes frontends: one of the cluster's nodes or, rarely, one
/// without a Node object.
pub(super) fn here(generator: &mut Generator<'_>) -> LocalNode {
    let node = generator.node().clone();
    let name = node.metadata.name.clone().unwrap_or_default();
    let known = !generator.one_in(40);
    LocalNode {
        node: if known { name } else { "new".to_owned() },
        addresses: addresses(generator, &node),
        node_port_addresses: node_port_addresses(generator),
        external_ips: generator.pick([ExternalIps::Any, ExternalIps::Any, ExternalIps::Owned]),
        own_addresses: generator.pick([OwnAddresses::Refuse, OwnAddresses::Serve]),
        topology_keys: generator.pick([TopologyKeys::Ignore, TopologyKeys::Honor]),
        local_senders: local_senders(generator),
        masquerade_all: generator.one_in(4),
    }
}

/// Returns ranges of pods, some of which contain a source, or a family of which has none.
fn local_senders(generator: &mut Generator<'_>) -> LocalSenders {
    if generator.one_in(5) {
        return LocalSenders::BehindLinks;
    }
    let ranges = generator.subset(
        ["10.244.0.0/16", "10.1.0.0/24", "fd24::/16", "fd10::3/128"],
        2,
    );
    LocalSenders::InRanges(ranges.iter().filter_map(|it| Cidr::parse(it)).collect())
}

/// Returns the loopback addresses, the internal addresses in the Node object (rarely without one of them, as
/// on a node behind NAT), and sometimes the addresses of a bridge or a load balancer.
fn addresses(generator: &mut Generator<'_>, node: &Node) -> Vec<IpAddr> {
    let mut addresses = vec![
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    for address in crate::node::addresses(node) {
        if address.type_ == "InternalIP" && !generator.one_in(40) {
            addresses.extend(parse(&address.address));
        }
    }
    for (address, one_in) in [
        ("172.17.0.1", 2),
        ("fd17::1", 3),
        ("203.0.113.1", 5),
        ("2001:db8:f::1", 5),
    ] {
        if generator.one_in(one_in) {
            addresses.extend(parse(address));
        }
    }
    addresses
}

fn node_port_addresses(generator: &mut Generator<'_>) -> Option<Vec<NodePortEntry>> {
    let count = match generator.rng.u8(0..6) {
        0 | 1 => return None,
        2 => 0,
        _ => generator.rng.u8(1..=3),
    };
    Some((0..count).map(|_| entry(generator)).collect())
}

fn entry(generator: &mut Generator<'_>) -> NodePortEntry {
    match generator.rng.u8(0..8) {
        0 => NodePortEntry::All,
        1 | 2 => NodePortEntry::Primary,
        3 => NodePortEntry::Localhost,
        _ => Cidr::parse(generator.pick(NODE_PORT_RANGES))
            .map_or(NodePortEntry::Primary, NodePortEntry::Cidr),
    }
}
