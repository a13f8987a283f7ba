//! Front to set to backend: the one piece that every hook shares.

use tunnel_common::{
    addr::{Address, Port},
    reason::Reason,
    select,
    service::{Algorithm, Front, FrontKey, NEAR, State},
};

use crate::{choice, client::Caller, context, maps};

/// How often a record is looked up that turns out to be another front's.
const TRIES: u32 = 4;

/// The record of a front, and where it is.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    /// Its index.
    pub(crate) index: u32,
    /// What it says.
    pub(crate) front: &'static Front,
}

/// What a look-up of a front came to.
pub(crate) enum Lookup {
    /// The record of the front.
    Found(Record),
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
            Some(front) if front.key == *key => return Lookup::Found(Record { index, front }),
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

/// Chooses a backend for a new connection or flow of a client, which is looked at only where
/// [`depends_on_client`].
#[inline(always)]
pub(crate) fn choose(record: Record, caller: Caller) -> Result<Choice, NoChoice> {
    let front = record.front;
    let set = front.of_sockets();
    if set.len == 0 {
        return Err(if front.flags & Front::HAS_ENDPOINTS == 0 {
            NoChoice::Empty
        } else {
            NoChoice::Elsewhere
        });
    }
    if front.affinity != 0 {
        let (index, reason) = choice::kept(record.index, caller).ok_or(NoChoice::Broken)?;
        return of_index(index, reason);
    }
    let place = if set.len == 1 || front.algorithm == Algorithm::RANDOM {
        select::place(set, context::random())
    } else {
        choice::place(record.index, caller)
    };
    let place = place.ok_or(NoChoice::Broken)?;
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

/// Whether a choice depends on who asks.
#[inline(always)]
pub(crate) fn depends_on_client(front: &Front) -> bool {
    front.affinity != 0 || front.sources.len != 0 || front.algorithm.is_by_client()
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

/// The state of a backend as it is now; that of none if there is no such backend.
#[inline(always)]
pub(crate) fn state(index: u32) -> State {
    maps::backend(index).map_or_else(State::default, maps::state)
}
