//! Keys and values of the service maps.
//!
//! The hash `services` maps a [`FrontendKey`] to the index of a [`Frontend`] in the array `frontends`. A
//! [`Frontend`] has two backend sets, each of which is a range of the array `slots`. A [`Slot`] holds the
//! index of a [`Backend`] in the array `backends`. Entries are written once, and reused only after a grace
//! period. Only [`Backend::state`] and [`Backend::sets`] change in place.

use core::{
    fmt,
    mem::{offset_of, size_of},
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::{Address, Port, Protocol},
    steering::Prefix,
};

/// Key of the map `services`: a frontend's address, port and protocol.
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
pub struct FrontendKey {
    /// The address that clients dial.
    pub address: Address,
    /// The port that clients dial.
    pub port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// Zero.
    pub reserved: u8,
}

impl FrontendKey {
    /// Creates a key from an address, port and protocol.
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

    /// Creates the key of an address itself, whose value is in [`crate::service_range`].
    #[inline(always)]
    #[must_use]
    pub const fn of_address(address: Address) -> Self {
        Self::new(address, Port::from_host(0), Protocol::ANY)
    }

    /// Returns true if this is the key of an address itself.
    #[must_use]
    pub fn is_of_address(&self) -> bool {
        self.protocol == Protocol::ANY
    }

    /// Returns the key as words, for hashing.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> &[u32; 5] {
        zerocopy::transmute_ref!(self)
    }
}

impl fmt::Display for FrontendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.address.is_v4() {
            write!(f, "{}:{}/{}", self.address, self.port, self.protocol)
        } else {
            write!(f, "[{}]:{}/{}", self.address, self.port, self.protocol)
        }
    }
}

/// A range of entries in an array: the slots in a backend set, or a frontend's source ranges.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct IndexRange {
    /// The index of the first entry.
    pub base: u32,
    /// The number of entries.
    pub len: u32,
}

/// The algorithm that chooses a slot from a backend set.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct Algorithm(u8);

impl Algorithm {
    /// A uniform random choice for each connection.
    pub const RANDOM: Self = Self(0);
    /// Round-robin, with one counter per service port.
    pub const ROUND_ROBIN: Self = Self(1);
    /// A hash of the client.
    pub const SOURCE_HASH: Self = Self(2);
    /// A hash of the dialled address, port and protocol.
    pub const DESTINATION_HASH: Self = Self(3);
    /// A hash of the client; the slots form a Maglev table.
    pub const MAGLEV: Self = Self(4);
    /// The better of two random slots: the one whose backend has fewer open connections in proportion to its
    /// share of the set.
    pub const LEAST_CONN: Self = Self(5);

    /// Returns true if the choice depends only on the client.
    #[inline(always)]
    #[must_use]
    pub const fn is_by_client(self) -> bool {
        self.0 == Self::SOURCE_HASH.0 || self.0 == Self::MAGLEV.0
    }

    /// Returns the name used in annotations, tables and logs.
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

/// The maximum number of backends in a frontend's record. Choosing from such a small set avoids reading
/// `slots` and `backends`, which causes cache misses if there are many Services.
pub const MAX_INLINE_BACKENDS: usize = 3;

/// A backend inside a frontend's record: a copy of its entry in `backends`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct InlineBackend {
    /// The address of the backend.
    pub address: Address,
    /// The port of the backend.
    pub port: Port,
    /// The backend's number of slots, as in [`Slot::share`].
    pub share: u16,
    /// The index of the backend in the array `backends`.
    pub index: u32,
}

impl InlineBackend {
    /// An unused entry.
    pub const NONE: Self = Self {
        address: Address::UNSPECIFIED,
        port: Port::from_network(0),
        share: 0,
        index: 0,
    };
}

