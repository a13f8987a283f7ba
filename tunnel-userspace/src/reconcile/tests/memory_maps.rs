//! In-memory service maps. They are stricter than the kernel: writing to an entry that a program may be
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
pub(crate) enum BatchedWrite {
    Backend(u32, Backend),
    Slot(u32, Slot),
    Frontend(u32, Box<Frontend>),
    Key(FrontendKey, u32),
}

impl BatchedWrite {
    const fn order(&self) -> u8 {
        match self {
            Self::Backend(..) => 0,
            Self::Slot(..) => 1,
            Self::Frontend(..) => 2,
            Self::Key(..) => 3,
        }
    }
}

/// The service maps, along with the entries that programs may have read since the last grace period.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    pub(crate) sizes: MapSizes,
    pub(crate) frontend_keys: BTreeMap<FrontendKey, u32>,
    pub(crate) frontends: BTreeMap<u32, Frontend>,
    pub(crate) slots: BTreeMap<u32, Slot>,
    pub(crate) source_ranges: BTreeMap<u32, SourceRange>,
    pub(crate) backends: BTreeMap<u32, Backend>,
    pub(crate) open_connections: OpenConnections,
    pub(crate) service_counts: BTreeMap<u32, ServiceCounts>,
    batch: Option<Vec<BatchedWrite>>,
    refused_map: Option<&'static str>,
    pub(crate) writes: usize,
    /// The number of writes that succeed. All later writes fail, as if the process had been killed.
    pub(crate) max_writes: usize,
    /// True to check all reachable entries after every write. False, for very large maps, to check them only
    /// after each grace period.
    pub(crate) checks_every_write: bool,
    /// Frontends that must have at least one backend after every write.
    pub(crate) never_empty: BTreeSet<FrontendKey>,
    reachable: Reachable,
}

/// The number of open connections to each backend, by index. Clones share the numbers, just as the BPF
/// programs and the daemon do.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenConnections(pub(crate) Arc<Mutex<BTreeMap<u32, u64>>>);

impl OpenConnections {
    pub(crate) fn get(&self, index: u32) -> u64 {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&index).copied().unwrap_or(0)
    }
}

/// The indices of entries that a program may have reached.
#[derive(Clone, Debug, Default)]
struct Reachable {
    frontends: BTreeSet<u32>,
    slots: BTreeSet<u32>,
    sources: BTreeSet<u32>,
    backends: BTreeSet<u32>,
}

impl Memory {
    pub(crate) fn new(sizes: MapSizes) -> Self {
        Self {
            sizes,
            max_writes: usize::MAX,
            checks_every_write: true,
            ..Self::default()
        }
    }

    /// Ends a grace period, after which no program reads an unreachable entry any more.
    pub(crate) fn end_grace_period(&mut self) {
        self.reachable = Reachable::default();
        self.check_reachable();
    }

    /// Returns the backends that a program would find for a key.
    pub(crate) fn backends_of(&self, key: &FrontendKey) -> Option<Vec<Backend>> {
        let frontend = self.frontends.get(self.frontend_keys.get(key)?)?;
        assert_eq!(frontend.key, *key, "the record is that of another frontend");
        let set = Traffic::Sockets.set(frontend);
        let positions = set.base..set.base + set.len;
        let backends = positions.map(|position| self.backends[&self.slots[&position].backend]);
        let backends: Vec<_> = backends.collect();
        if (1..=MAX_INLINE_BACKENDS).contains(&backends.len()) {
            for (inline, backend) in frontend.inline_backends.iter().zip(&backends) {
                assert_eq!(
                    (inline.address, inline.port),
                    (backend.address, backend.port)
                );
                assert_eq!(
                    self.backends[&inline.index], *backend,
                    "the record has another backend"
                );
            }
        }
        for backend in &backends {
            assert_eq!(
                backend.service, frontend.service,
                "a backend of another service port"
            );
            assert!(backend.state.is_serving(), "a removed backend");
        }
        Some(backends)
    }

