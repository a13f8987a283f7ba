//! The translations stored for a socket: the last one, in the socket storage `origin`, and an unconnected
//! socket's older ones, in the map `overflow`.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::{Address, Port, Protocol},
    service::{BackendState, FrontendKey},
};

/// The version of [`Origin`]. Open sockets keep their values across upgrades, so a change may use only
/// reserved fields, and must increment the version.
pub const ORIGIN_VERSION: u8 = 1;

/// The idle time after which a UDP flow chooses a backend again, in nanoseconds. The same as the conntrack
/// timeout for flows through kube-proxy (`net.netfilter.nf_conntrack_udp_timeout_stream`).
pub const UDP_IDLE_NS: u64 = 120_000_000_000;

/// A socket's translation: the VIP that was dialled, and the backend that was chosen.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Origin {
    /// The time at which a UDP flow was last used, in nanoseconds on the monotonic clock; 0 for TCP.
    pub last_used: u64,
    /// The address that was dialled.
    pub vip: Address,
    /// The address of the backend.
    pub backend: Address,
    /// The index of the backend in the array `backends`.
    pub index: u32,
    /// The backend's state when it was chosen.
    pub state: BackendState,
    /// The service port that owned the frontend when it was dialled.
    pub service: u32,
    /// The port that was dialled.
    pub vip_port: Port,
    /// The port of the backend.
    pub backend_port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// [`ORIGIN_VERSION`].
    pub version: u8,
    /// A combination of [`Origin::OVERFLOWED`] and [`Origin::COUNTED`].
    pub flags: u16,
    /// Zero.
    pub reserved: u32,
}

impl Origin {
    /// Flag: older translations of this socket are in `overflow`.
    pub const OVERFLOWED: u16 = 1;
    /// Flag: the socket is counted in the map `conns`, at [`Origin::index`]. Not set in values that were
    /// written before that map existed, or for kernel sockets, because no hook runs when they are closed.
    pub const COUNTED: u16 = 2;

    /// The index and service port in a translation that leads not to a backend, but to the tunnel's ingress
    /// or to an address that refuses connections.
    pub const NO_BACKEND: u32 = u32::MAX;

    /// Creates a translation from a key to an address and port, with no backend index and not counted.
    #[inline(always)]
    #[must_use]
    pub fn new(key: &FrontendKey, backend: Address, backend_port: Port) -> Self {
        Self {
            last_used: 0,
            vip: key.address,
            backend,
            index: Self::NO_BACKEND,
            state: BackendState::default(),
            service: Self::NO_BACKEND,
            vip_port: key.port,
            backend_port,
            protocol: key.protocol,
            version: ORIGIN_VERSION,
            flags: 0,
            reserved: 0,
        }
    }

    /// Returns true if two translations lead from the same VIP to the same backend.
    #[inline(always)]
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.index == other.index
            && self.state == other.state
            && self.leads_to(&other.backend, other.backend_port)
            && self.vip_port == other.vip_port
            && self.vip == other.vip
    }

    /// Returns true if older translations of the socket are in `overflow`.
    #[inline(always)]
    #[must_use]
    pub const fn has_older(&self) -> bool {
        self.flags & Self::OVERFLOWED != 0
    }

    /// Returns the index of the backend that counts this socket as an open connection, or `None` if the
    /// socket is not counted.
    #[inline(always)]
    #[must_use]
    pub const fn counted_index(&self) -> Option<u32> {
        if self.flags & Self::COUNTED == 0 {
            None
        } else {
            Some(self.index)
        }
    }

    /// Returns true if this is the translation of `key`.
    #[inline(always)]
    #[must_use]
    pub fn is_for(&self, key: &FrontendKey) -> bool {
        self.vip_port == key.port && self.protocol == key.protocol && self.vip == key.address
    }

    /// Returns true if this address and port are the backend's.
    #[inline(always)]
    #[must_use]
    pub fn leads_to(&self, address: &Address, port: Port) -> bool {
        self.backend_port == port && self.backend == *address
    }
}

/// Key of the LRU hash map `overflow`: a socket, and either the VIP or the backend of one of its
/// translations.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct OverflowKey {
    /// The socket's cookie.
    pub cookie: u64,
    /// The address of the VIP or backend.
    pub address: Address,
    /// The port of the VIP or backend.
    pub port: Port,
    /// The direction, which distinguishes a VIP from a backend.
    pub direction: Direction,
    reserved: u8,
    reserved_word: u32,
}

impl OverflowKey {
    /// Creates a key from a socket's cookie and a VIP or backend.
    ///
    /// The reserved fields are not an array of bytes, because programs would fill an array in a loop, and the
    /// verifier would follow every iteration.
    #[inline(always)]
    #[must_use]
    pub const fn new(cookie: u64, address: Address, port: Port, direction: Direction) -> Self {
        Self {
            cookie,
            address,
            port,
            direction,
            reserved: 0,
            reserved_word: 0,
        }
    }
}

/// The direction of an entry in `overflow`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(transparent)]
pub struct Direction(u8);

impl Direction {
    /// From a VIP to its backend.
    pub const FORWARD: Self = Self(0);
    /// From a backend to its VIP.
    pub const REVERSE: Self = Self(1);
}

/// Value of `overflow`: the translation, and a copy of the entry's key. The kernel may reuse a hash element
/// for another key while a program is reading it, so readers compare this copy with the key that they looked
/// up.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Overflow {
    /// A copy of the entry's key.
    pub key: OverflowKey,
    /// The translation.
    pub origin: Origin,
}

const _: () = {
    assert!(size_of::<Origin>() == 64);
    assert!(offset_of!(Origin, vip) == 8);
    assert!(offset_of!(Origin, backend) == 24);
    assert!(offset_of!(Origin, index) == 40);
    assert!(offset_of!(Origin, vip_port) == 52);
    assert!(offset_of!(Origin, version) == 57);
    assert!(size_of::<OverflowKey>() == 32);
    assert!(offset_of!(OverflowKey, address) == 8);
    assert!(size_of::<Overflow>() == 96);
};
