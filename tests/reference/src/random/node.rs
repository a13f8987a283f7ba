//! Nodes, and the one to look from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fastrand::Rng;
use k8s_openapi::{
    api::core::v1::{Node, NodeAddress, NodeStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{ZONES, add_label, chance, pick};
use crate::{
    Entry, ExternalIps, Here, TopologyKeys,
    address::{Cidr, parse},
};

/// Ranges for `nodePortAddresses`: with all, some and none of the node's addresses.
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

pub(super) fn nodes(rng: &mut Rng) -> Vec<Node> {
    (0..rng.u8(1..=4)).map(|number| node(rng, number)).collect()
}

fn node(rng: &mut Rng, number: u8) -> Node {
    let mut metadata = ObjectMeta {
        name: Some(format!("node-{number}")),
        ..ObjectMeta::default()
    };
    match rng.u8(0..8) {
        0 => {}
        1 => add_label(&mut metadata, "topology.kubernetes.io/zone", ""),
        _ => {
            let zone = pick(rng, ZONES);
            add_label(&mut metadata, "topology.kubernetes.io/zone", zone);
        }
    }
    if let Some(pool) = pick(rng, [Some("p"), Some("p"), Some("q"), Some(""), None]) {
        add_label(&mut metadata, "apps.openyurt.io/nodepool", pool);
    }
    let host = 10 + number;
    let v4 = ("InternalIP", format!("192.168.0.{host}"));
    let v6 = ("InternalIP", format!("fd00::{host}"));
    let mut addresses = vec![("Hostname", format!("node-{number}"))];
    addresses.extend(match rng.u8(0..10) {
        0 | 1 => vec![v4],
        2 => vec![v6],
        3 | 4 => vec![v6, v4],
        _ => vec![v4, v6],
    });
    if addresses[1].1.contains('.') {
        if chance(rng, 4) {
            addresses.push(("InternalIP", format!("192.168.1.{host}")));
        }
        if chance(rng, 4) {
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

/// A node of the cluster, rarely one that has no object yet.
pub(super) fn here(rng: &mut Rng, nodes: &[Node]) -> Here {
    let node = &nodes[rng.usize(0..nodes.len())];
    let name = node.metadata.name.clone().unwrap_or_default();
    let known = !chance(rng, 40);
    Here {
        node: if known { name } else { "new".to_owned() },
        addresses: addresses(rng, node),
        node_port_addresses: node_port_addresses(rng),
        external_ips: pick(
            rng,
            [ExternalIps::Any, ExternalIps::Any, ExternalIps::Owned],
        ),
        topology_keys: pick(rng, [TopologyKeys::Ignore, TopologyKeys::Honour]),
    }
}

/// Loopback, what the Node object says (rarely not, behind a NAT), a bridge, and now and then the
/// address of a load balancer.
fn addresses(rng: &mut Rng, node: &Node) -> Vec<IpAddr> {
    let mut addresses = vec![
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ];
    for address in crate::node::addresses(node) {
        if address.type_ == "InternalIP" && !chance(rng, 40) {
            addresses.extend(parse(&address.address));
        }
    }
    for (address, one_in) in [
        ("172.17.0.1", 2),
        ("fd17::1", 3),
        ("203.0.113.1", 5),
        ("2001:db8:f::1", 5),
    ] {
        if chance(rng, one_in) {
            addresses.extend(parse(address));
        }
    }
    addresses
}

fn node_port_addresses(rng: &mut Rng) -> Option<Vec<Entry>> {
    let count = match rng.u8(0..6) {
        0 | 1 => return None,
        2 => 0,
        _ => rng.u8(1..=3),
    };
    Some((0..count).map(|_| entry(rng)).collect())
}

fn entry(rng: &mut Rng) -> Entry {
    match rng.u8(0..8) {
        0 => Entry::All,
        1 | 2 => Entry::Primary,
        3 => Entry::Localhost,
        _ => Cidr::parse(pick(rng, NODE_PORT_RANGES)).map_or(Entry::Primary, Entry::Cidr),
    }
}
