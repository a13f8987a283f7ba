//! Keys and values of the steering maps, and steering prefixes. A connection to a port on an edge node is
//! sent to the tunnel's ingress, at a steering address that stands for that node and port.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addr::{Address, Port};

/// Key of the hash map `steer`: the address and TCP port that a client dials.
#[derive(
    Clone,
    Copy,
    Debug,
    Eq,
    FromBytes,
    Hash,
    Immutable,
    IntoBytes,
    KnownLayout,
    Ord,
    PartialEq,
    PartialOrd,
)]
#[repr(C)]
pub struct SteeringKey {
    /// The edge node's address.
    pub address: Address,
    /// The port on the edge node.
    pub port: Port,
    /// Zero.
    pub reserved: u16,
}

impl SteeringKey {
    /// Creates a key from an address and port.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: Address, port: Port) -> Self {
        Self {
            address,
            port,
            reserved: 0,
        }
    }
}

/// Value of the array `steered`: the steering record for an edge node's address and port. The record is
/// written before its index is added to `steer`. After the index is removed from `steer`, the record keeps
/// its key until the index's quarantine ends.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct SteeringRecord {
    /// The time at which the index was removed from `steer`, in nanoseconds since boot, or 0 if the index is
    /// in `steer` or was never used. In the record of the daemon's probe, the time of the [`Heartbeat`].
    pub removed_at: u64,
    /// The key for which the record was written.
    pub key: SteeringKey,
    /// The steering address to which connections are sent. In the record of the daemon's probe, the lower half
    /// is the cookie of the socket that may connect to it, and the upper half belongs to the [`Heartbeat`].
    pub steering_address: Address,
    /// The ingress port to which connections are sent.
    pub ingress_port: Port,
    /// [`SteeringRecord::UNUSED`], [`SteeringRecord::NODE`] or [`SteeringRecord::PROBE`].
    pub kind: u16,
}

impl SteeringRecord {
    /// Kind: the index was never used.
    pub const UNUSED: u16 = 0;
    /// Kind: an edge node's address and port.
    pub const NODE: u16 = 1;
    /// Bit in the second entry of the map `host`: the IPv4 steering prefix has a route.
    pub const ROUTED_V4: u64 = 1;
    /// Bit in the second entry of the map `host`: the IPv6 steering prefix has a route.
    pub const ROUTED_V6: u64 = 2;
    /// Returns the bit in the second entry of the map `host` for a family.
    #[inline(always)]
    #[must_use]
    pub const fn routed(is_v4: bool) -> u64 {
        if is_v4 {
            Self::ROUTED_V4
        } else {
            Self::ROUTED_V6
        }
    }

    /// Kind: the daemon's probe. When the daemon connects to it, the kernel program stores the cookie of the
    /// daemon's network namespace as the host's. [`SteeringRecord::probe_cookie`] identifies the socket from
    /// which the daemon connects.
    pub const PROBE: u16 = 2;

    /// Creates the record of the daemon's probe, for the socket that has this cookie.
    #[must_use]
    pub const fn probe(key: SteeringKey, cookie: u64) -> Self {
        Self {
            removed_at: 0,
            key,
            steering_address: Address::from_halves([0, cookie]),
            ingress_port: key.port,
            kind: Self::PROBE,
        }
    }

    /// Returns the cookie of the socket from which the daemon connects to its probe. Meaningful only for
    /// records of the kind [`SteeringRecord::PROBE`].
    #[inline(always)]
    #[must_use]
    pub const fn probe_cookie(&self) -> u64 {
        let [_, cookie] = self.steering_address.halves();
        cookie
    }

    /// Returns the record with another heartbeat. The programs don't read the heartbeat.
    #[must_use]
    pub const fn with_heartbeat(self, heartbeat: Heartbeat) -> Self {
        Self {
            removed_at: heartbeat.valid_until,
            steering_address: Address::from_halves([heartbeat.pin_directory, self.probe_cookie()]),
            ..self
        }
    }

    /// Returns the heartbeat of the daemon that uses the maps. Meaningful only for the last record, which is that
    /// of the daemon's probe.
    #[must_use]
    pub const fn heartbeat(&self) -> Heartbeat {
        let [pin_directory, _] = self.steering_address.halves();
        Heartbeat {
            valid_until: self.removed_at,
            pin_directory,
        }
    }
}

/// The daemon's heartbeat, in the record of its probe. It shows other processes that a daemon uses the maps, even if
/// they can't see the daemon's process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heartbeat {
    /// The time until which the daemon counts as running, in nanoseconds since boot, or 0 if it has stopped.
    pub valid_until: u64,
    /// The device number and the inode number of the daemon's pin directory, 32 bits each.
    pub pin_directory: u64,
}

const _: () = {
    assert!(size_of::<SteeringKey>() == 20);
    assert!(offset_of!(SteeringKey, port) == 16);
    assert!(size_of::<SteeringRecord>() == 48);
    assert!(offset_of!(SteeringRecord, key) == 8);
    assert!(offset_of!(SteeringRecord, steering_address) == 28);
    assert!(offset_of!(SteeringRecord, ingress_port) == 44);
};

/// An IP prefix whose addresses have consecutive indices.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Prefix {
    network: u128,
    /// The prefix length, counted in the 128 bits of the address's IPv6 form.
    bits: u32,
    is_v4: bool,
}

impl Prefix {
    /// Creates a prefix from its network address and its length, which is at most 32 for IPv4. Returns `None`
    /// if the length exceeds the maximum for the address family, or if the address has bits set beyond the
    /// prefix.
    #[must_use]
    pub fn new(address: Address, length: u8) -> Option<Self> {
        let is_v4 = address.is_v4();
        let (most, before) = if is_v4 { (32, 96) } else { (128, 0) };
        if length > most {
            return None;
        }
        let bits = before + u32::from(length);
        let network = bits_of(&address);
        let host = u128::MAX.checked_shr(bits).unwrap_or(0);
        (network & host == 0).then_some(Self {
            network,
            bits,
            is_v4,
        })
    }

