//! The service maps in memory, stricter than the kernel: a write to an entry that a program could be
//! reading is an error.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tunnel_common::{
    decide::Traffic,
    service::{Backend, Front, FrontKey, Membership, NEAR, Set, Slot, Source, Tally},
};
use zerocopy::FromZeros;

use super::{Counts, MapReader, MapWriter, ReadError, Sizes, WriteError};

/// A batched write.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    Backend(u32, Backend),
    Slot(u32, Slot),
    Front(u32, Box<Front>),
    Key(FrontKey, u32),
}

impl Held {
    const fn order(&self) -> u8 {
        match self {
            Self::Backend(..) => 0,
            Self::Slot(..) => 1,
            Self::Front(..) => 2,
            Self::Key(..) => 3,
        }
    }
}

/// The maps, and the entries that programs could have read since the last grace period.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) sizes: Sizes,
    pub(crate) svc: BTreeMap<FrontKey, u32>,
    pub(crate) front: BTreeMap<u32, Front>,
    pub(crate) slot: BTreeMap<u32, Slot>,
    pub(crate) source: BTreeMap<u32, Source>,
    pub(crate) be: BTreeMap<u32, Backend>,
    pub(crate) conns: Conns,
    pub(crate) tallies: BTreeMap<u32, Tally>,
    held: Option<Vec<Held>>,
    refused: Option<&'static str>,
    pub(crate) writes: usize,
    /// The number of writes that succeed before all fail, as if the process were killed there.
    pub(crate) limit: usize,
    /// True if every write is followed by a check of all reachable entries; in very large maps only a
    /// grace period is.
    pub(crate) is_watched: bool,
    seen: Seen,
}

/// The number of open sockets by backend, which programs count independently of the owner.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conns(pub(crate) Arc<Mutex<BTreeMap<u32, u64>>>);

impl Conns {
    pub(crate) fn of(&self, index: u32) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&index).copied().unwrap_or(0)
    }
}

/// Entries that a program may have reached.
#[derive(Clone, Debug, Default)]
struct Seen {
    fronts: BTreeSet<u32>,
    slots: BTreeSet<u32>,
    sources: BTreeSet<u32>,
    backends: BTreeSet<u32>,
}

impl Memory {
    pub(crate) fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            limit: usize::MAX,
            is_watched: true,
            ..Self::default()
        }
    }

    /// Ends a grace period: programs read only reachable entries from now on.
    pub(crate) fn grace(&mut self) {
        self.seen = Seen::default();
        self.look();
    }

    /// Returns the backends that a program finds for a key.
    pub(crate) fn read(&self, key: &FrontKey) -> Option<Vec<Backend>> {
        let front = self.front.get(self.svc.get(key)?)?;
        assert_eq!(front.key, *key, "a record of another front");
        let set = Traffic::Sockets.set(front);
        let places = set.base..set.base + set.len;
        let backends = places.map(|place| self.be[&self.slot[&place].backend]);
        let backends: Vec<_> = backends.collect();
        if (1..=NEAR).contains(&backends.len()) {
            for (near, backend) in front.near.iter().zip(&backends) {
                assert_eq!((near.address, near.port), (backend.address, backend.port));
                assert_eq!(self.be[&near.index], *backend, "a record and `be` differ");
            }
        }
        for backend in &backends {
            assert_eq!(backend.service, front.service, "another port's backend");
            assert!(backend.state.is_serving(), "a backend that is gone");
        }
        Some(backends)
    }

    /// Returns the serving backends whose own sets differ from those that contain them.
    pub(crate) fn misplaced(&self) -> Vec<u32> {
        let is_in = |backend: u32, of: fn(&Front) -> Set| {
            let service = self.be[&backend].service;
            let own = self.svc.values().map(|index| &self.front[index]);
            own.filter(|front| front.service == service).any(|front| {
                let Set { base, len } = of(front);
                (base..base + len).any(|place| self.slot[&place].backend == backend)
            })
        };
        let sets = |backend| {
            let cluster = is_in(backend, |front| front.cluster);
            let local = is_in(backend, |front| front.local);
            let sets = [(cluster, Membership::CLUSTER), (local, Membership::LOCAL)];
            let sets = sets.into_iter().filter(|(is_in, _)| *is_in);
            sets.fold(Membership::NONE, |sets, (_, set)| sets.and(set))
        };
        let serving = self.be.iter().filter(|(_, it)| it.state.is_serving());
        let misplaced = serving.filter(|(index, it)| it.sets != sets(**index));
        misplaced.map(|(index, _)| *index).collect()
    }

    fn watch(&mut self) {
        if self.is_watched {
            self.look();
        }
    }

    /// Reads everything as programs do, and records the entries reached.
    fn look(&mut self) {
        for (key, index) in &self.svc {
            assert!(self.read(key).is_some(), "{key} leads nowhere");
            self.seen.fronts.insert(*index);
            for Set { base, len } in [self.front[index].cluster, self.front[index].local] {
                for place in base..base + len {
                    self.seen.slots.insert(place);
                    self.seen.backends.insert(self.slot[&place].backend);
                }
            }
            let Set { base, len } = self.front[index].sources;
            for place in base..base + len {
                assert!(self.source.contains_key(&place), "a range of nobody");
                self.seen.sources.insert(place);
            }
        }
    }

    fn write(&mut self, map: &'static str, is_free: bool) -> Result<(), WriteError> {
        assert!(is_free, "a program could be reading that entry of {map}");
        if self.writes >= self.limit {
            return Err(refused(map, "killed"));
        }
        self.writes += 1;
        Ok(())
    }

    /// Makes the batched writes, in an order in which an entry precedes those that lead to it, until one
    /// is refused; returns false if no other write may follow.
    fn write_held(&mut self) -> bool {
        let Some(mut held) = self.held.take() else {
            return true;
        };
        held.sort_by_key(Held::order);
        for write in held {
            if self.refused.is_none() {
                let written = self.make(write);
                self.refused = written.err().map(|error| error.map);
            }
        }
        self.held = Some(Vec::new());
        self.refused.is_none()
    }

    /// Writes an unreachable entry or a key; while batching is on, adds the write to the batch.
    fn make(&mut self, write: Held) -> Result<(), WriteError> {
        if let Some(held) = &mut self.held {
            held.push(write);
            return Ok(());
        }
        match write {
            Held::Backend(index, backend) => self.write_backend(index, &backend)?,
            Held::Slot(index, slot) => {
                assert!(index < self.sizes.slot_entries());
                self.write("slot", !self.seen.slots.contains(&index))?;
                self.slot.insert(index, slot);
            }
            Held::Front(index, front) => {
                assert!(index < self.sizes.front_entries());
                self.write("front", !self.seen.fronts.contains(&index))?;
                self.front.insert(index, *front);
            }
            Held::Key(key, index) => {
                self.write("svc", true)?;
                if !self.svc.contains_key(&key) && self.svc.len() >= self.sizes.frontends as usize {
                    return Err(refused("svc", "full"));
                }
                self.svc.insert(key, index);
                self.watch();
            }
        }
        Ok(())
    }

    fn write_backend(&mut self, index: u32, backend: &Backend) -> Result<(), WriteError> {
        assert!(index < self.sizes.backend_entries());
        let old = self.be.get(&index).map(|old| old.state);
        let old = old.unwrap_or_default();
        assert!(!old.is_serving(), "a backend that serves is written over");
        let open = self.conns.of(index);
        assert_eq!(open, 0, "open connections would become another backend's");
        assert_ne!(old, backend.state);
        self.write("be", !self.seen.backends.contains(&index))?;
        self.be.insert(index, *backend);
        Ok(())
    }

    fn change_backend(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Backend),
    ) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        self.write("be", true)?;
        let changed = self.be.get_mut(&index).map(change);
        assert!(changed.is_some(), "a backend that was never written");
        self.watch();
        Ok(())
    }
}

