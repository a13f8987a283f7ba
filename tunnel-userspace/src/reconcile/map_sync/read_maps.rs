//! Reads the contents of the service maps at startup, for each audit, and after a refused batch.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::{
    decide::Traffic,
    select::MAX_SOURCE_RANGES,
    service::{Backend, Frontend, FrontendKey, IndexRange, MAX_INLINE_BACKENDS},
    table::MapSizes,
};

use super::{
    actual::{ActualContent, BackendStatus, ProgrammedFrontend},
    allocators::IndexAllocator,
    set_values::{inline_backends, slots},
};
use crate::{
    plan::BackendTarget,
    reconcile::map_access::{MapReader, ReadError},
};

/// Invalid map entries, left by a crash or by another program.
#[derive(Debug, Default)]
pub(crate) struct InvalidEntries {
    /// Keys without a valid record. They must be removed before anything is written, since their records
    /// are treated as free.
    pub(crate) frontend_keys: Vec<FrontendKey>,
    /// The indices of serving backends whose service port has no frontend or has another backend at the same
    /// address and port.
    pub(crate) backends: Vec<u32>,
}

/// The state of an ongoing read of the maps.
struct MapRead<'a, R> {
    reader: &'a R,
    /// The serving backends, by index.
    backends: BTreeMap<u32, Backend>,
    /// The valid entries read so far.
    actual: ActualContent,
}

/// Reads the maps and returns the valid entries and the invalid ones. All backend indices count as free until
/// [`ActualContent::find_draining`] is called.
pub(in crate::reconcile) fn read_maps(
    reader: &impl MapReader,
    sizes: MapSizes,
) -> Result<(ActualContent, InvalidEntries), ReadError> {
    let all = reader.backends(sizes.backend_entries())?;
    let backend_statuses = all.iter().map(|backend| BackendStatus {
        state: backend.state,
        membership: backend.sets,
    });
    let backend_statuses = backend_statuses.collect();
    let serving = (0_u32..)
        .zip(all)
        .filter(|(_, backend)| backend.state.is_serving());
    let mut read = MapRead {
        reader,
        backends: serving.collect(),
        actual: ActualContent {
            backend_statuses,
            ..ActualContent::empty(sizes)
        },
    };
    let mut invalid = InvalidEntries::default();
    for (key, index) in reader.frontend_keys()? {
        if !read.add_frontend(key, index)? {
            invalid.frontend_keys.push(key);
        }
    }
    invalid.backends = read.add_backends();
    let MapRead { mut actual, .. } = read;
    let used_frontends = actual
        .frontends
        .values()
        .map(|frontend| frontend.index)
        .collect();
    let used_ids = actual.ports.keys().copied().collect();
    let used_backends = actual.serving_indices().len();
    actual.used_backends = u32::try_from(used_backends).unwrap_or(u32::MAX);
    actual.free_frontends = IndexAllocator::new(sizes.frontend_entries(), &used_frontends);
    actual.free_ids = IndexAllocator::new(sizes.frontend_entries(), &used_ids);
    Ok((actual, invalid))
}

impl<R: MapReader> MapRead<'_, R> {
    /// Adds a frontend to the valid entries. Returns false if its record or anything that the record refers
    /// to is invalid.
    fn add_frontend(&mut self, key: FrontendKey, index: u32) -> Result<bool, ReadError> {
        let entries = self.actual.sizes.frontend_entries();
        if index >= entries {
            return Ok(false);
        }
        let record = self.reader.frontend(index)?;
        let is_valid = record.key == key
            && record.service < entries
            && self.read_set(&record, record.cluster)?
            && self.read_set(&record, record.local)?
            && self.read_source_ranges(record.source_ranges)?
            && self.inline_backends_match(&record);
        if is_valid {
            let actual = &mut self.actual;
            actual.add_references(&record);
            actual
                .frontends
                .insert(key, ProgrammedFrontend { index, record });
            let port = actual.ports.entry(record.service).or_default();
            port.frontends.insert(key, ());
        }
        Ok(is_valid)
    }

    fn read_set(&mut self, record: &Frontend, set: IndexRange) -> Result<bool, ReadError> {
        let (reader, serving) = (self.reader, &self.backends);
        let is_own = |backend: &Backend| backend.service == record.service;
        self.actual.sets.read_list(set, |positions| {
            let read_slots = positions.map(|index| reader.slot(index));
            let read_slots = read_slots.collect::<Result<Vec<_>, _>>()?;
            let backends: Vec<_> = read_slots.iter().map(|slot| slot.backend).collect();
            let mut indices = backends.iter();
            let are_own = indices.all(|index| serving.get(index).is_some_and(is_own));
            let is_valid = are_own && slots(&backends).eq(read_slots);
            Ok(is_valid.then_some(backends))
        })
    }

    fn read_source_ranges(&mut self, set: IndexRange) -> Result<bool, ReadError> {
        self.actual.source_ranges.read_list(set, |positions| {
            if set.len > MAX_SOURCE_RANGES {
                return Ok(None);
            }
            let ranges = positions.map(|index| self.reader.source_range(index));
            let ranges = ranges.collect::<Result<Vec<_>, _>>()?;
            let is_valid = ranges.iter().all(|range| range.first <= range.last)
                && ranges.is_sorted_by(|one, next| one.last < next.first);
            Ok(is_valid.then_some(ranges))
        })
    }

    /// Returns true if the copies of backends in a record match the record's set.
    fn inline_backends_match(&self, record: &Frontend) -> bool {
        let indices = self.actual.sets.items(Traffic::Sockets.set(record));
        let indices = if indices.len() > MAX_INLINE_BACKENDS {
            &[]
        } else {
            indices
        };
        let known = |index| self.backends.get(index).map(target);
        let targets: Option<Vec<_>> = indices.iter().map(known).collect();
        targets.is_some_and(|targets| record.inline_backends == inline_backends(&targets, indices))
    }

    /// Adds to the valid entries each serving backend whose service port has a frontend. Returns the indices
    /// of the other serving backends.
    fn add_backends(&mut self) -> Vec<u32> {
        let sets = self.actual.sets.all();
        let in_sets: BTreeSet<u32> = sets.flat_map(|(_, set)| set.iter().copied()).collect();
        let mut invalid = Vec::new();
        // If two backends have the same address and port, the one in a set is the valid one. The other one is
        // marked as removed, and from then on serves only its open connections.
        let (first, second): (Vec<_>, Vec<_>) = self
            .backends
            .iter()
            .partition(|(index, _)| in_sets.contains(index));
        for (index, backend) in first.into_iter().chain(second) {
            let target = target(backend);
            match self.actual.ports.get_mut(&backend.service) {
                Some(port) if !port.backends.contains_key(&target) => {
                    port.backends.insert(target, *index);
                }
                Some(_) | None => {
                    invalid.push(*index);
                    let removed = backend.state.removed();
                    self.actual
                        .update_backend_status(*index, |known| known.state = removed);
                }
            }
        }
        invalid
    }
}

const fn target(backend: &Backend) -> BackendTarget {
    BackendTarget {
        address: backend.address,
        port: backend.port,
    }
}
