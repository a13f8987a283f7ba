//! Which ranges of clients records use: each list of ranges is in the map once, however many fronts it
//! restricts.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use tunnel_common::{
    select::SOURCES_OF_FRONT,
    service::{Set, Source},
};

use super::alloc::Ranges;
use crate::reconcile::access::{MapReader, ReadError};

/// A list of ranges that records use.
#[derive(Debug)]
struct Used {
    records: u32,
    ranges: Arc<[Source]>,
}

/// The map `source`, as it is used.
#[derive(Debug)]
pub(in crate::reconcile) struct Sources {
    by_base: BTreeMap<u32, Used>,
    by_ranges: HashMap<Arc<[Source]>, Set>,
    free: Ranges,
    entries: u32,
    used: u32,
}

impl Sources {
    /// A map of so many entries, none of them used.
    pub(super) fn new(entries: u32) -> Self {
        Self {
            by_base: BTreeMap::new(),
            by_ranges: HashMap::new(),
            free: Ranges::new(entries),
            entries,
            used: 0,
        }
    }

    /// Takes over what a record names; says whether it makes sense.
    pub(super) fn adopt(&mut self, reader: &impl MapReader, set: Set) -> Result<bool, ReadError> {
        if set.len == 0 {
            return Ok(true);
        }
        if let Some(known) = self.by_base.get(&set.base) {
            return Ok(u32::try_from(known.ranges.len()) == Ok(set.len));
        }
        let end = set.base.checked_add(set.len);
        if set.len > SOURCES_OF_FRONT || end.is_none_or(|end| end > self.entries) {
            return Ok(false);
        }
        let places = set.base..set.base.saturating_add(set.len);
        let ranges: Vec<_> = places
            .map(|place| reader.source(place))
            .collect::<Result<_, _>>()?;
        let is_sound = ranges.iter().all(|range| range.first <= range.last)
            && ranges.is_sorted_by(|one, next| one.last < next.first);
        if !is_sound || !self.free.take_at(set.base, set.len) {
            return Ok(false);
        }
        self.put(set, &ranges);
        Ok(true)
    }

    /// Where a list is, if it is in the map.
    pub(super) fn find(&self, ranges: &[Source]) -> Option<Set> {
        if ranges.is_empty() {
            return Some(Set::default());
        }
        self.by_ranges.get(ranges).copied()
    }

    /// The list that a record names.
    pub(super) fn ranges(&self, set: Set) -> Option<&Arc<[Source]>> {
        let known = self.by_base.get(&set.base).filter(|_| set.len > 0);
        known.map(|known| &known.ranges)
    }

    /// Takes room for a list, which nothing leads to yet.
    pub(in crate::reconcile) fn take(&mut self, len: u32) -> Option<Set> {
        let base = self.free.take(len)?;
        Some(Set { base, len })
    }

    /// Notes that a list was written where room was taken for it.
    pub(super) fn put(&mut self, set: Set, ranges: &[Source]) {
        let ranges: Arc<[Source]> = ranges.into();
        self.used = self.used.saturating_add(set.len);
        self.by_ranges.insert(Arc::clone(&ranges), set);
        self.by_base.insert(set.base, Used { records: 0, ranges });
    }

    /// Counts one more record that uses a list.
    pub(super) fn hold(&mut self, set: Set) {
        if let Some(known) = self.by_base.get_mut(&set.base)
            && set.len > 0
        {
            known.records = known.records.saturating_add(1);
        }
    }

    /// Counts one record less; says whether that was the last, so that the list is to be freed once no
    /// program reads it.
    pub(super) fn release(&mut self, set: Set) -> bool {
        let Some(known) = self.by_base.get_mut(&set.base).filter(|_| set.len > 0) else {
            return false;
        };
        known.records = known.records.saturating_sub(1);
        let is_last = known.records == 0;
        if is_last {
            self.remove(set);
        }
        is_last
    }

    /// Gives back a list that no record came to use.
    pub(super) fn drop_unused(&mut self, set: Set) {
        let known = self.by_base.get(&set.base).filter(|_| set.len > 0);
        if known.is_some_and(|known| known.records == 0) {
            self.remove(set);
            self.give(set);
        }
    }

    fn remove(&mut self, set: Set) {
        if let Some(known) = self.by_base.remove(&set.base) {
            self.used = self.used.saturating_sub(set.len);
            self.by_ranges.remove(&known.ranges);
        }
    }

    /// Gives room back that no program reads any more.
    pub(super) fn give(&mut self, set: Set) {
        self.free.give(set.base, set.len);
    }

    /// How many records use a list.
    pub(super) fn records(&self, set: Set) -> u32 {
        let known = self.by_base.get(&set.base).filter(|_| set.len > 0);
        known.map_or(0, |known| known.records)
    }

    /// How much is in use.
    pub(in crate::reconcile) const fn used(&self) -> u32 {
        self.used
    }

    /// Each list with its place.
    pub(in crate::reconcile) fn lists(&self) -> impl Iterator<Item = (u32, &[Source])> {
        self.by_base
            .iter()
            .map(|(base, known)| (*base, &*known.ranges))
    }
}