    /// Returns the indices of serving backends whose set membership doesn't match the sets that contain them.
    pub(crate) fn wrong_memberships(&self) -> Vec<u32> {
        let is_in = |backend: u32, of: fn(&Frontend) -> IndexRange| {
            let service = self.backends[&backend].service;
            let own = self
                .frontend_keys
                .values()
                .map(|index| &self.frontends[index]);
            own.filter(|frontend| frontend.service == service)
                .any(|frontend| {
                    let IndexRange { base, len } = of(frontend);
                    (base..base + len).any(|position| self.slots[&position].backend == backend)
                })
        };
        let sets = |backend| {
            let cluster = is_in(backend, |frontend| frontend.cluster);
            let local = is_in(backend, |frontend| frontend.local);
            let sets = [(cluster, Membership::CLUSTER), (local, Membership::LOCAL)];
            let sets = sets.into_iter().filter(|(is_in, _)| *is_in);
            sets.fold(Membership::NONE, |sets, (_, set)| sets.union(set))
        };
        let serving = self.backends.iter().filter(|(_, it)| it.state.is_serving());
        let misplaced = serving.filter(|(index, it)| it.sets != sets(**index));
        misplaced.map(|(index, _)| *index).collect()
    }

    fn check_after_write(&mut self) {
        if self.checks_every_write {
            self.check_reachable();
        }
    }

    /// Reads everything as programs would, and remembers which entries it has read.
    fn check_reachable(&mut self) {
        for (key, index) in &self.frontend_keys {
            let backends = self.backends_of(key);
            assert!(backends.is_some(), "{key} has no record");
            assert!(
                !self.never_empty.contains(key) || backends.is_some_and(|it| !it.is_empty()),
                "{key} has lost all backends"
            );
            self.reachable.frontends.insert(*index);
            for IndexRange { base, len } in
                [self.frontends[index].cluster, self.frontends[index].local]
            {
                for position in base..base + len {
                    self.reachable.slots.insert(position);
                    self.reachable
                        .backends
                        .insert(self.slots[&position].backend);
                }
            }
            let IndexRange { base, len } = self.frontends[index].source_ranges;
            for position in base..base + len {
                assert!(
                    self.source_ranges.contains_key(&position),
                    "source range {position} was never written"
                );
                self.reachable.sources.insert(position);
            }
        }
    }

    fn count_write(&mut self, map: &'static str, is_free: bool) -> Result<(), WriteError> {
        assert!(is_free, "a program may be reading the entry of {map}");
        if self.writes >= self.max_writes {
            return Err(refused(map, "killed"));
        }
        self.writes += 1;
        Ok(())
    }

    /// Writes the batch, stopping once a write is refused. Entries are written before those that refer to
    /// them. Returns false if nothing else may be written.
    fn write_batch(&mut self) -> bool {
        let Some(mut batch) = self.batch.take() else {
            return true;
        };
        batch.sort_by_key(BatchedWrite::order);
        for write in batch {
            if self.refused_map.is_none() {
                let written = self.write_or_batch(write);
                self.refused_map = written.err().map(|error| error.map);
            }
        }
        self.batch = Some(Vec::new());
        self.refused_map.is_none()
    }

    /// Performs a write, or adds it to the batch if batching is on.
    fn write_or_batch(&mut self, write: BatchedWrite) -> Result<(), WriteError> {
        if let Some(batch) = &mut self.batch {
            batch.push(write);
            return Ok(());
        }
        match write {
            BatchedWrite::Backend(index, backend) => self.write_backend(index, &backend)?,
            BatchedWrite::Slot(index, slot) => {
                assert!(index < self.sizes.slot_entries());
                self.count_write("slots", !self.reachable.slots.contains(&index))?;
                self.slots.insert(index, slot);
            }
            BatchedWrite::Frontend(index, frontend) => {
                assert!(index < self.sizes.frontend_entries());
                self.count_write("frontends", !self.reachable.frontends.contains(&index))?;
                self.frontends.insert(index, *frontend);
            }
            BatchedWrite::Key(key, index) => {
                self.count_write("services", true)?;
                if !self.frontend_keys.contains_key(&key)
                    && self.frontend_keys.len()
                        >= tunnel_common::table::SERVICES.entries(self.sizes, 1) as usize
                {
                    return Err(refused("services", "full"));
                }
                self.frontend_keys.insert(key, index);
                self.check_after_write();
            }
        }
        Ok(())
    }

