//! Front to set to backend: the one piece that every hook shares.

use tunnel_common::{
    addr::{Address, Port},
    affinity::{Affinity, AffinityKey, Client},
    reason::Reason,
    select,
    service::{Algorithm, Front, FrontKey, NEAR, State},
};

use crate::{context, maps};

/// How often a record is looked up that turns out to be another front's.
const TRIES: u32 = 4;

/// What a look-up of a front came to.
pub(crate) enum Lookup {
    /// The record of the front.
    Found(&'static Front),
    /// The address is nobody's front.
    None,
    /// Each try met an index that was being replaced.
    Unstable,
}

/// The record of a front. An element of the hash that is replaced is reused at once, so the index
/// may be another key's; the record tells by the key it echoes.
#[inline(always)]
pub(crate) fn front(key: &FrontKey) -> Lookup {
    // Bounded by TRIES for the verifier.
    for _ in 0..TRIES {
        let Some(index) = maps::front_index(key) else {
            return Lookup::None;
        };
        match maps::front(index) {
            Some(front) if front.key == *key => return Lookup::Found(front),
            _ => {}
        }
    }
    Lookup::Unstable
}

/// A backend that was chosen.
pub(crate) struct Choice {
    /// Its index.
    pub(crate) index: u32,
    /// Where connections go.
    pub(crate) address: Address,
    /// Where connections go.
    pub(crate) port: Port,
    /// How it came to be chosen.
    pub(crate) reason: Reason,
}

/// Why there is no choice.
pub(crate) enum NoChoice {
    /// There are no backends.
    Empty,
    /// There are none for this node's traffic.
    Elsewhere,
    /// The record, slot or backend is out of range.
    Broken,
}

/// Chooses a backend for a new connection or flow of a client, who is asked for only where that
/// matters.
#[inline(always)]
pub(crate) fn choose(front: &Front, client: impl Fn() -> Client) -> Result<Choice, NoChoice> {
    let set = front.of_sockets();
    if set.len == 0 {
        return Err(if front.flags & Front::HAS_ENDPOINTS == 0 {
            NoChoice::Empty
        } else {
            NoChoice::Elsewhere
        });
    }
    if front.affinity != 0 {
        let (index, reason) = keep(front, client()).ok_or(NoChoice::Broken)?;
        return of_index(index, reason);
    }
    let place = place(front, client).ok_or(NoChoice::Broken)?;
    if set.len as usize <= NEAR {
        let place = context::in_register(place);
        let near = front.near.get(place).ok_or(NoChoice::Broken)?;
        return Ok(Choice {
            index: near.index,
            address: near.address,
            port: near.port,
            reason: Reason::Translated,
        });
    }
    let slot = maps::slot(set.base.wrapping_add(place)).ok_or(NoChoice::Broken)?;
    of_index(slot.backend, Reason::Translated)
}

#[inline(always)]
fn of_index(index: u32, reason: Reason) -> Result<Choice, NoChoice> {
    let backend = maps::backend(index).ok_or(NoChoice::Broken)?;
    Ok(Choice {
        index,
        address: backend.address,
        port: backend.port,
        reason,
    })
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

/// A place in the set that sockets choose from, by the front's algorithm.
#[inline(always)]
fn place(front: &Front, client: impl Fn() -> Client) -> Option<u32> {
    let set = front.of_sockets();
    let number = if set.len <= 1 {
        0
    } else if front.algorithm == Algorithm::ROUND_ROBIN {
        maps::turn(front.service)?
    } else if front.algorithm == Algorithm::LEAST_CONN {
        return emptier(front);
    } else if front.algorithm.is_hash() {
        if front.algorithm == Algorithm::DESTINATION_HASH {
            select::hash(front.key.words())
        } else {
            select::hash(client().words())
        }
    } else {
        context::random()
    };
    select::place(set, number)
}

/// The backend that a client keeps, or will from now on.
#[inline(always)]
fn keep(front: &Front, client: Client) -> Option<(u32, Reason)> {
    let mut affinity = Affinity {
        used: context::now(),
        index: 0,
        state: State::default(),
        key: AffinityKey {
            client,
            service: front.service,
        },
    };
    let known = maps::affinity(&affinity.key);
    let mut is_old = known.is_some_and(|known| may_keep(front, known, affinity.used));
    affinity.index = match known {
        Some(known) if is_old => known.index,
        Some(_) | None => new_index(front, &affinity.key.client)?,
    };
    affinity.state = state(affinity.index);
    // Another connection of the client, at the same time, may have been quicker.
    if !maps::insert_affinity(&affinity, known.is_none())
        && let Some(known) = maps::affinity(&affinity.key)
        && may_keep(front, known, affinity.used)
    {
        affinity.index = known.index;
        is_old = true;
    }
    let reason = if is_old {
        Reason::TranslatedAffine
    } else {
        Reason::Translated
    };
    Some((affinity.index, reason))
}

#[inline(always)]
fn new_index(front: &Front, client: &Client) -> Option<u32> {
    let place = place(front, || *client)?;
    Some(maps::slot(front.of_sockets().base.wrapping_add(place))?.backend)
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

/// The state of a backend as it is now; that of none if there is no such backend.
#[inline(always)]
pub(crate) fn state(index: u32) -> State {
    maps::backend(index).map_or_else(State::default, maps::state)
}
