//! Where this node is, and which addresses of it node ports are dialled on.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use tunnel_common::addr::Address;

use super::{Here, sources};
use crate::model::{Family, Node, ZONE};

/// Some addresses of this node that node ports are dialled on (kube-proxy `pkg/proxy/util/nodeport_addresses.go`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodePortAddresses {
    /// All of them.
    All,
    /// The first of each family that its Node object names.
    Primary,
    /// Loopback.
    Localhost,
    /// Those in a range: address and prefix length.
    Range(IpAddr, u8),
}

/// What is known of this node.
#[derive(Debug, Default)]
pub struct Place {
    wanted: Vec<NodePortAddresses>,
    zone: Option<Arc<str>>,
    /// The first address of each family that its Node object names.
    primary: BTreeSet<IpAddr>,
    /// The addresses of its links.
    addresses: BTreeSet<IpAddr>,
    is_new: bool,
}

impl Place {
    /// Nothing is known of it yet.
    #[must_use]
    pub const fn new(wanted: Vec<NodePortAddresses>) -> Self {
        Self {
            wanted,
            zone: None,
            primary: BTreeSet::new(),
            addresses: BTreeSet::new(),
            is_new: true,
        }
    }

    /// Takes the Node object as it is now. While there is none, what it said holds.
    pub fn set_node(&mut self, node: Option<&Node>) {
        let Some(node) = node else { return };
        let zone = node.labels.get(ZONE).filter(|zone| !zone.is_empty());
        self.zone = zone.map(|zone| Arc::from(zone.as_str()));
        let first = |family| {
            let mut ips = node.internal_ips.iter().copied();
            ips.find(|ip| Family::of(*ip) == family)
        };
        self.primary = [Family::V4, Family::V6]
            .into_iter()
            .filter_map(first)
            .collect();
        self.is_new = true;
    }

