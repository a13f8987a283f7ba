//! What the maps hold is read once, at the start, and again where it may be another.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::{
    decide::Traffic,
    service::{Backend, Front, FrontKey, NEAR, Near, Set},
    table::Sizes,
};

use super::{
    actual::{Actual, Programmed, SetUse, Standing},
    alloc::{Indices, count},
    slots::{near, slots},
};
use crate::{
    plan::Target,
    reconcile::access::{MapReader, ReadError},
};

/// What the maps hold that makes no sense: what a crash or a foreign hand left behind.
#[derive(Debug, Default)]
pub(crate) struct Stray {
    /// Keys whose index leads to no sound record of theirs. They go before anything is written,
    /// since what they lead to counts as free.
    pub(crate) fronts: Vec<FrontKey>,
    /// Backends that serve, but no front.
    pub(crate) backends: Vec<u32>,
}

/// Maps that are being read.
struct Reading<'a, R> {
    reader: &'a R,
    /// The backends that serve.
    backends: BTreeMap<u32, Backend>,
    /// What made sense so far.
    actual: Actual,
}

/// Reads the maps. What they hold that makes no sense is left out of the result and named in
/// its second part. Indices of backends that are gone count as free, until
/// [`Actual::find_occupied`] was asked.
pub(in crate::reconcile) fn read(
    reader: &impl MapReader,
    sizes: Sizes,
) -> Result<(Actual, Stray), ReadError> {
    let all = reader.backends(sizes.backend_entries())?;
    let standings = all.iter().map(|backend| Standing {
        state: backend.state,
        sets: backend.sets,
    });
    let standings = standings.collect();
    let serving = (0_u32..)
        .zip(all)
        .filter(|(_, backend)| backend.state.is_serving());
    let mut reading = Reading {
        reader,
        backends: serving.collect(),
        actual: Actual {
            standings,
            ..Actual::empty(sizes)
        },
    };
    let mut stray = Stray::default();
    for (key, index) in reader.fronts()? {
        if !reading.adopt(key, index)? {
            stray.fronts.push(key);
        }
    }
    stray.backends = reading.adopt_backends();
    let Reading { mut actual, .. } = reading;
    let used_fronts = actual.fronts.values().map(|front| front.index).collect();
    let used_backends = actual.used_backends();
    let used_ids = actual.ports.keys().copied().collect();
    actual.used_backends = u32::try_from(used_backends.len()).unwrap_or(u32::MAX);
    actual.free_fronts = Indices::new(sizes.front_entries(), &used_fronts);
    actual.free_backends = Indices::new(sizes.backend_entries(), &used_backends);
    actual.free_ids = Indices::new(sizes.front_entries(), &used_ids);
    Ok((actual, stray))
}

impl<R: MapReader> Reading<'_, R> {
    /// Takes over a front; says whether its record, sets and backends make sense.
    fn adopt(&mut self, key: FrontKey, index: u32) -> Result<bool, ReadError> {
        let entries = self.actual.sizes.front_entries();
        if index >= entries {
            return Ok(false);
        }
        let record = self.reader.front(index)?;
        let is_sound = record.key == key
            && record.service < entries
            && self.adopt_set(&record, record.cluster)?
            && self.adopt_set(&record, record.local)?
            && self.actual.sources.adopt(self.reader, record.sources)?
            && self.is_near(&record);
        if is_sound {
            let actual = &mut self.actual;
            actual.hold(record.cluster);
            actual.hold(record.local);
            actual.sources.hold(record.sources);
            actual.fronts.insert(key, Programmed { index, record });
            let port = actual.ports.entry(record.service).or_default();
            port.fronts.insert(key, ());
        }
        Ok(is_sound)
    }

    fn adopt_set(&mut self, record: &Front, set: Set) -> Result<bool, ReadError> {
        if set.len == 0 {
            return Ok(true);
        }
        if let Some(known) = self.actual.sets.get(&set.base) {
            return Ok(u32::try_from(known.backends.len()) == Ok(set.len));
        }
        let end = set.base.checked_add(set.len);
        if end.is_none_or(|end| end > self.actual.sizes.slot_entries()) {
            return Ok(false);
        }
        let places = set.base..set.base.saturating_add(set.len);
        let held = places.map(|place| self.reader.slot(place));
        let held = held.collect::<Result<Vec<_>, _>>()?;
        let backends: Vec<_> = held.iter().map(|slot| slot.backend).collect();
        let is_own = |backend: &Backend| backend.service == record.service;
        let are_own = |index: &u32| self.backends.get(index).is_some_and(is_own);
        if !backends.iter().all(are_own) || !slots(&backends).eq(held) {
            return Ok(false);
        }
        if !self.actual.free_slots.take_at(set.base, set.len) {
            return Ok(false);
        }
        self.actual.used_slots = self.actual.used_slots.saturating_add(set.len);
        let used = SetUse {
            records: 0,
            backends,
        };
        self.actual.sets.insert(set.base, used);
        Ok(true)
    }

    /// Whether the backends that a record holds itself are those of its set.
    fn is_near(&self, record: &Front) -> bool {
        let of_sockets = Traffic::Sockets.set(record);
        let held = self.actual.sets.get(&of_sockets.base);
        let indices = held
            .filter(|_| (1..=NEAR).contains(&count(of_sockets.len)))
            .map(|set| set.backends.as_slice());
        let mut wanted = [Near::NONE; NEAR];
        for (place, slot) in wanted.iter_mut().zip(slots(indices.unwrap_or_default())) {
            let Some(backend) = self.backends.get(&slot.backend) else {
                return false;
            };
            *place = near(&target(backend), slot);
        }
        record.near == wanted
    }

    /// Takes over the backends that serve a front; gives the others.
    fn adopt_backends(&mut self) -> Vec<u32> {
        let sets = self.actual.sets.values();
        let placed: BTreeSet<u32> = sets.flat_map(|set| set.backends.iter().copied()).collect();
        let mut stray = Vec::new();
        // A backend that is in a set goes before one that only finishes what it has.
        let (first, second): (Vec<_>, Vec<_>) = self
            .backends
            .iter()
            .partition(|(index, _)| placed.contains(index));
        for (index, backend) in first.into_iter().chain(second) {
            let target = target(backend);
            match self.actual.ports.get_mut(&backend.service) {
                Some(port) if !port.backends.contains_key(&target) => {
                    port.backends.insert(target, *index);
                }
                Some(_) | None => {
                    stray.push(*index);
                    self.actual.set_state(*index, backend.state.gone());
                }
            }
        }
        stray
    }
}

const fn target(backend: &Backend) -> Target {
    Target {
        address: backend.address,
        port: backend.port,
    }
}
