//! The load-balancing algorithms, and the choice by session affinity.

use super::{Caller, Kept, Maps, Traffic, state};
use crate::{
    affinity::{Affinity, AffinityKey},
    select,
    service::{Algorithm, Front, State},
};

/// Chooses an offset in the backend set, by the algorithm of the frontend.
#[inline(always)]
pub fn place<T: Maps + ?Sized>(
    maps: &T,
    front: &Front,
    traffic: Traffic,
    caller: Caller,
) -> Option<u32> {
    let set = traffic.set(front);
    let number = if set.len <= 1 {
        0
    } else if front.algorithm == Algorithm::ROUND_ROBIN {
        maps.turn(front.service)?
    } else if front.algorithm == Algorithm::LEAST_CONN {
        return emptier(maps, front, traffic);
    } else if front.algorithm == Algorithm::DESTINATION_HASH {
        select::hash(front.key.words())
    } else if front.algorithm.is_by_client() {
        select::hash(caller.client().words())
    } else {
        maps.random()
    };
    select::place(set, number)
}

/// Draws two random offsets in the set, and returns the one whose backend has fewer open connections in
/// proportion to its share of the set; the first if both are equal.
#[inline(always)]
fn emptier<T: Maps + ?Sized>(maps: &T, front: &Front, traffic: Traffic) -> Option<u32> {
    let set = traffic.set(front);
    let (one, other) = select::two(set, maps.random(), maps.random())?;
    let first = load_at(maps, front, traffic, one)?;
    let second = load_at(maps, front, traffic, other)?;
    Some(if select::is_emptier(first, second) {
        other
    } else {
        one
    })
}

/// Returns the number of open connections and the share of the backend at an offset in the set.
#[inline(always)]
fn load_at<T: Maps + ?Sized>(
    maps: &T,
    front: &Front,
    traffic: Traffic,
    place: u32,
) -> Option<(u64, u32)> {
    let (index, share) = if traffic.is_near(front) {
        let near = maps.near(front, place)?;
        (near.index, near.share.into())
    } else {
        let slot = maps.slot(traffic.set(front).base.wrapping_add(place))?;
        (slot.backend, slot.share)
    };
    Some((maps.open_at(index), share))
}

/// Returns the backend of a client with session affinity: the stored one, or a new choice, which it
/// stores.
#[inline(always)]
pub fn kept<T: Maps + ?Sized>(
    maps: &T,
    front: &Front,
    traffic: Traffic,
    caller: Caller,
) -> Option<Kept> {
    let mut entry = Affinity {
        used: maps.now(),
        index: 0,
        state: State::default(),
        key: AffinityKey {
            client: caller.client(),
            service: front.service,
        },
    };
    let known = maps.affinity(&entry.key);
    let mut is_old = known.is_some_and(|known| may_keep(maps, front, traffic, known, entry.used));
    entry.index = match known {
        Some(known) if is_old => known.index,
        Some(_) | None => {
            let place = place(maps, front, traffic, caller)?;
            let slot = traffic.set(front).base.wrapping_add(place);
            maps.slot(slot)?.backend
        }
    };
    entry.state = state(maps, entry.index);
    // A concurrent connect of the client may have stored its choice first.
    if !maps.insert_affinity(&entry, known.is_none())
        && let Some(known) = maps.affinity(&entry.key)
        && may_keep(maps, front, traffic, known, entry.used)
    {
        entry.index = known.index;
        is_old = true;
    }
    Some(Kept {
        index: entry.index,
        is_old,
    })
}

/// Returns true if a client may keep its stored backend. The kernel may reuse the hash element for another
/// client while it is read; the client then gets another backend of the same set at worst.
#[inline(always)]
fn may_keep<T: Maps + ?Sized>(
    maps: &T,
    front: &Front,
    traffic: Traffic,
    known: &Affinity,
    now: u64,
) -> bool {
    let Some(backend) = maps.backend(known.index) else {
        return false;
    };
    let sets = (maps.sets(backend), traffic.membership(front));
    backend.service == front.service && known.holds(front.affinity, maps.state(backend), sets, now)
}