    /// Creates the prefix of the given length that contains an address. Returns `None` if the length exceeds the
    /// maximum for the address family.
    #[must_use]
    pub fn containing(address: Address, length: u8) -> Option<Self> {
        let before = if address.is_v4() { 96 } else { 0 };
        let host = u128::MAX
            .checked_shr(before + u32::from(length))
            .unwrap_or(0);
        Self::new(address_of(bits_of(&address) & !host), length)
    }

    /// Returns true if this is an IPv4 prefix.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.is_v4
    }

    /// Returns the network address, which is the first address in the prefix.
    #[must_use]
    pub fn network(&self) -> Address {
        address_of(self.network)
    }

    /// Returns the prefix length, which is at most 32 for IPv4.
    #[must_use]
    pub fn length(&self) -> u8 {
        let length = if self.is_v4 {
            self.bits - 96
        } else {
            self.bits
        };
        u8::try_from(length).unwrap_or(u8::MAX)
    }

    /// Returns the network mask in its IPv6 form.
    #[must_use]
    pub fn mask(&self) -> Address {
        address_of(!u128::MAX.checked_shr(self.bits).unwrap_or(0))
    }

    /// Returns true if an address is in this prefix.
    #[must_use]
    pub fn contains(&self, address: &Address) -> bool {
        bits_of(address) & bits_of(&self.mask()) == self.network && address.is_v4() == self.is_v4
    }

    /// Returns how many addresses have an index: all except the first (the network address) and the last (the
    /// broadcast address in IPv4). In a prefix with only one address, none has an index.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        let host = u128::MAX.checked_shr(self.bits).unwrap_or(0);
        u32::try_from(host.saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// Returns the address with this index, or `None` if the index is out of range.
    #[must_use]
    pub fn address(&self, index: u32) -> Option<Address> {
        (index < self.capacity()).then(|| address_of(self.network + u128::from(index) + 1))
    }

    /// Returns the index of an address, or `None` if the address has no index in this prefix.
    #[must_use]
    pub fn index(&self, address: &Address) -> Option<u32> {
        let index = bits_of(address).checked_sub(self.network)?.checked_sub(1)?;
        u32::try_from(index)
            .ok()
            .filter(|index| *index < self.capacity())
    }
}

impl core::str::FromStr for Prefix {
    type Err = InvalidPrefix;

    /// Parses the format written by [`core::fmt::Display`], such as `198.19.0.0/16`.
    fn from_str(text: &str) -> Result<Self, InvalidPrefix> {
        let (address, length) = text.split_once('/').ok_or(InvalidPrefix)?;
        let address: core::net::IpAddr = address.parse().or(Err(InvalidPrefix))?;
        let length = length.parse().or(Err(InvalidPrefix))?;
        Self::new(Address::from_ip(address), length).ok_or(InvalidPrefix)
    }
}

/// The error returned for text that is not a valid prefix.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InvalidPrefix;

impl core::fmt::Display for Prefix {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}/{}", self.network().to_ip(), self.length())
    }
}

fn bits_of(address: &Address) -> u128 {
    let [a, b, c, d] = address.words().map(|word| u128::from(u32::from_be(word)));
    a << 96 | b << 64 | c << 32 | d
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "each shift moves the wanted word to the low 32 bits"
)]
fn address_of(number: u128) -> Address {
    let word = |shift: u32| ((number >> shift) as u32).to_be();
    Address::from_words([word(96), word(64), word(32), word(0)])
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> Address {
        Address::from_ip(text.parse::<IpAddr>().expect("an address"))
    }

    fn prefix(text: &str, length: u8) -> Prefix {
        Prefix::new(address(text), length).expect("a range")
    }

    #[test]
    fn indices_begin_behind_the_network_address_and_end_before_the_broadcast() {
        let range = prefix("198.19.0.0", 16);

        assert_eq!(range.capacity(), 65_534);
        assert_eq!(range.address(0), Some(address("198.19.0.1")));
        assert_eq!(range.address(65_533), Some(address("198.19.255.254")));
        assert_eq!(range.address(65_534), None);
        for outside in ["198.19.0.0", "198.19.255.255", "198.20.0.1", "fd00::1"] {
            assert_eq!(range.index(&address(outside)), None, "{outside}");
        }
        let found = prefix("fd00:c01e::", 64).address(255);
        assert_eq!(found, Some(address("fd00:c01e::100")));
    }

    #[test]
    fn a_length_beyond_the_family_and_a_network_address_with_host_bits_are_no_prefix() {
        assert_eq!(Prefix::new(address("198.19.0.0"), 33), None);
        assert_eq!(Prefix::new(address("198.19.0.1"), 16), None);
        assert_eq!(Prefix::new(address("fd00:c01e::1"), 64), None);
        assert!(Prefix::new(address("fd00:c01e::1"), 128).is_some());
        assert_eq!(prefix("10.0.0.1", 32).capacity(), 0);
    }

    proptest! {
        #[test]
        fn an_index_comes_back_from_its_address(index: u32, length in 0_u8..=128, word: u128) {
            let network = word & !u128::MAX.checked_shr(length.into()).unwrap_or(0);
            let address = address_of(network);
            prop_assume!(!address.is_v4());
            let range = Prefix::new(address, length).expect("a range");
            prop_assert_eq!(range.length(), length);
            match range.address(index) {
                Some(found) => prop_assert_eq!(range.index(&found), Some(index)),
                None => prop_assert!(index >= range.capacity()),
            }
        }
    }
}