impl MapWriter for Memory {
    fn write_svc(&mut self, key: &FrontKey, index: u32) -> Result<(), WriteError> {
        self.make(Held::Key(*key, index))
    }

    fn delete_svc(&mut self, key: &FrontKey) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        self.write("svc", true)?;
        self.svc.remove(key);
        Ok(())
    }

    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError> {
        self.make(Held::Front(index, Box::new(*front)))
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let mut slots = (first..).zip(slots);
        slots.try_for_each(|(index, slot)| self.make(Held::Slot(index, *slot)))
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        for (written, (index, backend)) in backends.iter().enumerate() {
            if let Err(error) = self.make(Held::Backend(*index, *backend)) {
                return (written, Err(error));
            }
        }
        (backends.len(), Ok(()))
    }

    fn write_source(&mut self, index: u32, source: &Source) -> Result<(), WriteError> {
        assert!(index < self.sizes.source_entries());
        self.write("source", !self.seen.sources.contains(&index))?;
        self.source.insert(index, *source);
        Ok(())
    }

    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| {
            assert!(backend.state.is_serving(), "a backend that is gone moves");
            backend.sets = sets;
        })
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.gone())
    }

    fn hold(&mut self) {
        self.held.get_or_insert_default();
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        self.write_held();
        self.held = None;
        let map = self.refused.take();
        map.map_or(Ok(()), |map| Err(refused(map, "killed")))
    }

    fn reset_tally(&mut self, service: u32) -> Result<(), WriteError> {
        self.write("tally", true)?;
        self.tallies.remove(&service);
        Ok(())
    }
}

impl Counts for Memory {
    fn open_at(&self, index: u32) -> Result<u64, ReadError> {
        Ok(self.conns.of(index))
    }

    fn tally(&self, service: u32) -> Result<Tally, ReadError> {
        Ok(self.tallies.get(&service).copied().unwrap_or_default())
    }
}

impl MapReader for Memory {
    fn is_new(&self) -> bool {
        self.writes == 0 && self.be.is_empty() && self.svc.is_empty()
    }

    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError> {
        Ok(self.svc.iter().map(|(key, index)| (*key, *index)).collect())
    }

    fn front(&self, index: u32) -> Result<Front, ReadError> {
        Ok(entry(&self.front, index))
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        Ok(entry(&self.slot, index))
    }

    fn source(&self, index: u32) -> Result<Source, ReadError> {
        Ok(entry(&self.source, index))
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        let backend = |index| entry(&self.be, index);
        Ok((0..entries).map(backend).collect())
    }

    fn tallies(&self, entries: u32) -> Result<Vec<Tally>, ReadError> {
        (0..entries).map(|service| self.tally(service)).collect()
    }
}

fn refused(map: &'static str, why: &str) -> WriteError {
    WriteError {
        map,
        source: io::Error::other(why),
    }
}

/// Returns an entry of an array; zeros if it was never written.
fn entry<T: Copy + FromZeros>(array: &BTreeMap<u32, T>, index: u32) -> T {
    array.get(&index).copied().unwrap_or_else(T::new_zeroed)
}
