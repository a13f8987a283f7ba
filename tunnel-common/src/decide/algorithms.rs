//! The load-balancing algorithms and session affinity.

use super::{AffinityChoice, ClientScalars, Maps, Traffic, state};
use crate::{
    affinity::{Affinity, AffinityKey},
    select,
    service::{Algorithm, BackendState, Frontend},
};

/// Chooses an offset in the backend set, using the frontend's algorithm.
#[inline(always)]
pub fn choose_offset<T: Maps + ?Sized>(
    maps: &T,
    frontend: &Frontend,
    traffic: Traffic,
    client: ClientScalars,
) -> Option<u32> {
    let set = traffic.set(frontend);
    let number = if set.len <= 1 {
        0
    } else if frontend.algorithm == Algorithm::ROUND_ROBIN {
        maps.next_round_robin(frontend.service)?
    } else if frontend.algorithm == Algorithm::LEAST_CONN {
        return less_loaded(maps, frontend, traffic);
    } else if frontend.algorithm == Algorithm::DESTINATION_HASH {
        select::hash(frontend.key.words())
    } else if frontend.algorithm.is_by_client() {
        select::hash(client.client().words())
    } else {
        maps.random()
    };
    select::offset_in(set, number)
}

/// Picks two different random offsets in the set, and returns the one whose backend has fewer open
/// connections in proportion to its share of the set. Returns the first if both are equally loaded.
#[inline(always)]
fn less_loaded<T: Maps + ?Sized>(maps: &T, frontend: &Frontend, traffic: Traffic) -> Option<u32> {
    let set = traffic.set(frontend);
    let (one, other) = select::two_offsets_in(set, maps.random(), maps.random())?;
    let first = load_at(maps, frontend, traffic, one)?;
    let second = load_at(maps, frontend, traffic, other)?;
    Some(if select::is_less_loaded(first, second) {
        other
    } else {
        one
    })
}

/// Returns how many connections the backend at an offset in the set has open, and the backend's share of the
/// set.
#[inline(always)]
fn load_at<T: Maps + ?Sized>(
    maps: &T,
    frontend: &Frontend,
    traffic: Traffic,
    offset: u32,
) -> Option<(u64, u32)> {
    let (index, share) = if traffic.has_inline_backends(frontend) {
        let backend = maps.inline_backend(frontend, offset)?;
        (backend.index, backend.share.into())
    } else {
        let slot = maps.slot(traffic.set(frontend).base.wrapping_add(offset))?;
        (slot.backend, slot.share)
    };
    Some((maps.open_connections(index), share))
}

/// Chooses a client's backend under session affinity: the stored one if the client may keep it, or else one
/// chosen by the algorithm. Stores the choice with the current time.
#[inline(always)]
pub fn choose_by_affinity<T: Maps + ?Sized>(
    maps: &T,
    frontend: &Frontend,
    traffic: Traffic,
    client: ClientScalars,
) -> Option<AffinityChoice> {
    let mut entry = Affinity {
        last_used: maps.now(),
        index: 0,
        state: BackendState::default(),
        key: AffinityKey {
            client: client.client(),
            service: frontend.service,
        },
    };
    let stored = maps.affinity(&entry.key);
    let mut is_stored =
        stored.is_some_and(|stored| may_keep(maps, frontend, traffic, stored, entry.last_used));
    entry.index = match stored {
        Some(stored) if is_stored => stored.index,
        Some(_) | None => {
            let offset = choose_offset(maps, frontend, traffic, client)?;
            let slot = traffic.set(frontend).base.wrapping_add(offset);
            maps.slot(slot)?.backend
        }
    };
    entry.state = state(maps, entry.index);
    // A concurrent connect() from the same client may have stored its choice first.
    if !maps.insert_affinity(&entry, stored.is_none())
        && let Some(stored) = maps.affinity(&entry.key)
        && may_keep(maps, frontend, traffic, stored, entry.last_used)
    {
        entry.index = stored.index;
        is_stored = true;
    }
    Some(AffinityChoice {
        index: entry.index,
        is_stored,
    })
}

/// Returns true if a client may keep its stored backend. While the entry is being read, the kernel may reuse
/// its hash element for another client. At worst, the client then gets a different backend from the same set.
#[inline(always)]
fn may_keep<T: Maps + ?Sized>(
    maps: &T,
    frontend: &Frontend,
    traffic: Traffic,
    stored: &Affinity,
    now: u64,
) -> bool {
    let Some(backend) = maps.backend(stored.index) else {
        return false;
    };
    let sets = (maps.sets(backend), traffic.membership(frontend));
    backend.service == frontend.service
        && stored.is_valid(frontend.affinity_timeout, maps.state(backend), sets, now)
}
