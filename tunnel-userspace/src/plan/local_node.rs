//! The state of this node that plans depend on: its zone, and its addresses for node ports.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use tunnel_common::addr::Address;

use super::{NodeInfo, source_ranges};
use crate::model::{Family, Node, ZONE_LABEL};

/// A configured selection of addresses for node ports (kube-proxy `pkg/proxy/util/nodeport_addresses.go`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodePortAddresses {
    /// All addresses.
    All,
    /// The first address of each family in the Node object.
    Primary,
    /// Loopback addresses.
    Localhost,
    /// The addresses in the network with this address and prefix length.
    Range(IpAddr, u8),
}

/// The state of this node, taken from its Node object and its links.
#[derive(Debug, Default)]
pub struct LocalNode {
    /// The configured addresses for node ports.
    node_port_config: Vec<NodePortAddresses>,
    zone: Option<Arc<str>>,
    /// The first address of each family in this node's Node object.
    primary_ips: BTreeSet<IpAddr>,
    /// All addresses in this node's Node object.
    status_addresses: BTreeSet<IpAddr>,
    /// All addresses of this node's links.
    link_addresses: BTreeSet<IpAddr>,
}

impl LocalNode {
    /// Creates an instance with no Node object and no links.
    #[must_use]
    pub fn new(node_port_config: Vec<NodePortAddresses>) -> Self {
        Self {
            node_port_config,
            ..Self::default()
        }
    }

    /// Applies the new state of this node's Node object. If the object was deleted, keeps the last zone and
    /// addresses.
    pub fn set_node(&mut self, node: Option<&Node>) {
        let Some(node) = node else { return };
        let zone = node.labels.get(ZONE_LABEL).filter(|zone| !zone.is_empty());
        self.zone = zone.map(|zone| Arc::from(zone.as_str()));
        let first = |family| {
            let mut ips = node.internal_ips.iter().copied();
            ips.find(|ip| Family::of(*ip) == family)
        };
        self.primary_ips = [Family::V4, Family::V6]
            .into_iter()
            .filter_map(first)
            .collect();
        let addresses = node.internal_ips.iter().chain(&node.other_ips);
        self.status_addresses = addresses.copied().collect();
    }

    /// Replaces the addresses of the links.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.link_addresses = addresses;
    }

    /// Returns the new inputs to plans, if they differ from `node_info`.
    #[must_use]
    pub fn changed_info(&self, node_info: &NodeInfo) -> Option<NodeInfo> {
        let now = NodeInfo {
            zone: self.zone.clone(),
            node_port_addresses: self.node_port_addresses().collect(),
            primary_ips: self.primary_ips.clone(),
            status_addresses: self.status_addresses.clone(),
            link_addresses: self.reachable_addresses(),
            ..node_info.clone()
        };
        (now != *node_info).then_some(now)
    }

    /// Returns the addresses of the links, except for loopback and link-local ones. Link-local ones are left
    /// out because they change whenever a pod starts or stops.
    fn reachable_addresses(&self) -> BTreeSet<IpAddr> {
        let is_of_link = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        let known = self.link_addresses.iter();
        known
            .filter(|ip| !ip.is_loopback() && !is_of_link(ip))
            .copied()
            .collect()
    }

    /// Returns the addresses to listen on for health checks. They are the addresses that serve node ports,
    /// except for link-local ones. If all addresses of a family serve node ports, the unspecified address
    /// takes their place.
    #[must_use]
    pub fn health_addresses(&self) -> BTreeSet<IpAddr> {
        use NodePortAddresses::{All, Range};

        let is_all = |ip: &IpAddr| {
            self.has_entry_that(Family::of(*ip), |entry| matches!(entry, All | Range(_, 0)))
        };
        let all = [
            Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::from(Ipv6Addr::UNSPECIFIED),
        ];
        let some = self.node_port_addresses().filter(|ip| !is_all(ip));
        let some = some.filter(|ip| !Address::from_ip(*ip).is_link_local());
        all.into_iter().filter(is_all).chain(some).collect()
    }

    /// Returns the link addresses that serve node ports.
    fn node_port_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let is_wanted = move |ip: &IpAddr| {
            let family = Family::of(*ip);
            self.has_entry_that(family, |entry| self.is_selected_by(*ip, entry))
        };
        self.link_addresses.iter().copied().filter(is_wanted)
    }

    /// Returns true if `is` accepts one of the configured entries for a family. If there are no entries, all
    /// addresses of the family serve node ports, so the result is true.
    fn has_entry_that(&self, family: Family, is: impl Fn(NodePortAddresses) -> bool) -> bool {
        let is_of = |ip: &IpAddr| Family::of(*ip) == family;
        let entries = self.node_port_config.iter().filter(|entry| match entry {
            NodePortAddresses::All | NodePortAddresses::Localhost => true,
            NodePortAddresses::Primary => self.primary_ips.iter().any(is_of),
            NodePortAddresses::Range(network, _) => is_of(network),
        });
        let mut entries = entries.copied().peekable();
        entries.peek().is_none() || entries.any(is)
    }

    fn is_selected_by(&self, ip: IpAddr, wanted: NodePortAddresses) -> bool {
        match wanted {
            NodePortAddresses::All => true,
            NodePortAddresses::Primary => self.primary_ips.contains(&ip),
            NodePortAddresses::Localhost => ip.is_loopback(),
            NodePortAddresses::Range(network, length) => {
                source_ranges::is_in_network(ip, network, length)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture::{self, ip, ips};

    /// Returns a node that is configured to use these addresses for node ports.
    fn local_node(wanted: &[NodePortAddresses]) -> LocalNode {
        let mut node = LocalNode::new(wanted.to_vec());
        node.set_node(Some(&Node {
            labels: [(ZONE_LABEL.to_owned(), "north".to_owned())].into(),
            internal_ips: ips(&["172.30.0.1", "172.30.0.2", "fd00:30::1"]),
            ..fixture::node("node-a")
        }));
        let addresses = "127.0.0.1 ::1 172.30.0.1 172.30.0.2 10.0.0.1 fd00:30::1 fe80::1";
        node.set_addresses(addresses.split(' ').map(ip).collect());
        node
    }

    #[test]
    fn health_checks_listen_on_node_port_addresses_or_the_unspecified_address() {
        use NodePortAddresses::{All, Localhost, Primary, Range};

        let chosen = |wanted: &[NodePortAddresses]| {
            let addresses = local_node(wanted).health_addresses();
            let texts = addresses.iter().map(ToString::to_string);
            texts.collect::<Vec<_>>()
        };
        assert_eq!(chosen(&[Primary]), ["172.30.0.1", "fd00:30::1"]);
        assert_eq!(chosen(&[All]), ["0.0.0.0", "::"]);
        assert_eq!(chosen(&[]), ["0.0.0.0", "::"]);
        assert_eq!(chosen(&[Range(ip("10.0.0.0"), 8)]), ["10.0.0.1", "::"]);
        let all_v6 = Range(ip("::"), 0);
        assert_eq!(chosen(&[all_v6, Localhost]), ["127.0.0.1", "::"]);
        let links = Range(ip("fe80::"), 10);
        assert_eq!(chosen(&[links, Localhost]), ["127.0.0.1", "::1"]);
    }
}
