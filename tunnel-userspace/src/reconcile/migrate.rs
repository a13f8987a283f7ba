//! Copies the contents of the maps into new, empty maps of different sizes, which no program reads yet.
//! Numbers that are also stored outside the maps stay the same: a socket stores the index of its backend and
//! the id of its service port, and a steering address contains the index of its record.

use std::{collections::BTreeMap, hash::Hash, time::Duration};

use tunnel_common::{
    service::{Backend, BackendState, Frontend, IndexRange},
    steering::{SteeringKey, SteeringRecord},
    table::{Headroom, MapSize, MapSizes},
};
use zerocopy::FromZeros as _;

use super::{
    map_access::{AdoptError, MapReader, MapWriter, ReadError, SteeringMaps, WriteError},
    map_sync::{ActualContent, RefCountedLists, read_maps, slots},
    steering::{QUARANTINE, nanos},
};

/// A configured map size is too small for the current contents.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "bpf.maps.{size} of {wanted} is too small: the present content of the maps needs {needed} or more \
     (open connections may use the highest index)"
)]
pub struct MapTooSmall {
    /// The name of the size's field under `bpf.maps` in the config.
    pub size: &'static str,
    /// The configured size.
    pub wanted: u32,
    /// The smallest size that is large enough.
    pub needed: u32,
}

impl MapTooSmall {
    /// Returns true if this size comes from the config. The steering size doesn't when steering is off.
    #[must_use]
    pub fn is_configured(&self) -> bool {
        self.size != MapSize::Steering.key() || self.wanted != MapSizes::DISABLED
    }
}

fn check_size(size: MapSize, wanted: MapSizes, needed: u32) -> Result<(), MapTooSmall> {
    let wanted = wanted.of(size);
    if wanted < needed {
        return Err(MapTooSmall {
            size: size.key(),
            wanted,
            needed,
        });
    }
    Ok(())
}

/// A copy of the service maps' contents.
#[derive(Debug)]
pub struct ServiceMapsSnapshot(ActualContent);

impl ServiceMapsSnapshot {
    /// Reads maps of the given sizes, skipping invalid entries.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn read(maps: &impl MapReader, had: MapSizes) -> Result<Self, ReadError> {
        let (actual, _left_out) = read_maps(maps, had)?;
        Ok(Self(actual))
    }

    /// Checks that the contents fit into maps of the given sizes.
    ///
    /// # Errors
    ///
    /// Returns an error if a size is too small.
    pub fn fits(&self, wanted: MapSizes) -> Result<(), MapTooSmall> {
        let ids = self.0.ports.keys().max();
        let indices = self.0.ports.values();
        let indices = indices.flat_map(|port| port.backends.values()).max();
        let frontends = u32::try_from(self.0.frontends.len()).unwrap_or(u32::MAX);
        let backends = self.0.used_backends;
        check_size(
            MapSize::Frontends,
            wanted,
            frontends.max(size_for_index(ids)),
        )?;
        check_size(MapSize::Slots, wanted, self.0.sets.used)?;
        check_size(MapSize::SourceRanges, wanted, self.0.source_ranges.used)?;
        check_size(
            MapSize::Backends,
            wanted,
            backends.max(size_for_index(indices)),
        )
    }

    /// Writes the contents into empty maps. The backend indices that the old maps did not have get the state
    /// `unused`.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn write(
        &self,
        from: &impl MapReader,
        to: &mut impl MapWriter,
        sizes: MapSizes,
        unused: BackendState,
    ) -> Result<(), AdoptError> {
        let known = self.0.sizes.backend_entries();
        let backends = from.backends(known.min(sizes.backend_entries()))?;
        let backends = (0..).zip(backends).filter_map(|(index, backend)| {
            let state = self.0.backend_status(index).state;
            (state != BackendState::default()).then_some((index, Backend { state, ..backend }))
        });
        let (_, written) = to.write_backends(&backends.collect::<Vec<_>>());
        written?;
        write_unused_backends(to, known, sizes, unused)?;
        // Slots, source ranges and records may move, since only other entries in these maps refer to them.
        let sets = write_compacted(&self.0.sets, |base, backends| {
            let slots: Vec<_> = slots(backends).collect();
            to.write_slots(base, &slots)
        })?;
        let sources = write_compacted(&self.0.source_ranges, |base, ranges| {
            let mut ranges = (base..).zip(ranges);
            ranges.try_for_each(|(index, range)| to.write_source_range(index, range))
        })?;
        let frontends: BTreeMap<_, _> = self.0.frontends.iter().collect();
        for (index, (key, frontend)) in (0..).zip(frontends) {
            let record = Frontend {
                cluster: with_new_base(&sets, frontend.record.cluster),
                local: with_new_base(&sets, frontend.record.local),
                source_ranges: with_new_base(&sources, frontend.record.source_ranges),
                ..frontend.record
            };
            to.write_frontend(index, &record)?;
            to.write_frontend_key(key, index)?;
        }
        Ok(())
    }
}

