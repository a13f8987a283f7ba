//! Front to set to backend: the one piece that every hook shares.

use tunnel_common::{
    select,
    service::{Algorithm, Backend, Front, FrontKey, State},
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
    pub(crate) backend: &'static Backend,
    /// Its state at the time of the choice.
    pub(crate) state: State,
}

/// Why there is no choice.
pub(crate) enum NoChoice {
    /// The set is empty.
    Empty,
    /// The record, slot or backend is out of range.
    Broken,
}

/// Chooses a backend for a new connection or flow.
#[inline(always)]
pub(crate) fn choose(front: &Front) -> Result<Choice, NoChoice> {
    let number = if front.cluster.len <= 1 {
        0
    } else if front.algorithm == Algorithm::ROUND_ROBIN {
        maps::turn(front.service).ok_or(NoChoice::Broken)?
    } else {
        context::random()
    };
    let place = select::slot(front.cluster, number).ok_or(NoChoice::Empty)?;
    let index = maps::slot(place).ok_or(NoChoice::Broken)?.backend;
    let backend = maps::backend(index).ok_or(NoChoice::Broken)?;
    Ok(Choice {
        index,
        backend,
        state: maps::state(backend),
    })
}
