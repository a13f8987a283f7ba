//! The maps that a decision reads, and the socket or packet that asks.

use crate::{
    addr::Address,
    affinity::{Affinity, AffinityKey, Client},
    decide, select,
    service::{Backend, Front, FrontKey, Membership, NEAR, Near, Set, Slot, Source, State},
};

/// The kind of traffic. Each has its own set of a front.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Traffic {
    /// Connects and datagrams of sockets on this node.
    Sockets = 0,
    /// Packets from elsewhere.
    Packets = 1,
}

impl Traffic {
    /// The set that a front has for it.
    #[inline(always)]
    #[must_use]
    pub const fn set(self, front: &Front) -> Set {
        if self.is_local(front) {
            front.local
        } else {
            front.cluster
        }
    }

    /// The same set, as backends know it.
    #[inline(always)]
    #[must_use]
    pub const fn membership(self, front: &Front) -> Membership {
        if self.is_local(front) {
            Membership::LOCAL
        } else {
            Membership::CLUSTER
        }
    }

    #[inline(always)]
    const fn is_local(self, front: &Front) -> bool {
        let flag = match self {
            Self::Sockets => Front::SOCKETS_LOCAL,
            Self::Packets => Front::PACKETS_LOCAL,
        };
        front.flags & flag != 0
    }

    /// Whether the record itself has the backends of the set.
    #[inline(always)]
    #[must_use]
    pub const fn is_near(self, front: &Front) -> bool {
        // As long as both kinds choose from one set, `near` holds that set.
        let held = Self::Sockets.membership(front);
        self.membership(front).is(held) && is_few(self.set(front).len)
    }
}

#[inline(always)]
#[expect(clippy::as_conversions, reason = "`From` is not const")]
const fn is_few(len: u32) -> bool {
    len as usize <= NEAR
}

/// A client in scalars, which functions hand on in registers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Caller {
    /// The first part of [`Client::parts`].
    pub kind: u32,
    /// The upper half of its address.
    pub upper: u64,
    /// The lower half of its address.
    pub lower: u64,
}

impl Caller {
    /// No client in particular.
    pub const NONE: Self = Self {
        kind: 0,
        upper: 0,
        lower: 0,
    };

    /// The scalars of a client.
    #[inline(always)]
    #[must_use]
    pub const fn new(client: &Client) -> Self {
        let (kind, [upper, lower]) = client.parts();
        Self { kind, upper, lower }
    }

    /// The client of these scalars.
    #[inline(always)]
    #[must_use]
    pub const fn client(self) -> Client {
        Client::from_parts(self.kind, [self.upper, self.lower])
    }

    /// Its address, unless it is known by its network namespace only.
    #[inline(always)]
    #[must_use]
    pub fn address(self) -> Option<Address> {
        (self.kind == Client::ADDRESS).then(|| Address::from_halves([self.upper, self.lower]))
    }
}

/// The socket or packet that asks for a backend.
pub trait Asker {
    /// The client, as it dials an address of that family. Asked only where the decision depends on it.
    fn caller(&self, is_v4: bool) -> Caller;

    /// Whether it has an address of that family already.
    fn is_bound(&self, is_v4: bool) -> bool;

    /// Whether that address is one of loopback, from which no route leads to a backend.
    fn is_bound_to_loopback(&self, is_v4: bool) -> bool;

    /// Whether it is known to be in the host's network namespace.
    fn is_known_host(&self) -> bool;
}

/// The maps that a decision reads, and the clock and chance that it depends on.
pub trait Maps {
    /// The index of the record of a front, from the map `svc`. It may be another front's by now.
    fn front_index(&self, key: &FrontKey) -> Option<u32>;

    /// A record of a front.
    fn front(&self, index: u32) -> Option<&Front>;

    /// A slot of a set.
    fn slot(&self, index: u32) -> Option<&Slot>;

    /// A range of clients.
    fn source(&self, index: u32) -> Option<&Source>;

    /// A backend.
    fn backend(&self, index: u32) -> Option<&Backend>;

    /// The entry of a client, if it is that of the key.
    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity>;

    /// Notes the backend of a client, or only if none is noted yet; says whether it was noted.
    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool;

    /// The number of open sockets that remember a backend, modulo 2^64.
    fn open_at(&self, backend: u32) -> u64;

    /// The next number in turn for a service port.
    fn turn(&self, service: u32) -> Option<u32>;

    /// A uniform random number.
    fn random(&self) -> u32;

    /// Nanoseconds of the monotonic clock.
    fn now(&self) -> u64;

    /// The state of a backend, which may change while it is read.
    #[inline(always)]
    fn state(&self, backend: &Backend) -> State {
        backend.state
    }

    /// The sets of a backend, which may change while it is read.
    #[inline(always)]
    fn sets(&self, backend: &Backend) -> Membership {
        backend.sets
    }

    /// A backend that a record holds itself.
    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "`From` is not for every usize")]
    fn near<'a>(&self, front: &'a Front, place: u32) -> Option<&'a Near> {
        front.near.get(place as usize)
    }

    /// The step [`decide::place`].
    #[inline(always)]
    fn place(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<u32> {
        decide::place(self, record.front, traffic, caller)
    }

    /// The step [`decide::kept`].
    #[inline(always)]
    fn kept(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<Kept> {
        decide::kept(self, record.front, traffic, caller)
    }

    /// Whether the address of a client, in halves, is in one of the ranges of a set.
    #[inline(always)]
    fn is_among(&self, sources: Set, halves: [u64; 2]) -> bool {
        let address = Address::from_halves(halves);
        select::is_among(sources, &address, |index| self.source(index))
    }
}

/// A record of a front, and its index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Record<'a> {
    /// Its index.
    pub index: u32,
    /// The record.
    pub front: &'a Front,
}

/// The backend that a client keeps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Kept {
    /// Its index.
    pub index: u32,
    /// Whether the client had it before.
    pub is_old: bool,
}

impl Kept {
    /// The bit beside an index that its client had before.
    const OLD: u64 = 1 << 32;
    /// The word for none.
    const NONE: u64 = u64::MAX;

    /// One word, which functions hand on in a register.
    #[inline(always)]
    #[must_use]
    pub fn to_word(kept: Option<Self>) -> u64 {
        match kept {
            Some(Self {
                index,
                is_old: true,
            }) => Self::OLD | u64::from(index),
            Some(Self {
                index,
                is_old: false,
            }) => index.into(),
            None => Self::NONE,
        }
    }

    /// What such a word was made of.
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
            is_old: word & Self::OLD != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_goes_through_a_word_unchanged() {
        let some = [(0, false), (u32::MAX, true), (7, true), (7, false)];
        let some = some.map(|(index, is_old)| Some(Kept { index, is_old }));
        for kept in some.into_iter().chain([None]) {
            assert_eq!(Kept::from_word(Kept::to_word(kept)), kept);
        }
    }
}