    /// Takes the addresses of its links as they are now.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.is_new |= self.addresses != addresses;
        self.addresses = addresses;
    }

    /// What planning needs to know of it, if that is not what it knows.
    pub fn show(&mut self, here: &Here) -> Option<Here> {
        if !std::mem::take(&mut self.is_new) {
            return None;
        }
        let families = [Family::V4, Family::V6].into_iter();
        let node_ports = families.flat_map(|family| self.node_ports(family));
        let now = Here {
            zone: self.zone.clone(),
            node_port_addresses: node_ports.collect(),
            primary: self.primary.clone(),
            addresses: self.reachable(),
            ..here.clone()
        };
        (now != *here).then_some(now)
    }

    /// The addresses of its links but for loopback and those for a link only: these come and go with
    /// pods.
    fn reachable(&self) -> BTreeSet<IpAddr> {
        let is_of_link = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        let known = self.addresses.iter();
        known
            .filter(|ip| !ip.is_loopback() && !is_of_link(ip))
            .copied()
            .collect()
    }

    /// The addresses that health check ports are served on: those of node ports. Where these are all
    /// of a family, the unspecified one stands for them; one that is for its link only is none.
    #[must_use]
    pub fn health_addresses(&self) -> BTreeSet<IpAddr> {
        let of_family = |(family, unspecified): (Family, IpAddr)| {
            let is_all = |wanted: &NodePortAddresses| {
                matches!(
                    wanted,
                    NodePortAddresses::All | NodePortAddresses::Range(_, 0)
                )
            };
            let wanted = self.wanted_of(family);
            if wanted.is_empty() || wanted.iter().any(is_all) {
                vec![unspecified]
            } else {
                self.node_ports(family)
            }
        };
        let is_of_link = |ip: &IpAddr| Address::from_ip(*ip).is_link_local();
        [
            (Family::V4, IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            (Family::V6, IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
        ]
        .into_iter()
        .flat_map(of_family)
        .filter(|ip| !is_of_link(ip))
        .collect()
    }

    /// The addresses of a family that node ports are dialled on. Where the config names none of a
    /// family, they are all of it.
    fn node_ports(&self, family: Family) -> Vec<IpAddr> {
        let wanted = self.wanted_of(family);
        let is_wanted = |ip: &&IpAddr| {
            wanted.is_empty() || wanted.iter().any(|wanted| self.is_one_of(**ip, *wanted))
        };
        let is_of = |ip: &&IpAddr| Family::of(**ip) == family;
        let known = self.addresses.iter().filter(is_of).filter(is_wanted);
        known.copied().collect()
    }

    /// What the config names of a family.
    fn wanted_of(&self, family: Family) -> Vec<NodePortAddresses> {
        let is_of = |ip: &IpAddr| Family::of(*ip) == family;
        let wanted = |wanted: &&NodePortAddresses| match wanted {
            NodePortAddresses::All | NodePortAddresses::Localhost => true,
            NodePortAddresses::Primary => self.primary.iter().any(is_of),
            NodePortAddresses::Range(network, _) => is_of(network),
        };
        self.wanted.iter().filter(wanted).copied().collect()
    }

    fn is_one_of(&self, ip: IpAddr, wanted: NodePortAddresses) -> bool {
        match wanted {
            NodePortAddresses::All => true,
            NodePortAddresses::Primary => self.primary.contains(&ip),
            NodePortAddresses::Localhost => ip.is_loopback(),
            NodePortAddresses::Range(network, length) => sources::is_in(ip, network, length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        Algorithm,
        fixture::{self, ip, ips},
    };

    fn here() -> Here {
        Here::new("node-a".into(), Algorithm::Random)
    }

    /// A node with these addresses, one of them for its link only.
    fn place(wanted: &[NodePortAddresses]) -> Place {
        let mut place = Place::new(wanted.to_vec());
        place.set_node(Some(&Node {
            labels: [(ZONE.to_owned(), "north".to_owned())].into(),
            internal_ips: ips(&["172.30.0.1", "172.30.0.2", "fd00:30::1"]),
            ..fixture::node("node-a")
        }));
        let addresses = [
            "127.0.0.1",
            "::1",
            "172.30.0.1",
            "172.30.0.2",
            "10.0.0.1",
            "fd00:30::1",
            "fe80::1",
        ];
        place.set_addresses(addresses.into_iter().map(ip).collect());
        place
    }

    #[test]
    fn health_check_ports_are_those_of_node_ports_or_of_all_addresses_at_once() {
        use NodePortAddresses::{All, Localhost, Primary, Range};

        let chosen = |wanted: &[NodePortAddresses]| {
            let addresses = place(wanted).health_addresses();
            let texts = addresses.iter().map(ToString::to_string);
            texts.collect::<Vec<_>>()
        };
        assert_eq!(chosen(&[Primary]), ["172.30.0.1", "fd00:30::1"]);
        assert_eq!(chosen(&[All]), ["0.0.0.0", "::"]);
        assert_eq!(chosen(&[]), ["0.0.0.0", "::"]);
        assert_eq!(chosen(&[Range(ip("10.0.0.0"), 8)]), ["10.0.0.1", "::"]);
        assert_eq!(
            chosen(&[Range(ip("::"), 0), Localhost]),
            ["127.0.0.1", "::"]
        );
        let links = Range(ip("fe80::"), 10);
        assert_eq!(chosen(&[links, Localhost]), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn only_what_is_new_is_told_of() {
        let mut place = Place::new(vec![NodePortAddresses::All]);
        let mut here = here();
        assert_eq!(place.show(&here), None);
        place.set_addresses(BTreeSet::from([ip("10.0.0.1")]));
        here = place.show(&here).expect("it is new");
        place.set_addresses(BTreeSet::from([ip("10.0.0.1")]));
        assert_eq!(place.show(&here), None);
        place.set_addresses(BTreeSet::new());
        assert!(place.show(&here).is_some());
    }
}
