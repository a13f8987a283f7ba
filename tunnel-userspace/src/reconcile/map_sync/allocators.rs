//! Allocators for entries in array maps, either single indices or contiguous ranges.

use std::collections::{BTreeMap, BTreeSet};

/// Allocates single indices below a limit.
#[derive(Debug)]
pub(crate) struct IndexAllocator {
    freed: Vec<u32>,
    /// Free indices that are allocated only after all others.
    postponed: Vec<u32>,
    first_unused: u32,
    limit: u32,
}

impl IndexAllocator {
    /// Creates an allocator in which all indices are free except those in `used`.
    pub(crate) fn new(limit: u32, used: &BTreeSet<u32>) -> Self {
        // The indices above the highest one in use are free, and so are the gaps below it.
        let first_unused = used.last().map_or(0, |last| last + 1).min(limit);
        let freed = (0..first_unused)
            .rev()
            .filter(|index| !used.contains(index))
            .collect();
        Self {
            freed,
            postponed: Vec::new(),
            first_unused,
            limit,
        }
    }

    /// Allocates an index.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let freed = self.freed.pop().or_else(|| {
            let index = (self.first_unused < self.limit).then_some(self.first_unused)?;
            self.first_unused += 1;
            Some(index)
        });
        freed.or_else(|| self.postponed.pop())
    }

    /// Frees an index that is allocated again only after all others.
    pub(crate) fn free_last(&mut self, index: u32) {
        debug_assert!(index < self.first_unused);
        self.postponed.push(index);
    }

    /// Allocates these indices, if they are free, only after all others.
    pub(crate) fn postpone(&mut self, indices: &BTreeSet<u32>) {
        let end = indices.last().map_or(0, |last| last + 1).min(self.limit);
        self.freed.extend((self.first_unused..end).rev());
        self.first_unused = self.first_unused.max(end);
        let is_postponed = |index: &mut u32| indices.contains(index);
        self.postponed
            .extend(self.freed.extract_if(.., is_postponed));
    }

    /// Frees an index.
    pub(crate) fn free(&mut self, index: u32) {
        debug_assert!(index < self.first_unused);
        self.freed.push(index);
    }

    /// Returns how many indices are free.
    pub(crate) fn free_count(&self) -> usize {
        self.freed.len() + self.postponed.len() + to_usize(self.limit - self.first_unused)
    }
}

/// The minimum length of a long range. Long and short ranges are allocated from opposite ends, so that short
/// ones don't split up the room for long ones.
const LONG: u32 = 128;

/// Allocates contiguous ranges of indices below a limit, each from the smallest free range that is large
/// enough. Adjacent free ranges are merged.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeAllocator {
    by_base: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
}

impl RangeAllocator {
    /// Creates an allocator in which all entries below the limit are free.
    pub(crate) fn new(limit: u32) -> Self {
        let mut ranges = Self::default();
        ranges.insert(0, limit);
        ranges
    }

    /// Allocates a range of the given length and returns its first index, which is 0 for an empty range.
    pub(crate) fn allocate(&mut self, length: u32) -> Option<u32> {
        if length == 0 {
            return Some(0);
        }
        let (found, base) = self.by_length.range((length, 0)..).next().copied()?;
        if length < LONG {
            self.remove(base, found);
            self.insert(base + length, found - length);
            return Some(base);
        }
        let last = self.by_length.range(..=(found, u32::MAX)).next_back();
        let (found, base) = last.copied()?;
        self.remove(base, found);
        self.insert(base, found - length);
        Some(base + found - length)
    }

    /// Allocates exactly this range. Returns false if any part of it is in use.
    pub(crate) fn allocate_at(&mut self, base: u32, length: u32) -> bool {
        if length == 0 {
            return true;
        }
        let Some((&start, &found)) = self.by_base.range(..=base).next_back() else {
            return false;
        };
        let (end, stop) = (base + length, start + found);
        if stop < end {
            return false;
        }
        self.remove(start, found);
        self.insert(start, base - start);
        self.insert(end, stop - end);
        true
    }

