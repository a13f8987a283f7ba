//! Keys and values of the service maps.
//!
//! `svc` is a hash from a [`FrontKey`] to the index of a [`Front`] in the array `front`. A record names
//! two sets, ranges of the array `slot`; a [`Slot`] names a [`Backend`] in the array `be`. Records,
//! slots and the address of a backend are written once and freed only after a grace period; the two
//! words that change in place are [`Backend::state`] and [`Backend::sets`].

use core::{
    fmt,
    mem::{offset_of, size_of},
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addr::{Address, Port, Protocol};

/// Key of the map `svc`: one address, port and protocol that is translated.
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
pub struct FrontKey {
    /// The address that clients dial.
    pub address: Address,
    /// The port that clients dial.
    pub port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// Zero.
    pub reserved: u8,
}

impl FrontKey {
    /// Returns the key of an address, port and protocol.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: Address, port: Port, protocol: Protocol) -> Self {
        Self {
            address,
            port,
            protocol,
            reserved: 0,
        }
    }

    /// Returns the words of the key, as input of a hash.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> &[u32; 5] {
        zerocopy::transmute_ref!(self)
    }
}

impl fmt::Display for FrontKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.address.is_v4() {
            write!(f, "{}:{}/{}", self.address, self.port, self.protocol)
        } else {
            write!(f, "[{}]:{}/{}", self.address, self.port, self.protocol)
        }
    }
}

/// The backends that a frontend may use: `len` slots of the array `slot` from `base` on.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct Set {
    /// Index of the first slot.
    pub base: u32,
    /// The number of slots; 0 for a frontend without backends, which refuses.
    pub len: u32,
}

/// The algorithm that chooses a slot from a set.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct Algorithm(u8);

impl Algorithm {
    /// A uniform random choice for each connection.
    pub const RANDOM: Self = Self(0);
    /// Round-robin, with a counter per service port.
    pub const ROUND_ROBIN: Self = Self(1);
    /// A hash of the client.
    pub const SOURCE_HASH: Self = Self(2);
    /// A hash of the address and port that are dialled.
    pub const DESTINATION_HASH: Self = Self(3);
    /// A hash of the client, from a set that is a Maglev table.
    pub const MAGLEV: Self = Self(4);
    /// The better of two random slots: the one whose backend has fewer open connections for its share of
    /// the set.
    pub const LEAST_CONN: Self = Self(5);

    /// Returns true if the choice depends on the client only.
    #[inline(always)]
    #[must_use]
    pub const fn is_by_client(self) -> bool {
        self.0 == Self::SOURCE_HASH.0 || self.0 == Self::MAGLEV.0
    }

    /// Returns the word used in annotations, tables and logs.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::RANDOM => "random",
            Self::ROUND_ROBIN => "round-robin",
            Self::SOURCE_HASH => "source-hash",
            Self::DESTINATION_HASH => "destination-hash",
            Self::MAGLEV => "maglev",
            Self::LEAST_CONN => "least-conn",
            _ => "unknown",
        }
    }
}

/// The number of backends that a record itself can contain. A choice from a set of this size needs no
/// read of `slot` and `be`, which are cache misses if there are many Services.
pub const NEAR: usize = 3;

/// A backend in a record: a copy of its entry in `be`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Near {
    /// The address of the backend.
    pub address: Address,
    /// The port of the backend.
    pub port: Port,
    /// As [`Slot::share`].
    pub share: u16,
    /// The index of the backend in the array `be`.
    pub index: u32,
}

impl Near {
    /// No backend.
    pub const NONE: Self = Self {
        address: Address::UNSPECIFIED,
        port: Port::from_network(0),
        share: 0,
        index: 0,
    };
}

