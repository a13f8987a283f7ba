//! The kernel's maps as the tables of a decision (`tunnel_common::decide`), and the sockets that ask.
//!
//! The steps that take more than a random number are functions with names of their own: the verifier
//! follows those once, and not again with everything that comes after each of their ends.
#![expect(unsafe_code, reason = "functions with names of their own")]

use tunnel_common::{
    addr::Address,
    affinity::{Affinity, AffinityKey},
    decide, select,
    service::{Backend, Front, FrontKey, Membership, Near, Set, Slot, Source, State},
    tables::{Asker, Caller, Kept, Record, Tables, Traffic},
};

use crate::{
    client,
    context::{self, Sock},
    maps, steering,
};

/// The maps that the programs share.
pub(crate) struct Maps;

/// The word for no place.
const NO_PLACE: u64 = u64::MAX;

impl Tables for Maps {
    #[inline(always)]
    fn front_index(&self, key: &FrontKey) -> Option<u32> {
        maps::front_index(key)
    }

    #[inline(always)]
    fn front(&self, index: u32) -> Option<&Front> {
        maps::front(index)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&Slot> {
        maps::slot(index)
    }

    #[inline(always)]
    fn source(&self, index: u32) -> Option<&Source> {
        maps::source(index)
    }

    #[inline(always)]
    fn backend(&self, index: u32) -> Option<&Backend> {
        maps::backend(index)
    }

    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity> {
        maps::affinity(key)
    }

    #[inline(always)]
    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool {
        maps::insert_affinity(entry, is_new)
    }

    #[inline(always)]
    fn open_at(&self, backend: u32) -> u64 {
        maps::open_at(backend)
    }

    #[inline(always)]
    fn turn(&self, service: u32) -> Option<u32> {
        maps::turn(service)
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        context::random()
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        context::now()
    }

    #[inline(always)]
    fn state(&self, backend: &Backend) -> State {
        maps::state(backend)
    }

    #[inline(always)]
    fn sets(&self, backend: &Backend) -> Membership {
        maps::sets(backend)
    }

    #[inline(always)]
    fn near<'a>(&self, front: &'a Front, place: u32) -> Option<&'a Near> {
        front.near.get(context::in_register(place))
    }

    #[inline(always)]
    fn place(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<u32> {
        let Caller { kind, upper, lower } = caller;
        let place = place_by_algorithm(record.index, traffic, kind, upper, lower);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let low = place as u32;
        (place != NO_PLACE).then_some(low)
    }

    #[inline(always)]
    fn kept(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<Kept> {
        let Caller { kind, upper, lower } = caller;
        Kept::from_word(kept_by_client(record.index, traffic, kind, upper, lower))
    }

    #[inline(always)]
    fn is_among(&self, sources: Set, [upper, lower]: [u64; 2]) -> bool {
        is_among_sources(sources.base, sources.len, upper, lower) != 0
    }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn place_by_algorithm(
    front: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let Some(front) = maps::front(front) else {
        return NO_PLACE;
    };
    let caller = Caller { kind, upper, lower };
    decide::place(&Maps, front, traffic, caller).map_or(NO_PLACE, u64::from)
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn kept_by_client(
    front: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let caller = Caller { kind, upper, lower };
    let kept = maps::front(front).and_then(|front| decide::kept(&Maps, front, traffic, caller));
    Kept::to_word(kept)
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_among_sources(base: u32, len: u32, upper: u64, lower: u64) -> u32 {
    let address = Address::from_halves([upper, lower]);
    select::is_among(Set { base, len }, &address, maps::source).into()
}

/// The socket that a hook runs for, as it asks for a backend.
pub(crate) struct Asking<'a, S>(pub(crate) &'a S);

impl<S: Sock> Asker for Asking<'_, S> {
    #[inline(always)]
    fn caller(&self, is_v4: bool) -> Caller {
        client::of(self.0, is_v4)
    }

    #[inline(always)]
    fn is_bound(&self, is_v4: bool) -> bool {
        self.0.own_address(is_v4).is_some()
    }

    #[inline(always)]
    fn is_bound_to_loopback(&self, is_v4: bool) -> bool {
        self.0.own_address(is_v4).is_some_and(Address::is_loopback)
    }

    #[inline(always)]
    fn is_known_host(&self) -> bool {
        steering::is_known_host(self.0)
    }
}
