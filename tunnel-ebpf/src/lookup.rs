//! Front to set to backend: the one piece that every hook shares.

use tunnel_common::{
    addr::{Address, Port},
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

/// Chooses a backend for a new connection or flow.
#[inline(always)]
pub(crate) fn choose(front: &Front) -> Result<Choice, NoChoice> {
    let set = front.of_sockets();
    let number = if set.len <= 1 {
        0
    } else if front.algorithm == Algorithm::ROUND_ROBIN {
        maps::turn(front.service).ok_or(NoChoice::Broken)?
    } else {
        context::random()
    };
    let Some(place) = select::place(set, number) else {
        return Err(if front.flags & Front::HAS_ENDPOINTS == 0 {
            NoChoice::Empty
        } else {
            NoChoice::Elsewhere
        });
    };
    if set.len as usize <= NEAR {
        let near = front.near.get(place as usize).ok_or(NoChoice::Broken)?;
        return Ok(Choice {
            index: near.index,
            address: near.address,
            port: near.port,
        });
    }
    let slot = maps::slot(set.base.wrapping_add(place)).ok_or(NoChoice::Broken)?;
    let backend = maps::backend(slot.backend).ok_or(NoChoice::Broken)?;
    Ok(Choice {
        index: slot.backend,
        address: backend.address,
        port: backend.port,
    })
}

/// The state of a backend as it is now; that of none if there is no such backend.
#[inline(always)]
pub(crate) fn state(index: u32) -> State {
    maps::backend(index).map_or_else(State::default, maps::state)
}
