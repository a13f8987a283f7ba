//! The traits that provide the inputs for the choice of a backend: the maps, and the socket or packet.

use crate::{
    addr::Address,
    affinity::{Affinity, AffinityKey, Client},
    decide, select,
    service::{
        Backend, BackendState, Frontend, FrontendKey, IndexRange, InlineBackend,
        MAX_INLINE_BACKENDS, Membership, Slot, SourceRange,
    },
};

/// The kind of traffic, which determines the backend set that a frontend uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Traffic {
    /// Connections and datagrams from sockets on this node.
    Sockets = 0,
    /// Packets from outside this node.
    Packets = 1,
    /// Packets from pods of this node whose sockets have met no hook.
    PodPackets = 2,
}

impl Traffic {
    /// Returns the frontend's backend set for this traffic.
    #[inline(always)]
    #[must_use]
    pub const fn set(self, frontend: &Frontend) -> IndexRange {
        if self.is_local(frontend) {
            frontend.local
        } else {
            frontend.cluster
        }
    }

    /// Returns the frontend's backend set for this traffic, in the form used by [`Backend::sets`].
    #[inline(always)]
    #[must_use]
    pub const fn membership(self, frontend: &Frontend) -> Membership {
        if self.is_local(frontend) {
            Membership::LOCAL
        } else {
            Membership::CLUSTER
        }
    }

    #[inline(always)]
    const fn is_local(self, frontend: &Frontend) -> bool {
        let flag = match self {
            Self::Sockets | Self::PodPackets => Frontend::SOCKETS_LOCAL,
            Self::Packets => Frontend::PACKETS_LOCAL,
        };
        frontend.flags & flag != 0
    }

    /// Returns true if the frontend's record itself contains the backends for this traffic.
    #[inline(always)]
    #[must_use]
    pub const fn has_inline_backends(self, frontend: &Frontend) -> bool {
        // `inline_backends` holds the set for sockets, so packets may use it only if they use the same set.
        let inline = Self::Sockets.membership(frontend);
        self.membership(frontend).equals(inline) && is_few(self.set(frontend).len)
    }
}

#[inline(always)]
#[expect(clippy::as_conversions, reason = "`From` is not const")]
const fn is_few(len: u32) -> bool {
    len as usize <= MAX_INLINE_BACKENDS
}

/// A [`Client`] as scalars, which can be passed to a function in registers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClientScalars {
    /// The client's kind, as in [`Client::parts`].
    pub kind: u32,
    /// The upper half of the client's address.
    pub upper: u64,
    /// The lower half of the client's address.
    pub lower: u64,
}

impl ClientScalars {
    /// The value used when the choice doesn't depend on the client.
    pub const NONE: Self = Self {
        kind: 0,
        upper: 0,
        lower: 0,
    };

    /// Converts a client to scalars.
    #[inline(always)]
    #[must_use]
    pub const fn new(client: &Client) -> Self {
        let (kind, [upper, lower]) = client.parts();
        Self { kind, upper, lower }
    }

    /// Converts the scalars to a client.
    #[inline(always)]
    #[must_use]
    pub const fn client(self) -> Client {
        Client::from_parts(self.kind, [self.upper, self.lower])
    }

    /// Returns the client's address, or `None` if only its network namespace is known.
    #[inline(always)]
    #[must_use]
    pub fn address(self) -> Option<Address> {
        (self.kind == Client::ADDRESS).then(|| Address::from_halves([self.upper, self.lower]))
    }
}

/// A client, and how it was identified.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Identity {
    /// The client.
    pub client: ClientScalars,
    /// True if the client is identified by the source address that is already set, such as the address that a
    /// socket is bound to. A process can bind a socket to any address, so this counts only if the client's
    /// network namespace has the address, and if it is not a loopback address.
    pub is_by_source: bool,
}

/// The socket or packet for which a backend is chosen.
pub trait ClientContext {
    /// Returns the client, which is identified by an address of the given family if there is one. Called only
    /// if the choice depends on the client.
    fn client(&self, is_v4: bool) -> Identity;

    /// Returns the client that session affinity remembers: the given one, unless unprivileged processes can give
    /// any address to its network namespace.
    #[inline(always)]
    fn affinity_client(&self, client: ClientScalars) -> ClientScalars {
        client
    }

    /// Returns true if the source address is a loopback address, which has no route to a backend.
    fn is_bound_to_loopback(&self, is_v4: bool) -> bool;

    /// Returns true if the socket or packet is known to be in the host's network namespace.
    fn is_known_host(&self) -> bool;
}

/// The inputs for the choice of a backend: the maps, the clock, and random numbers.
pub trait Maps {
    /// Returns the index of a frontend's record, from the map `services`. During a concurrent write, it may
    /// be another frontend's index.
    fn frontend_index(&self, key: &FrontendKey) -> Option<u32>;