/// Value of the array `frontends`: a frontend's record. Written once.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Frontend {
    /// The key for which the record was written. A reader that looked up another key has a stale index, and
    /// repeats the lookup.
    pub key: FrontendKey,
    /// The service port that owns the frontend and its backends; also the index of its [`ServiceCounts`].
    pub service: u32,
    /// The backends for the traffic policy `Cluster`.
    pub cluster: IndexRange,
    /// The algorithm that chooses a slot.
    pub algorithm: Algorithm,
    /// A combination of [`Frontend::SOCKETS_LOCAL`], [`Frontend::PACKETS_LOCAL`],
    /// [`Frontend::HAS_ENDPOINTS`], [`Frontend::NOT_SOCKETS`], [`Frontend::ADMITS_HOST`] and
    /// [`Frontend::HOST_UNKNOWN`].
    pub flags: u8,
    /// A combination of [`Frontend::MASQUERADE`], [`Frontend::MASQUERADE_FOREIGN`] and [`Frontend::NOT_PACKETS`].
    pub packet_flags: u8,
    /// Zero.
    pub reserved: u8,
    /// The backends in the set for sockets, if there are at most [`MAX_INLINE_BACKENDS`].
    pub inline_backends: [InlineBackend; MAX_INLINE_BACKENDS],
    /// The backends on this node, for the traffic policy `Local`.
    pub local: IndexRange,
    /// The session affinity timeout in seconds, or 0 for a Service without session affinity.
    pub affinity_timeout: u32,
    /// The permitted clients, as ranges in the array `source_ranges`, in ascending order. If there are no
    /// ranges, all clients are permitted.
    pub source_ranges: IndexRange,
}

impl Frontend {
    /// Flag: sockets on this node choose from `local` instead of `cluster`.
    pub const SOCKETS_LOCAL: u8 = 1;
    /// Flag: packets from outside this node choose from `local` instead of `cluster`.
    pub const PACKETS_LOCAL: u8 = 2;
    /// Flag: the Service has endpoints. If the backend set is empty, this flag makes the destination
    /// unreachable; without the flag, connections are refused.
    pub const HAS_ENDPOINTS: u8 = 4;
    /// Flag: the frontend is for packets only; sockets are not translated.
    pub const NOT_SOCKETS: u8 = 8;
    /// Flag: the host's sockets may use the frontend. Read only if the frontend has source ranges.
    pub const ADMITS_HOST: u8 = 16;
    /// Flag: the planner doesn't know the source address of the host's sockets, so the programs check them
    /// like sockets in pods. Read only if the frontend has source ranges.
    pub const HOST_UNKNOWN: u8 = 32;
    /// Flag for packets: to a backend on another node they leave with an address of this node.
    pub const MASQUERADE: u8 = 1;
    /// Flag for packets: the same, if their sender is not local.
    pub const MASQUERADE_FOREIGN: u8 = 2;
    /// Flag: packets are not translated, because a process of this node listens on the frontend's address itself.
    pub const NOT_PACKETS: u8 = 4;
}

/// Value of the array `slots`: one slot in a backend set. Written once.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Slot {
    /// The index of the backend in the array `backends`.
    pub backend: u32,
    /// The number of slots in the set that lead to this backend, which is its relative weight.
    pub share: u32,
}

/// Value of the array `source_ranges`: a range of client addresses that may use a frontend. Written once.
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
pub struct SourceRange {
    /// The first address in the range.
    pub first: Address,
    /// The last address in the range.
    pub last: Address,
}

impl SourceRange {
    /// Returns the range of a prefix.
    #[must_use]
    pub fn of_prefix(prefix: &Prefix) -> Self {
        let (first, mask) = (prefix.network(), prefix.mask());
        let [a, b, c, d] = mask.words().map(|word| !word);
        let [e, f, g, h] = first.words();
        Self {
            first,
            last: Address::from_words([a | e, b | f, c | g, d | h]),
        }
    }
}

/// Value of the array `service_counts`: a service port's counters.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct ServiceCounts {
    /// The number of connections and UDP flows sent to a backend.
    pub sent: u64,
    /// The number of connections and datagrams refused.
    pub refused: u64,
    /// The round-robin counter.
    pub round_robin: u64,
}

/// A backend's state and the generation of its index, in one word. Bit 0 is set while the backend is serving,
/// and the other bits count generations. No value recurs, so comparing a single word shows that a socket's
/// backend is the same one and is still serving.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct BackendState(u32);

impl BackendState {
    const SERVING: u32 = 1;

    /// Returns true if the backend is serving, or false if it was removed or the index was never used.
    #[inline(always)]
    #[must_use]
    pub const fn is_serving(self) -> bool {
        self.0 & Self::SERVING != 0
    }

    /// Returns the state of a serving backend in the index's next generation.
    #[must_use]
    pub const fn next_generation(self) -> Self {
        Self((self.0 | Self::SERVING).wrapping_add(2))
    }