    /// Frees a range.
    pub(crate) fn free(&mut self, base: u32, length: u32) {
        if length == 0 {
            return;
        }
        let (mut base, mut length) = (base, length);
        if let Some((&start, &before)) = self.by_base.range(..base).next_back()
            && start + before == base
        {
            self.remove(start, before);
            (base, length) = (start, length + before);
        }
        let end = base + length;
        if let Some(&after) = self.by_base.get(&end) {
            self.remove(end, after);
            length += after;
        }
        self.insert(base, length);
    }

    /// Returns the first index and the length of each free range, in order.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = (u32, u32)> {
        self.by_base.iter().map(|(base, length)| (*base, *length))
    }

    /// Returns the lengths of the two largest free ranges.
    pub(crate) fn largest(&self) -> [usize; 2] {
        let mut lengths = self
            .by_length
            .iter()
            .rev()
            .map(|(length, _)| to_usize(*length));
        [(); 2].map(|()| lengths.next().unwrap_or(0))
    }

    fn insert(&mut self, base: u32, length: u32) {
        if length > 0 {
            self.by_base.insert(base, length);
            self.by_length.insert((length, base));
        }
    }

    fn remove(&mut self, base: u32, length: u32) {
        self.by_base.remove(&base);
        self.by_length.remove(&(length, base));
    }
}

/// Converts an index or a number of map entries to `usize`.
#[expect(clippy::as_conversions, reason = "usize has 32 bits or more")]
pub(crate) const fn to_usize(entries: u32) -> usize {
    entries as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_index_is_not_allocated_again_until_it_is_freed() {
        let mut indices = IndexAllocator::new(3, &BTreeSet::from([1]));

        let mut taken = [indices.allocate(), indices.allocate()];
        taken.sort_unstable();

        assert_eq!(taken, [Some(0), Some(2)]);
        assert_eq!(indices.allocate(), None);
        indices.free(0);
        assert_eq!(indices.allocate(), Some(0));
    }

    #[test]
    fn a_postponed_index_is_allocated_after_all_others() {
        let mut indices = IndexAllocator::new(5, &BTreeSet::from([1]));
        indices.postpone(&BTreeSet::from([0, 1, 3]));

        assert_eq!(indices.free_count(), 4);
        assert_eq!([(); 2].map(|()| indices.allocate()), [Some(2), Some(4)]);
        indices.free_last(2);
        assert_eq!(indices.allocate(), Some(2));
        let mut last = [indices.allocate(), indices.allocate()];
        last.sort_unstable();
        assert_eq!(last, [Some(0), Some(3)]);
        assert_eq!(indices.allocate(), None);
    }

    #[test]
    fn a_range_that_is_partly_in_use_is_not_allocated() {
        let mut ranges = RangeAllocator::new(8);

        assert!(ranges.allocate_at(2, 3));
        assert!(!ranges.allocate_at(4, 2));
        assert!(!ranges.allocate_at(6, 3));
        assert!(ranges.allocate_at(5, 3));
    }

    #[test]
    fn long_and_short_ranges_come_from_opposite_ends() {
        let mut ranges = RangeAllocator::new(1000);

        assert_eq!(ranges.allocate(251), Some(749));
        assert_eq!(ranges.allocate(3), Some(0));
        assert_eq!(ranges.allocate(251), Some(498));
        assert_eq!(ranges.allocate(127), Some(3));
        ranges.free(749, 251);
        assert_eq!(ranges.allocate(251), Some(749));
    }

    proptest! {
        #[test]
        fn allocated_ranges_never_overlap_and_no_entry_is_lost(
            steps in proptest::collection::vec((any::<bool>(), 1..20_u32, any::<prop::sample::Index>()), 1..200),
        ) {
            const LIMIT: u32 = 100;
            let mut ranges = RangeAllocator::new(LIMIT);
            let mut used: Vec<(u32, u32)> = Vec::new();
            for (take, length, which) in steps {
                if take {
                    let Some(base) = ranges.allocate(length) else { continue };
                    prop_assert!(base + length <= LIMIT);
                    prop_assert!(used.iter().all(|(b, l)| base + length <= *b || b + l <= base));
                    used.push((base, length));
                } else if !used.is_empty() {
                    let (base, length) = used.swap_remove(which.index(used.len()));
                    ranges.free(base, length);
                }
            }
            for (base, length) in used {
                ranges.free(base, length);
            }
            prop_assert_eq!(ranges.allocate(LIMIT), Some(0));
        }
    }
}
