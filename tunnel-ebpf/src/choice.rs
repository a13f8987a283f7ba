//! The choices that take more than a random number. Each is a function with a name of its own: those
//! the kernel's verifier follows once, and not again with all that comes after each of their ends.
#![expect(unsafe_code, reason = "functions with names of their own")]

use tunnel_common::{
    affinity::{Affinity, AffinityKey},
    reason::Reason,
    select,
    service::{Algorithm, Front, NEAR, State},
};

use crate::{client::Caller, context, lookup, maps};

/// What such a function says where there is no choice.
const NONE: u64 = u64::MAX;
/// What it says beside an index that a client had already.
const IS_OLD: u64 = 1 << 32;

/// A place in the set that sockets choose from, by the front's algorithm.
#[inline(always)]
pub(crate) fn place(front: u32, caller: Caller) -> Option<u32> {
    let Caller { kind, upper, lower } = caller;
    low(place_by_algorithm(front, kind, upper, lower))
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn place_by_algorithm(front: u32, kind: u32, upper: u64, lower: u64) -> u64 {
    let Some(front) = maps::front(front) else {
        return NONE;
    };
    let caller = Caller { kind, upper, lower };
    place_in(front, caller).map_or(NONE, u64::from)
}

/// The backend that a client keeps, or will from now on.
#[inline(always)]
pub(crate) fn kept(front: u32, caller: Caller) -> Option<(u32, Reason)> {
    let Caller { kind, upper, lower } = caller;
    let found = kept_by_client(front, kind, upper, lower);
    let reason = if found & IS_OLD == 0 {
        Reason::Translated
    } else {
        Reason::TranslatedAffine
    };
    Some((low(found)?, reason))
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn kept_by_client(front: u32, kind: u32, upper: u64, lower: u64) -> u64 {
    let Some(record) = maps::front(front) else {
        return NONE;
    };
    match keep(record, Caller { kind, upper, lower }) {
        Some((index, true)) => IS_OLD | u64::from(index),
        Some((index, false)) => index.into(),
        None => NONE,
    }
}

#[inline(always)]
fn low(found: u64) -> Option<u32> {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    let low = found as u32;
    (found != NONE).then_some(low)
}

/// Of two places in the set that sockets choose from, drawn at random, the one whose backend has
/// fewer open connections for its share of the set; the first if they have the same.
#[inline(always)]
fn emptier(front: &Front) -> Option<u32> {
    let set = front.of_sockets();
    let (one, other) = select::two(set, context::random(), context::random())?;
    let (first, second) = (load_at(front, one)?, load_at(front, other)?);
    Some(if select::is_emptier(first, second) {
        other
    } else {
        one
    })
}

/// The open connections, and the share, of the backend at a place in the set that sockets choose
/// from.
#[inline(always)]
fn load_at(front: &Front, place: u32) -> Option<(u64, u32)> {
    let set = front.of_sockets();
    let (index, share) = if set.len as usize <= NEAR {
        let near = front.near.get(context::in_register(place))?;
        (near.index, near.share.into())
    } else {
        let slot = maps::slot(set.base.wrapping_add(place))?;
        (slot.backend, slot.share)
    };
    Some((maps::open_at(index), share))
}

#[inline(always)]
fn place_in(front: &Front, caller: Caller) -> Option<u32> {
    let set = front.of_sockets();
    let number = if set.len <= 1 {
        0
    } else if front.algorithm == Algorithm::ROUND_ROBIN {
        maps::turn(front.service)?
    } else if front.algorithm == Algorithm::LEAST_CONN {
        return emptier(front);
    } else if front.algorithm == Algorithm::DESTINATION_HASH {
        select::hash(front.key.words())
    } else if front.algorithm.is_by_client() {
        select::hash(caller.client().words())
    } else {
        context::random()
    };
    select::place(set, number)
}

/// The backend that a client keeps, or will from now on; whether it had it before.
#[inline(always)]
fn keep(front: &Front, caller: Caller) -> Option<(u32, bool)> {
    let mut affinity = Affinity {
        used: context::now(),
        index: 0,
        state: State::default(),
        key: AffinityKey {
            client: caller.client(),
            service: front.service,
        },
    };
    let known = maps::affinity(&affinity.key);
    let mut is_old = known.is_some_and(|known| may_keep(front, known, affinity.used));
    affinity.index = match known {
        Some(known) if is_old => known.index,
        Some(_) | None => {
            let place = place_in(front, caller)?;
            maps::slot(front.of_sockets().base.wrapping_add(place))?.backend
        }
    };
    affinity.state = lookup::state(affinity.index);
    // Another connection of the client, at the same time, may have been quicker.
    if !maps::insert_affinity(&affinity, known.is_none())
        && let Some(known) = maps::affinity(&affinity.key)
        && may_keep(front, known, affinity.used)
    {
        affinity.index = known.index;
        is_old = true;
    }
    Some((affinity.index, is_old))
}

/// Whether a client may keep its backend. An element that is reused meanwhile for another client can
/// do no worse than name another backend of the set.
#[inline(always)]
fn may_keep(front: &Front, known: &Affinity, now: u64) -> bool {
    let Some(backend) = maps::backend(known.index) else {
        return false;
    };
    let sets = (maps::sets(backend), front.membership_of_sockets());
    backend.service == front.service && known.holds(front.affinity, maps::state(backend), sets, now)
}
