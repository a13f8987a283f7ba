//! Handshakes, grouped by source address and by network, so that the largest group is found quickly.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    hash::Hash,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use crate::listen::source_of;

/// The source of a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Source {
    /// The result of [`source_of`].
    pub(super) address: IpAddr,
    /// The /24 prefix of an IPv4 address, or the /48 prefix of an IPv6 address: the networks that one owner
    /// usually gets.
    network: IpAddr,
}

impl Source {
    pub(super) fn of(peer: SocketAddr) -> Self {
        let address = source_of(peer.ip());
        let network = match address {
            IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() & !0xff).into(),
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !(u128::MAX >> 48)).into(),
        };
        Self { address, network }
    }
}

/// IDs, grouped by source address within networks.
#[derive(Debug, Default)]
pub(super) struct SourceGroups {
    networks: Groups<IpAddr>,
    addresses: HashMap<IpAddr, Groups<IpAddr>>,
}

impl SourceGroups {
    pub(super) fn insert(&mut self, source: Source, id: u64) {
        self.networks.insert(source.network, id);
        let addresses = self.addresses.entry(source.network).or_default();
        addresses.insert(source.address, id);
    }

    pub(super) fn remove(&mut self, source: Source, id: u64) {
        self.networks.remove(source.network, id);
        if let Some(addresses) = self.addresses.get_mut(&source.network) {
            addresses.remove(source.address, id);
            if addresses.is_empty() {
                self.addresses.remove(&source.network);
            }
        }
    }

    /// Returns the smallest ID of the address that has the most, in the network that has the most.
    pub(super) fn victim(&self) -> Option<(u64, Source)> {
        let (network, _) = self.networks.largest()?;
        let (address, id) = self.addresses.get(&network)?.largest()?;
        Some((id, Source { address, network }))
    }
}

/// Sets of IDs by key, ordered by their sizes.
#[derive(Debug)]
struct Groups<K> {
    members: HashMap<K, BTreeSet<u64>>,
    /// The size of each group, its smallest ID, and its key. In a tie, the group with the smallest ID is the
    /// last.
    order: BTreeSet<(usize, Reverse<u64>, K)>,
}

impl<K> Default for Groups<K> {
    fn default() -> Self {
        Self {
            members: HashMap::new(),
            order: BTreeSet::new(),
        }
    }
}

impl<K: Copy + Eq + Hash + Ord> Groups<K> {
    fn insert(&mut self, key: K, id: u64) {
        self.change(key, |ids| ids.insert(id));
    }

    fn remove(&mut self, key: K, id: u64) {
        self.change(key, |ids| ids.remove(&id));
    }

    fn change(&mut self, key: K, change: impl FnOnce(&mut BTreeSet<u64>) -> bool) {
        let rank =
            |ids: &BTreeSet<u64>| ids.first().map(|oldest| (ids.len(), Reverse(*oldest), key));
        let ids = self.members.entry(key).or_default();
        let before = rank(ids);
        change(ids);
        let after = rank(ids);
        if let Some(before) = before {
            self.order.remove(&before);
        }
        match after {
            Some(after) => {
                self.order.insert(after);
            }
            None => {
                self.members.remove(&key);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the key and the smallest ID of the largest group.
    fn largest(&self) -> Option<(K, u64)> {
        let (_, Reverse(oldest), key) = self.order.last()?;
        Some((*key, *oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str) -> Source {
        let address: IpAddr = address.parse().expect("an address");
        Source::of((address, 4242).into())
    }

    #[test]
    fn a_source_is_an_address_or_a_prefix_of_64_bits_in_a_network() {
        for (address, of, network) in [
            ("192.0.2.7", "192.0.2.7", "192.0.2.0"),
            ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.0"),
            ("2001:db8:1:2:3::4", "2001:db8:1:2::", "2001:db8:1::"),
        ] {
            let source = source(address);
            assert_eq!(source.address.to_string(), of);
            assert_eq!(source.network.to_string(), network);
        }
    }

    #[test]
    fn the_victim_is_from_the_largest_network_then_the_largest_source_then_the_oldest() {
        let mut groups = SourceGroups::default();
        assert_eq!(groups.victim(), None);
        // One address with three, in a network with three.
        for id in [0, 1, 2] {
            groups.insert(source("192.0.2.7"), id);
        }
        // A network with four: one address with two, and two with one.
        for (id, last) in [(3, 1), (4, 2), (5, 3), (6, 2)] {
            groups.insert(source(&format!("198.51.100.{last}")), id);
        }

        let victim = groups.victim().expect("a victim");
        assert_eq!(victim, (4, source("198.51.100.2")));
        groups.remove(victim.1, victim.0);
        // Both networks have three. The one with the oldest is chosen.
        assert_eq!(groups.victim(), Some((0, source("192.0.2.7"))));
        groups.remove(source("192.0.2.7"), 0);
        assert_eq!(groups.victim(), Some((3, source("198.51.100.1"))));

        for id in [1, 2] {
            groups.remove(source("192.0.2.7"), id);
        }
        for (id, last) in [(3, 1), (5, 3), (6, 2)] {
            groups.remove(source(&format!("198.51.100.{last}")), id);
        }
        assert_eq!(groups.victim(), None);
        assert!(groups.addresses.is_empty() && groups.networks.order.is_empty());
    }
}
