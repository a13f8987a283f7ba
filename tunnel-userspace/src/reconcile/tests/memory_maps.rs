//! The service maps in memory. They are stricter than the kernel: a write to an entry that a program may be
//! reading panics.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, PoisonError},
};

use tunnel_common::{
    decide::Traffic,
    service::{
        Backend, Frontend, FrontendKey, IndexRange, MAX_INLINE_BACKENDS, Membership, ServiceCounts,
        Slot, SourceRange,
    },
};
use zerocopy::FromZeros;

use super::{CounterReader, MapReader, MapSizes, MapWriter, ReadError, WriteError};

/// A write that is part of a batch.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    Backend(u32, Backend),
    Slot(u32, Slot),
    Front(u32, Box<Frontend>),
    Key(FrontendKey, u32),
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

/// The service maps, and the entries that programs may have read since the last grace period.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) sizes: MapSizes,
    pub(crate) svc: BTreeMap<FrontendKey, u32>,
    pub(crate) front: BTreeMap<u32, Frontend>,
    pub(crate) slot: BTreeMap<u32, Slot>,
    pub(crate) source: BTreeMap<u32, SourceRange>,
    pub(crate) be: BTreeMap<u32, Backend>,
    pub(crate) conns: Conns,
    pub(crate) tallies: BTreeMap<u32, ServiceCounts>,
    held: Option<Vec<Held>>,
    refused: Option<&'static str>,
    pub(crate) writes: usize,
    /// The number of writes that succeed; all later ones fail, as if the process had been killed.
    pub(crate) limit: usize,
    /// True to check all reachable entries after every write; false for very large maps, to check them
    /// after each grace period only.
    pub(crate) is_watched: bool,
    seen: Seen,
}

/// The number of open connections by backend index. Clones share the numbers, as programs and the daemon do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conns(pub(crate) Arc<Mutex<BTreeMap<u32, u64>>>);

impl Conns {
    pub(crate) fn of(&self, index: u32) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&index).copied().unwrap_or(0)
    }
}

/// The indices of entries that a program may have reached.
#[derive(Clone, Debug, Default)]
struct Seen {
    fronts: BTreeSet<u32>,
    slots: BTreeSet<u32>,
    sources: BTreeSet<u32>,
    backends: BTreeSet<u32>,
}

impl Memory {
    pub(crate) fn new(sizes: MapSizes) -> Self {
        Self {
            sizes,
            limit: usize::MAX,
            is_watched: true,
            ..Self::default()
        }
    }

    /// Ends a grace period: no program reads an unreachable entry any more.
    pub(crate) fn grace(&mut self) {
        self.seen = Seen::default();
        self.look();
    }

    /// Returns the backends that a program finds for a key.
    pub(crate) fn read(&self, key: &FrontendKey) -> Option<Vec<Backend>> {
        let front = self.front.get(self.svc.get(key)?)?;
        assert_eq!(front.key, *key, "the record is that of another frontend");
        let set = Traffic::Sockets.set(front);
        let places = set.base..set.base + set.len;
        let backends = places.map(|place| self.be[&self.slot[&place].backend]);
        let backends: Vec<_> = backends.collect();
        if (1..=MAX_INLINE_BACKENDS).contains(&backends.len()) {
            for (near, backend) in front.inline_backends.iter().zip(&backends) {
                assert_eq!((near.address, near.port), (backend.address, backend.port));
                assert_eq!(
                    self.be[&near.index], *backend,
                    "the record has another backend"
                );
            }
        }
        for backend in &backends {
            assert_eq!(
                backend.service, front.service,
                "a backend of another service port"
            );
            assert!(backend.state.is_serving(), "a removed backend");
        }
        Some(backends)
    }