    fn write_backend(&mut self, index: u32, backend: &Backend) -> Result<(), WriteError> {
        assert!(index < self.sizes.backend_entries());
        let old = self.backends.get(&index).map(|old| old.state);
        let old = old.unwrap_or_default();
        assert!(
            !old.is_serving(),
            "backend {index} is overwritten while it serves"
        );
        let open = self.open_connections.get(index);
        assert_eq!(
            open, 0,
            "backend {index} is overwritten while it has open connections"
        );
        assert_ne!(old, backend.state);
        self.count_write("backends", !self.reachable.backends.contains(&index))?;
        self.backends.insert(index, *backend);
        Ok(())
    }

    fn update_backend(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Backend),
    ) -> Result<(), WriteError> {
        if !self.write_batch() {
            return Ok(());
        }
        self.count_write("backends", true)?;
        let changed = self.backends.get_mut(&index).map(change);
        assert!(changed.is_some(), "backend {index} was never written");
        self.check_after_write();
        Ok(())
    }
}

impl MapWriter for Memory {
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError> {
        self.write_or_batch(BatchedWrite::Key(*key, index))
    }

    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError> {
        if !self.write_batch() {
            return Ok(());
        }
        self.count_write("services", true)?;
        self.frontend_keys.remove(key);
        Ok(())
    }

    fn write_frontend(&mut self, index: u32, frontend: &Frontend) -> Result<(), WriteError> {
        self.write_or_batch(BatchedWrite::Frontend(index, Box::new(*frontend)))
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let mut slots = (first..).zip(slots);
        slots.try_for_each(|(index, slot)| self.write_or_batch(BatchedWrite::Slot(index, *slot)))
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        for (written, (index, backend)) in backends.iter().enumerate() {
            if let Err(error) = self.write_or_batch(BatchedWrite::Backend(*index, *backend)) {
                return (written, Err(error));
            }
        }
        (backends.len(), Ok(()))
    }

    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError> {
        assert!(index < self.sizes.source_range_entries());
        self.count_write("source_ranges", !self.reachable.sources.contains(&index))?;
        self.source_ranges.insert(index, *source);
        Ok(())
    }

    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.update_backend(index, |backend| {
            assert!(
                backend.state.is_serving(),
                "a removed backend gets other sets"
            );
            backend.sets = sets;
        })
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.update_backend(index, |backend| backend.state = backend.state.removed())
    }

    fn start_batch(&mut self) {
        self.batch.get_or_insert_default();
    }

    fn flush_batch(&mut self) -> Result<(), WriteError> {
        self.write_batch();
        self.batch = None;
        let map = self.refused_map.take();
        map.map_or(Ok(()), |map| Err(refused(map, "killed")))
    }

    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError> {
        self.count_write("service_counts", true)?;
        self.service_counts.remove(&service);
        Ok(())
    }
}

impl CounterReader for Memory {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        Ok(self.open_connections.get(index))
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        Ok(self
            .service_counts
            .get(&service)
            .copied()
            .unwrap_or_default())
    }
}

impl MapReader for Memory {
    fn is_new(&self) -> bool {
        self.writes == 0 && self.backends.is_empty() && self.frontend_keys.is_empty()
    }

    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError> {
        Ok(self
            .frontend_keys
            .iter()
            .map(|(key, index)| (*key, *index))
            .collect())
    }

    fn frontend(&self, index: u32) -> Result<Frontend, ReadError> {
        Ok(entry(&self.frontends, index))
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        Ok(entry(&self.slots, index))
    }

    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError> {
        Ok(entry(&self.source_ranges, index))
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        let backend = |index| entry(&self.backends, index);
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

/// Returns an entry of an array map, or all zeros if the entry was never written.
fn entry<T: Copy + FromZeros>(array: &BTreeMap<u32, T>, index: u32) -> T {
    array.get(&index).copied().unwrap_or_else(T::new_zeroed)
}
