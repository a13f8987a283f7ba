//! Addresses of Services on which no frontend has the port that a packet is for: cluster IPs, and the ranges from which the
//! API server allocates them (kube-proxy `pkg/proxy/nftables/proxier.go`, `cluster-ips-check`).

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{addr::Address, service::SourceRange};

/// The number of entries in the array `service_ranges`.
pub const MAX_SERVICE_RANGES: u32 = 16;

/// The value of `services` under the key of an address that is a cluster IP.
pub const CLUSTER_IP: u32 = u32::MAX;
/// The value of `services` under the key of an address whose packets are left alone: one of this node, or a cluster IP that
/// another proxy serves.
pub const LEFT_ALONE: u32 = u32::MAX - 1;

/// Value of the array `service_ranges`: addresses that may be cluster IPs. The first unused entry ends the list.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct ServiceRange {
    /// The addresses.
    pub addresses: SourceRange,
    /// The kind of the range.
    pub kind: RangeKind,
}

/// The kind of a range of addresses.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(transparent)]
pub struct RangeKind(u32);

impl RangeKind {
    /// The entry is unused.
    pub const UNUSED: Self = Self(0);
    /// The range contains cluster IPs, and other addresses.
    pub const CONTAINS_CLUSTER_IPS: Self = Self(1);
    /// Nothing but cluster IPs is allocated from the range: it is a ServiceCIDR.
    pub const SERVICE_CIDR: Self = Self(2);
}

impl ServiceRange {
    /// An entry that is not used.
    pub const UNUSED: Self = Self {
        addresses: SourceRange {
            first: Address::UNSPECIFIED,
            last: Address::UNSPECIFIED,
        },
        kind: RangeKind::UNUSED,
    };

    /// Returns true if the range contains an address. A range of IPv6 contains no address of IPv4.
    #[inline(always)]
    #[must_use]
    pub fn contains(&self, address: &Address) -> bool {
        let SourceRange { first, last } = &self.addresses;
        first.is_v4() == address.is_v4() && first <= address && address <= last
    }
}

/// The result of [`relation`] after the last range.
pub const NO_MORE: u32 = 3;

/// Returns the relation of an address to an entry: [`NO_MORE`] if the entry is unused, the kind of a range that contains the
/// address, or else 0.
#[inline(always)]
#[must_use]
pub fn relation(address: &Address, range: &ServiceRange) -> u32 {
    if range.kind == RangeKind::UNUSED {
        NO_MORE
    } else if range.contains(address) {
        range.kind.0
    } else {
        0
    }
}

/// The verdict on a packet for an address and port that no frontend has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unserved {
    /// It is left alone.
    LeftAlone,
    /// It is refused, because the address is a cluster IP.
    ClusterIp,
    /// It is dropped, because the address could be a cluster IP, but is none.
    Unallocated,
}

impl Unserved {
    /// Decides, given the results of [`relation`] for all entries of `service_ranges`, and the value of `services` for the
    /// address.
    #[inline(always)]
    #[must_use]
    pub fn of(relation: impl Fn(u32) -> u32, entry: impl Fn() -> Option<u32>) -> Self {
        let mut kind = 0;
        for index in 0..MAX_SERVICE_RANGES {
            let found = relation(index);
            if found == NO_MORE {
                break;
            }
            kind |= found;
        }
        if kind == 0 {
            return Self::LeftAlone;
        }
        // While an entry is replaced, there is none for a moment.
        match entry().or_else(&entry) {
            Some(CLUSTER_IP) => Self::ClusterIp,
            None if kind & RangeKind::SERVICE_CIDR.0 != 0 => Self::Unallocated,
            None | Some(_) => Self::LeftAlone,
        }
    }
}

const _: () = assert!(size_of::<ServiceRange>() == 36);

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        Address::from_ip(text.parse().expect("an address"))
    }

    fn range(first: &str, last: &str, kind: RangeKind) -> ServiceRange {
        ServiceRange {
            addresses: SourceRange {
                first: address(first),
                last: address(last),
            },
            kind,
        }
    }

    #[test]
    fn ports_of_cluster_ips_are_refused_and_other_addresses_of_a_service_cidr_dropped() {
        let ranges = [
            range("10.96.0.0", "10.96.255.255", RangeKind::SERVICE_CIDR),
            range("10.96.0.1", "10.97.0.9", RangeKind::CONTAINS_CLUSTER_IPS),
            range("fd00::", "fd00::ffff", RangeKind::SERVICE_CIDR),
            // A range that contains the addresses of IPv4, if taken literally.
            range("::", "2fff::", RangeKind::SERVICE_CIDR),
        ];
        let all = [&ranges[..], &[ServiceRange::UNUSED; 16]].concat();
        for (text, entry, expected) in [
            ("10.96.0.1", Some(CLUSTER_IP), Unserved::ClusterIp),
            ("10.96.0.2", None, Unserved::Unallocated),
            ("10.96.0.3", Some(LEFT_ALONE), Unserved::LeftAlone),
            ("10.97.0.9", Some(CLUSTER_IP), Unserved::ClusterIp),
            ("10.97.0.8", None, Unserved::LeftAlone),
            ("10.98.0.1", None, Unserved::LeftAlone),
            ("fd00::5", None, Unserved::Unallocated),
            ("fd00::1:5", None, Unserved::LeftAlone),
            ("192.0.2.1", None, Unserved::LeftAlone),
            ("2001:db8::1", None, Unserved::Unallocated),
        ] {
            let of = |index: u32| relation(&address(text), &all[index as usize]);
            assert_eq!(Unserved::of(of, || entry), expected, "{text}");
        }
        assert_eq!(
            Unserved::of(|_| NO_MORE, || Some(CLUSTER_IP)),
            Unserved::LeftAlone
        );
    }
}