    /// Returns the serving backends with a set membership that differs from the sets that contain them.
    pub(crate) fn misplaced(&self) -> Vec<u32> {
        let is_in = |backend: u32, of: fn(&Frontend) -> IndexRange| {
            let service = self.be[&backend].service;
            let own = self.svc.values().map(|index| &self.front[index]);
            own.filter(|front| front.service == service).any(|front| {
                let IndexRange { base, len } = of(front);
                (base..base + len).any(|place| self.slot[&place].backend == backend)
            })
        };
        let sets = |backend| {
            let cluster = is_in(backend, |front| front.cluster);
            let local = is_in(backend, |front| front.local);
            let sets = [(cluster, Membership::CLUSTER), (local, Membership::LOCAL)];
            let sets = sets.into_iter().filter(|(is_in, _)| *is_in);
            sets.fold(Membership::NONE, |sets, (_, set)| sets.union(set))
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

    /// Reads everything as programs do, and remembers the entries that it reads.
    fn look(&mut self) {
        for (key, index) in &self.svc {
            assert!(self.read(key).is_some(), "{key} has no record");
            self.seen.fronts.insert(*index);
            for IndexRange { base, len } in [self.front[index].cluster, self.front[index].local] {
                for place in base..base + len {
                    self.seen.slots.insert(place);
                    self.seen.backends.insert(self.slot[&place].backend);
                }
            }
            let IndexRange { base, len } = self.front[index].source_ranges;
            for place in base..base + len {
                assert!(
                    self.source.contains_key(&place),
                    "source range {place} was never written"
                );
                self.seen.sources.insert(place);
            }
        }
    }

    fn write(&mut self, map: &'static str, is_free: bool) -> Result<(), WriteError> {
        assert!(is_free, "a program may be reading the entry of {map}");
        if self.writes >= self.limit {
            return Err(refused(map, "killed"));
        }
        self.writes += 1;
        Ok(())
    }

    /// Writes the batch until a write is refused; entries are written before those that refer to them.
    /// Returns false if nothing else may be written.
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

    /// Makes a write, or adds it to the batch if batching is on.
    fn make(&mut self, write: Held) -> Result<(), WriteError> {
        if let Some(held) = &mut self.held {
            held.push(write);
            return Ok(());
        }
        match write {
            Held::Backend(index, backend) => self.write_backend(index, &backend)?,
            Held::Slot(index, slot) => {
                assert!(index < self.sizes.slot_entries());
                self.write("slots", !self.seen.slots.contains(&index))?;
                self.slot.insert(index, slot);
            }
            Held::Front(index, front) => {
                assert!(index < self.sizes.frontend_entries());
                self.write("frontends", !self.seen.fronts.contains(&index))?;
                self.front.insert(index, *front);
            }
            Held::Key(key, index) => {
                self.write("services", true)?;
                if !self.svc.contains_key(&key) && self.svc.len() >= self.sizes.frontends as usize {
                    return Err(refused("services", "full"));
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
        assert!(
            !old.is_serving(),
            "backend {index} is overwritten while it serves"
        );
        let open = self.conns.of(index);
        assert_eq!(
            open, 0,
            "backend {index} is overwritten while it has open connections"
        );
        assert_ne!(old, backend.state);
        self.write("backends", !self.seen.backends.contains(&index))?;
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
        self.write("backends", true)?;
        let changed = self.be.get_mut(&index).map(change);
        assert!(changed.is_some(), "backend {index} was never written");
        self.watch();
        Ok(())
    }
}

impl MapWriter for Memory {
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError> {
        self.make(Held::Key(*key, index))
    }

    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        self.write("services", true)?;
        self.svc.remove(key);
        Ok(())
    }

    fn write_frontend(&mut self, index: u32, front: &Frontend) -> Result<(), WriteError> {
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

    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError> {
        assert!(index < self.sizes.source_range_entries());
        self.write("source_ranges", !self.seen.sources.contains(&index))?;
        self.source.insert(index, *source);
        Ok(())
    }

    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| {
            assert!(
                backend.state.is_serving(),
                "a removed backend gets other sets"
            );
            backend.sets = sets;
        })
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.removed())
    }

    fn start_batch(&mut self) {
        self.held.get_or_insert_default();
    }

    fn flush_batch(&mut self) -> Result<(), WriteError> {
        self.write_held();
        self.held = None;
        let map = self.refused.take();
        map.map_or(Ok(()), |map| Err(refused(map, "killed")))
    }

    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError> {
        self.write("service_counts", true)?;
        self.tallies.remove(&service);
        Ok(())
    }
}

impl CounterReader for Memory {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        Ok(self.conns.of(index))
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        Ok(self.tallies.get(&service).copied().unwrap_or_default())
    }
}

impl MapReader for Memory {
    fn is_new(&self) -> bool {
        self.writes == 0 && self.be.is_empty() && self.svc.is_empty()
    }

    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError> {
        Ok(self.svc.iter().map(|(key, index)| (*key, *index)).collect())
    }

    fn frontend(&self, index: u32) -> Result<Frontend, ReadError> {
        Ok(entry(&self.front, index))
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        Ok(entry(&self.slot, index))
    }

    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError> {
        Ok(entry(&self.source, index))
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        let backend = |index| entry(&self.be, index);
        Ok((0..entries).map(backend).collect())
    }

    fn all_service_counts(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError> {
        (0..entries)
            .map(|service| self.service_counts(service))
            .collect()
    }
}

fn refused(map: &'static str, why: &str) -> WriteError {
    WriteError {
        map,
        source: io::Error::other(why),
    }
}

/// Returns an entry of an array map; zeros if it was never written.
fn entry<T: Copy + FromZeros>(array: &BTreeMap<u32, T>, index: u32) -> T {
    array.get(&index).copied().unwrap_or_else(T::new_zeroed)
}
