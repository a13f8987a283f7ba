//! Keys and values of the map `fragments`: how the tc programs translate the fragments of a packet, of which only the first
//! one contains ports.

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{addr::Address, packet::fragment::FragmentHeader};

/// Key of the map `fragments`: a packet that arrives or leaves in fragments.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct FragmentKey {
    /// The source address of the fragments.
    pub source: Address,
    /// The destination address of the fragments.
    pub destination: Address,
    /// The number that all fragments of the packet have.
    pub id: u32,
    /// The transport protocol of an IPv4 packet, otherwise 0.
    pub protocol: u8,
    /// 1 if the packet leaves, 0 if it arrives.
    pub leaves: u8,
    /// Zero.
    pub reserved: u16,
}

impl FragmentKey {
    /// Creates the key of a fragment.
    #[inline(always)]
    #[must_use]
    pub const fn new(header: &FragmentHeader, leaves: bool) -> Self {
        #[expect(clippy::as_conversions, reason = "`From` is not const")]
        let leaves = leaves as u8;
        Self {
            source: header.source,
            destination: header.destination,
            id: header.id,
            protocol: header.protocol,
            leaves,
            reserved: 0,
        }
    }

    /// Returns the source and the destination of fragments after one of them is replaced by an address.
    #[inline(always)]
    #[must_use]
    pub const fn with_address(&self, address: Address) -> [Address; 2] {
        if self.leaves == 0 {
            [self.source, address]
        } else {
            [address, self.destination]
        }
    }

    /// Returns true if both keys are equal. Unlike `==`, compiles to few branches, which saves the verifier work.
    #[inline(always)]
    const fn is(&self, other: &Self) -> bool {
        let [a, b] = self.source.halves();
        let [c, d] = other.source.halves();
        let [e, f] = self.destination.halves();
        let [g, h] = other.destination.halves();
        (a ^ c) | (b ^ d) | (e ^ g) | (f ^ h) == 0
            && self.id == other.id
            && self.protocol == other.protocol
            && self.leaves == other.leaves
    }
}

/// Value of the map `fragments`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct FragmentRecord {
    /// The key. The kernel may reuse an entry while a program reads it.
    pub key: FragmentKey,
    /// The address that the fragments get at the end that the program replaces.
    pub address: Address,
    /// The time at which the first fragment passed, in seconds of the monotonic clock.
    pub time: u32,
    /// Zero.
    pub reserved: u32,
}

impl FragmentRecord {
    /// The default timeout in seconds: that of the kernel for reassembly (`net.ipv4.ipfrag_time`).
    pub const DEFAULT_TIMEOUT: u32 = 30;

    /// Returns true if this is the record of a key, and not older than a timeout in seconds.
    #[inline(always)]
    #[must_use]
    pub const fn is_valid(&self, key: &FragmentKey, now: u32, timeout: u32) -> bool {
        self.key.is(key) && now.wrapping_sub(self.time) <= timeout
    }
}

const _: () = {
    assert!(size_of::<FragmentKey>() == 40);
    assert!(size_of::<FragmentRecord>() == 64);
};