/// Writes all lists without gaps between them. Returns the new base of each list, keyed by its old base.
fn write_compacted<T: Eq + Hash>(
    lists: &RefCountedLists<T>,
    mut write: impl FnMut(u32, &[T]) -> Result<(), WriteError>,
) -> Result<BTreeMap<u32, u32>, WriteError> {
    let mut next = 0_usize;
    let mut bases = BTreeMap::new();
    for (base, items) in lists.all() {
        let new_base = u32::try_from(next).unwrap_or(u32::MAX);
        write(new_base, items)?;
        bases.insert(base, new_base);
        next += items.len();
    }
    Ok(bases)
}

/// Returns a list's new position. `bases` maps each list's old base to its new one.
fn with_new_base(bases: &BTreeMap<u32, u32>, set: IndexRange) -> IndexRange {
    let base = bases.get(&set.base).filter(|_| set.len > 0);
    base.map_or_else(IndexRange::default, |base| IndexRange {
        base: *base,
        ..set
    })
}

/// Writes the state `unused` to every backend index from `first` onwards.
///
/// # Errors
///
/// Returns an error if the map can't be written.
pub fn write_unused_backends(
    to: &mut impl MapWriter,
    first: u32,
    sizes: MapSizes,
    unused: BackendState,
) -> Result<(), WriteError> {
    let backend = Backend {
        state: unused.removed(),
        ..Backend::new_zeroed()
    };
    let all = (first..sizes.backend_entries()).map(|index| (index, backend));
    let (_, written) = to.write_backends(&all.collect::<Vec<_>>());
    written
}

/// Returns the smallest map size for which the array has an entry at `index`, or 0 if `index` is `None`.
fn size_for_index(index: Option<&u32>) -> u32 {
    let Some(entries) = index.map(|index| index + 1) else {
        return 0;
    };
    // The search tries at most two sizes, since the size that `size_for` returns is always large enough.
    let least = Headroom::Update.size_for(entries).saturating_sub(1);
    let is_enough = |size: &u32| Headroom::Update.entries(*size) >= entries;
    (least..).find(is_enough).unwrap_or(entries)
}

/// A copy of the steering maps' contents.
#[derive(Debug)]
pub struct SteeringMapsSnapshot {
    keys: Vec<(SteeringKey, u32)>,
    records: BTreeMap<u32, SteeringRecord>,
}

impl SteeringMapsSnapshot {
    /// Reads maps of the given sizes, skipping records whose quarantine has ended. `now` is the time since
    /// boot.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn read(maps: &impl SteeringMaps, had: MapSizes, now: Duration) -> Result<Self, ReadError> {
        let is_quarantine_over = |record: &SteeringRecord| {
            // A record whose removal time is in the future is still in quarantine.
            record.removed_at > 0
                && nanos(now).saturating_sub(record.removed_at) >= nanos(QUARANTINE)
        };
        let records = (0_u32..).zip(maps.records(had.steered_entries())?);
        let records: BTreeMap<_, _> = records
            .filter(|(_, record)| {
                record.kind == SteeringRecord::NODE && !is_quarantine_over(record)
            })
            .collect();
        let is_valid = |(key, index): &(SteeringKey, u32)| {
            records.get(index).is_some_and(|record| record.key == *key)
        };
        let keys = maps.keys()?.into_iter().filter(is_valid).collect();
        Ok(Self { keys, records })
    }

    /// Checks that the contents fit into maps of the given sizes.
    ///
    /// # Errors
    ///
    /// Returns an error if the size is too small.
    pub fn fits(&self, wanted: MapSizes) -> Result<(), MapTooSmall> {
        let keys = u32::try_from(self.keys.len()).unwrap_or(u32::MAX);
        // The array has 2 * size + 1 records, the last of which is the probe's.
        let last = self.records.keys().next_back();
        let records = last.map_or(0, |index| index / 2 + 1);
        check_size(MapSize::Steering, wanted, keys.max(records))
    }

    /// Writes the contents into empty maps.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be written.
    pub fn write(&self, to: &mut impl SteeringMaps) -> Result<(), WriteError> {
        for (index, record) in &self.records {
            to.write_record(*index, record)?;
        }
        self.keys
            .iter()
            .try_for_each(|(key, index)| to.write_key(key, *index))
    }
}