    /// Returns the frontend record at an index.
    fn frontend(&self, index: u32) -> Option<&Frontend>;

    /// Returns the slot at an index.
    fn slot(&self, index: u32) -> Option<&Slot>;

    /// Returns the source range at an index.
    fn source_range(&self, index: u32) -> Option<&SourceRange>;

    /// Returns the backend at an index.
    fn backend(&self, index: u32) -> Option<&Backend>;

    /// Returns the affinity entry for a key, if the entry contains that key.
    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity>;

    /// Stores an affinity entry. If `is_new` is true, stores it only if there is no entry for its key yet.
    /// Returns true if the entry was stored.
    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool;

    /// Returns how many connections a backend has open, modulo 2^64.
    fn open_connections(&self, backend: u32) -> u64;

    /// Increments a service port's round-robin counter, and returns its previous value.
    fn next_round_robin(&self, service: u32) -> Option<u32>;

    /// Returns a uniformly distributed random number.
    fn random(&self) -> u32;

    /// Returns the time in nanoseconds, from the monotonic clock.
    fn now(&self) -> u64;

    /// Returns a backend's state, which the daemon may change concurrently.
    #[inline(always)]
    fn state(&self, backend: &Backend) -> BackendState {
        backend.state
    }

    /// Returns the sets that a backend belongs to. The daemon may change them concurrently.
    #[inline(always)]
    fn sets(&self, backend: &Backend) -> Membership {
        backend.sets
    }

    /// Returns the inline backend at an offset in the frontend's record.
    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "`From` is not for every usize")]
    fn inline_backend<'a>(&self, frontend: &'a Frontend, offset: u32) -> Option<&'a InlineBackend> {
        frontend.inline_backends.get(offset as usize)
    }

    /// Calls [`decide::choose_offset`]. Overridden if the verifier requires a separate function.
    #[inline(always)]
    fn choose_offset(
        &self,
        record: FrontendRecord<'_>,
        traffic: Traffic,
        client: ClientScalars,
    ) -> Option<u32> {
        decide::choose_offset(self, record.frontend, traffic, client)
    }

    /// Calls [`decide::choose_by_affinity`]. Overridden if the verifier requires a separate function.
    #[inline(always)]
    fn choose_by_affinity(
        &self,
        record: FrontendRecord<'_>,
        traffic: Traffic,
        client: ClientScalars,
    ) -> Option<AffinityChoice> {
        decide::choose_by_affinity(self, record.frontend, traffic, client)
    }

    /// Returns true if an address, given as two halves, is in one of the source ranges.
    #[inline(always)]
    fn is_in_source_ranges(&self, ranges: IndexRange, halves: [u64; 2]) -> bool {
        let address = Address::from_halves(halves);
        select::is_in_ranges(ranges, &address, |index| self.source_range(index))
    }
}

/// A frontend's record and its index in the array `frontends`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontendRecord<'a> {
    /// The index of the record.
    pub index: u32,
    /// The record.
    pub frontend: &'a Frontend,
}

/// The backend chosen for a client with session affinity.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AffinityChoice {
    /// The index of the backend.
    pub index: u32,
    /// True if the client already had this backend.
    pub is_stored: bool,
}

impl AffinityChoice {
    /// The bit in the packed word that is set if the client already had this backend.
    const STORED: u64 = 1 << 32;
    /// The packed word for `None`.
    const NONE: u64 = u64::MAX;

    /// Packs the choice into one word, which a function can return in a register.
    #[inline(always)]
    #[must_use]
    pub fn to_word(choice: Option<Self>) -> u64 {
        match choice {
            Some(Self {
                index,
                is_stored: true,
            }) => Self::STORED | u64::from(index),
            Some(Self {
                index,
                is_stored: false,
            }) => index.into(),
            None => Self::NONE,
        }
    }

    /// Unpacks a word returned by [`AffinityChoice::to_word`].
    #[inline(always)]
    #[must_use]
    pub fn from_word(word: u64) -> Option<Self> {
        #[expect(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            reason = "the lower half"
        )]
        let index = word as u32;
        (word != Self::NONE).then_some(Self {
            index,
            is_stored: word & Self::STORED != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_into_a_word_loses_nothing() {
        let some = [(0, false), (u32::MAX, true), (7, true), (7, false)];
        let some = some.map(|(index, is_stored)| Some(AffinityChoice { index, is_stored }));
        for choice in some.into_iter().chain([None]) {
            assert_eq!(
                AffinityChoice::from_word(AffinityChoice::to_word(choice)),
                choice
            );
        }
    }
}