/// Value of the array `front`: a write-once record of one frontend.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Front {
    /// The key for which the record was written. A reader with another key got a stale index, and looks
    /// up again.
    pub key: FrontKey,
    /// The service port that owns the frontend and its backends; also the index of its [`Tally`].
    pub service: u32,
    /// The backends for `internalTrafficPolicy` and `externalTrafficPolicy` Cluster.
    pub cluster: Set,
    /// The algorithm that chooses a slot.
    pub algorithm: Algorithm,
    /// Bits of [`Front::SOCKETS_LOCAL`], [`Front::PACKETS_LOCAL`], [`Front::HAS_ENDPOINTS`],
    /// [`Front::NOT_SOCKETS`], [`Front::ADMITS_HOST`] and [`Front::HOST_UNKNOWN`].
    pub flags: u8,
    /// Zero.
    pub reserved: u16,
    /// The backends of the sockets' set, if there are at most [`NEAR`].
    pub near: [Near; NEAR],
    /// The backends on this node, for the traffic policies Local.
    pub local: Set,
    /// The time-out of the client-IP affinity in seconds; 0 for none.
    pub affinity: u32,
    /// The clients that may use the frontend: `len` entries of the array `source` from `base` on, in
    /// ascending order; all clients if there are none.
    pub sources: Set,
}

impl Front {
    /// Flag: sockets of this node choose from `local`, else from `cluster`.
    pub const SOCKETS_LOCAL: u8 = 1;
    /// Flag: packets from elsewhere choose from `local`, else from `cluster`.
    pub const PACKETS_LOCAL: u8 = 2;
    /// Flag: the Service has endpoints. If the set for the traffic has none of them, the destination is
    /// unreachable; without the flag, connects are refused.
    pub const HAS_ENDPOINTS: u8 = 4;
    /// Flag: sockets are left alone; the frontend is for packets only.
    pub const NOT_SOCKETS: u8 = 8;
    /// Flag: the host's own sockets may use the frontend. Only read if the frontend has `sources`.
    pub const ADMITS_HOST: u8 = 16;
    /// Flag: the source address of the host's own sockets is unknown to the planner, so the programs
    /// check them as sockets of pods. Only read if the frontend has `sources`.
    pub const HOST_UNKNOWN: u8 = 32;
}

/// Value of the array `slot`: a write-once slot of a set.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Slot {
    /// Index into the array `be`.
    pub backend: u32,
    /// The number of slots of the set that lead to this backend: its relative weight.
    pub share: u32,
}

/// Value of the array `source`: a write-once range of addresses that may use a frontend.
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
pub struct Source {
    /// The first address.
    pub first: Address,
    /// The last address.
    pub last: Address,
}

/// Value of the array `tally`: the counters of a service port.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct Tally {
    /// The number of connections and UDP flows that were sent to a backend.
    pub sent: u64,
    /// The number of connections and datagrams that were refused.
    pub refused: u64,
    /// The counter of round-robin.
    pub turn: u64,
}

/// The state and generation of a backend, a word that changes. The word of one generation never recurs,
/// so an equal word means "the same backend, still serving".
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct State(u32);

impl State {
    const SERVING: u32 = 1;

    /// Returns true if the backend serves; otherwise it is removed, or the index was never used.
    #[inline(always)]
    #[must_use]
    pub const fn is_serving(self) -> bool {
        self.0 & Self::SERVING != 0
    }

    /// Returns the first state of the next generation of the index.
    #[must_use]
    pub const fn next_use(self) -> Self {
        Self((self.0 | Self::SERVING).wrapping_add(2))
    }

    /// Returns this generation of the index, marked as removed.
    #[must_use]
    pub const fn gone(self) -> Self {
        Self(self.0 & !Self::SERVING)
    }

    /// Returns an unused state for a new map whose indices may have been in use before, by the time
    /// since the machine started. The word advances by one generation a millisecond, faster than an
    /// index can be reused (a generation ends with a grace period), so no later generation equals an
    /// earlier one.
    #[must_use]
    pub fn unused_since(milliseconds: u64) -> Self {
        let uses = u32::try_from(milliseconds & 0x7fff_ffff).unwrap_or(0);
        Self(uses.max(1) << 1)
    }
}