    /// Returns the same generation of the index, marked as removed.
    #[must_use]
    pub const fn removed(self) -> Self {
        Self(self.0 & !Self::SERVING)
    }

    /// Returns the initial state for an index in a new map, if an older map may have used the same index.
    /// `milliseconds` is the time since boot. The state advances by one generation per millisecond, which is
    /// faster than an index can be reused, because each generation ends with a grace period. The new map
    /// therefore never repeats a state from the older one.
    #[must_use]
    pub fn initial_at(milliseconds: u64) -> Self {
        let generation = u32::try_from(milliseconds & 0x7fff_ffff).unwrap_or(0);
        Self(generation.max(1) << 1)
    }
}

/// Value of the array `backends`: one backend of one service port.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Backend {
    /// The address to which connections are sent.
    pub address: Address,
    /// The port to which connections are sent.
    pub port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// Zero; reserved for flags in later layouts.
    pub flags: u8,
    /// The service port to which this index belongs.
    pub service: u32,
    /// The state, and the generation of the index. Changes while the index is in use.
    pub state: BackendState,
    /// The backend sets to which this backend belongs, checked for clients with session affinity. Changes
    /// while the index is in use.
    pub sets: Membership,
}

/// The backend sets of a service port to which a backend belongs.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct Membership(u32);

impl Membership {
    /// In no set: the backend gets no new connections.
    pub const NONE: Self = Self(0);
    /// In the set for the traffic policy `Cluster`.
    pub const CLUSTER: Self = Self(1);
    /// In the set for the traffic policy `Local`.
    pub const LOCAL: Self = Self(2);

    /// Returns the sets that are in either of the two.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the sets that are in both of the two.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if the two are equal. Unlike `==`, this can be used in const functions.
    #[inline(always)]
    #[must_use]
    pub const fn equals(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Returns true if `other` is not empty and all of its sets are also in `self`.
    #[inline(always)]
    #[must_use]
    pub const fn includes(self, other: Self) -> bool {
        other.0 != 0 && self.0 & other.0 == other.0
    }
}

const _: () = {
    assert!(size_of::<FrontendKey>() == 20);
    assert!(offset_of!(FrontendKey, port) == 16);
    assert!(offset_of!(FrontendKey, protocol) == 18);
    assert!(size_of::<InlineBackend>() == 24);
    assert!(size_of::<Frontend>() == 128);
    assert!(offset_of!(Frontend, service) == 20);
    assert!(offset_of!(Frontend, cluster) == 24);
    assert!(offset_of!(Frontend, inline_backends) == 36);
    assert!(offset_of!(Frontend, local) == 108);
    assert!(offset_of!(Frontend, source_ranges) == 120);
    assert!(size_of::<SourceRange>() == 32);
    assert!(size_of::<ServiceCounts>() == 24);
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
        fn a_state_never_recurs_in_later_generations(word: u32, generations in 1..64_usize) {
            let first = BackendState(word).next_generation();
            let mut state = first;
            for _ in 0..generations {
                prop_assert!(state.is_serving());
                prop_assert!(!state.removed().is_serving());
                prop_assert_ne!(state.removed(), first);
                state = state.removed().next_generation();
                prop_assert_ne!(state, first);
            }
        }

        #[test]
        fn a_new_map_repeats_no_state_of_an_older_one(
            created_at in 0..u64::from(u32::MAX),
            later in 1..1_000_000_u64,
            generations in 0..64_u64,
        ) {
            let mut old = BackendState::initial_at(created_at);
            let mut new = BackendState::initial_at(created_at + later.max(2 * generations + 2));
            prop_assert!(!new.is_serving());
            prop_assert_ne!(new, BackendState::default());
            let mut seen = Vec::new();
            for _ in 0..generations {
                old = old.next_generation();
                seen.push(old);
            }
            for _ in 0..generations {
                new = new.next_generation();
                prop_assert!(!seen.contains(&new));
            }
        }
    }

    #[test]
    fn a_frontend_key_displays_as_address_port_and_protocol() {
        let key = |ip: &str, protocol| {
            let address = Address::from_ip(ip.parse().expect("an address"));
            FrontendKey::new(address, Port::from_host(80), protocol).to_string()
        };

        assert_eq!(key("10.96.0.10", Protocol::TCP), "10.96.0.10:80/TCP");
        assert_eq!(key("fd00::10", Protocol::UDP), "[fd00::10]:80/UDP");
    }
}
