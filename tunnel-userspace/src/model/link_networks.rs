use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The networks that this node has routes to, except default routes.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LinkNetworks {
    /// The networks, by the prefix length and the network address in their IPv6 forms.
    networks: BTreeMap<(u32, u128), LinkNetwork>,
    /// The prefix lengths of all networks.
    lengths: BTreeSet<u32>,
}

/// The link that leads to a network.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LinkNetwork {
    /// The network's address.
    pub address: IpAddr,
    /// The network's prefix length.
    pub length: u8,
    /// The name of the link.
    pub link: String,
    /// True if the link leads only to pods on this node.
    pub leads_to_pods: bool,
}

impl LinkNetworks {
    /// Adds a network. If there are several routes to one network, a link to pods takes precedence.
    pub fn insert(&mut self, network: LinkNetwork) {
        let length = ipv6_length(network.address, network.length);
        let key = (length, masked(network.address, length));
        self.lengths.insert(length);
        let old = self.networks.get(&key);
        if old.is_none_or(|old| !old.leads_to_pods) {
            self.networks.insert(key, network);
        }
    }

    /// Returns the smallest network that contains an address.
    #[must_use]
    pub fn find(&self, address: IpAddr) -> Option<&LinkNetwork> {
        let mut lengths = self.lengths.iter().rev();
        let network = lengths.find_map(|length| {
            let key = (*length, masked(address, *length));
            self.networks.get(&key)
        });
        network.filter(|network| network.address.is_ipv4() == address.is_ipv4())
    }
}

impl LinkNetwork {
    /// Returns true if the network consists of one address.
    #[must_use]
    pub fn is_single_address(&self) -> bool {
        ipv6_length(self.address, self.length) == 128
    }
}

/// Returns a prefix length in its IPv6 form.
fn ipv6_length(address: IpAddr, length: u8) -> u32 {
    let before = if address.is_ipv4() { 96 } else { 0 };
    (before + u32::from(length)).min(128)
}

/// Returns an address in its IPv6 form, with the bits after the prefix length cleared.
fn masked(address: IpAddr, length: u32) -> u128 {
    let bits = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    bits & !u128::MAX.checked_shr(length).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture::ip;

    fn network(address: &str, length: u8, link: &str) -> LinkNetwork {
        LinkNetwork {
            address: ip(address),
            length,
            link: link.to_owned(),
            leads_to_pods: link == "pod",
        }
    }

    #[test]
    fn the_smallest_network_of_the_same_family_is_found() {
        let mut networks = LinkNetworks::default();
        for (address, length, link) in [
            ("10.0.0.0", 8, "vpn"),
            ("10.1.0.0", 24, "eth0"),
            ("10.1.0.7", 32, "pod"),
            ("10.1.0.7", 32, "eth0"),
            ("fd00::", 64, "eth0"),
            ("::", 8, "vpn"),
        ] {
            networks.insert(network(address, length, link));
        }

        for (address, wanted) in [
            ("10.9.9.9", Some("vpn")),
            ("10.1.0.8", Some("eth0")),
            ("10.1.0.7", Some("pod")),
            ("fd00::9", Some("eth0")),
            ("fd01::9", None),
            ("11.0.0.1", None),
        ] {
            let found = networks.find(ip(address));
            assert_eq!(found.map(|found| &*found.link), wanted, "{address}");
        }
    }
}