/// Value of the array `be`: one backend of one service port.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Backend {
    /// The address that connections are sent to.
    pub address: Address,
    /// The port that connections are sent to.
    pub port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// Zero; reserved for flags of later layouts.
    pub flags: u8,
    /// The service port that this index belongs to.
    pub service: u32,
    /// The state and generation. Changes while the index is in use.
    pub state: State,
    /// The sets of its service port that contain the backend, for clients that keep their backend.
    /// Changes while the index is in use.
    pub sets: Membership,
}

/// The sets of its service port that contain a backend.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct Membership(u32);

impl Membership {
    /// In no set: the backend gets no new connections.
    pub const NONE: Self = Self(0);
    /// In the set for the traffic policies Cluster.
    pub const CLUSTER: Self = Self(1);
    /// In the set for the traffic policies Local.
    pub const LOCAL: Self = Self(2);

    /// Returns the union of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if both are the same sets.
    #[inline(always)]
    #[must_use]
    pub const fn is(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Returns true if `other` is not empty and all its sets are in this.
    #[inline(always)]
    #[must_use]
    pub const fn includes(self, other: Self) -> bool {
        other.0 != 0 && self.0 & other.0 == other.0
    }
}

const _: () = {
    assert!(size_of::<FrontKey>() == 20);
    assert!(offset_of!(FrontKey, port) == 16);
    assert!(offset_of!(FrontKey, protocol) == 18);
    assert!(size_of::<Near>() == 24);
    assert!(size_of::<Front>() == 128);
    assert!(offset_of!(Front, service) == 20);
    assert!(offset_of!(Front, cluster) == 24);
    assert!(offset_of!(Front, near) == 36);
    assert!(offset_of!(Front, local) == 108);
    assert!(offset_of!(Front, sources) == 120);
    assert!(size_of::<Source>() == 32);
    assert!(size_of::<Tally>() == 24);
    assert!(size_of::<Slot>() == 8);
    assert!(size_of::<Backend>() == 32);
    assert!(offset_of!(Backend, service) == 20);
    assert!(offset_of!(Backend, state) == 24);
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_state_is_never_seen_again_in_the_uses_that_follow(word: u32, uses in 1..64_usize) {
            let first = State(word).next_use();
            let mut state = first;
            for _ in 0..uses {
                prop_assert!(state.is_serving());
                prop_assert!(!state.gone().is_serving());
                prop_assert_ne!(state.gone(), first);
                state = state.gone().next_use();
                prop_assert_ne!(state, first);
            }
        }

        #[test]
        fn an_index_of_a_new_map_begins_beyond_the_uses_that_it_had_in_the_old_one(
            made in 0..u64::from(u32::MAX),
            later in 1..1_000_000_u64,
            uses in 0..64_u64,
        ) {
            let mut old = State::unused_since(made);
            let mut new = State::unused_since(made + later.max(2 * uses + 2));
            prop_assert!(!new.is_serving());
            prop_assert_ne!(new, State::default());
            let mut seen = Vec::new();
            for _ in 0..uses {
                old = old.next_use();
                seen.push(old);
            }
            for _ in 0..uses {
                new = new.next_use();
                prop_assert!(!seen.contains(&new));
            }
        }
    }

    #[test]
    fn a_front_is_written_as_people_write_it() {
        let key = |ip: &str, protocol| {
            let address = Address::from_ip(ip.parse().expect("an address"));
            FrontKey::new(address, Port::from_host(80), protocol).to_string()
        };

        assert_eq!(key("10.96.0.10", Protocol::TCP), "10.96.0.10:80/TCP");
        assert_eq!(key("fd00::10", Protocol::UDP), "[fd00::10]:80/UDP");
    }
}
