//! Moves backend sets to other slots, so that a range of free slots becomes long enough for a new set. A change
//! of many sets can leave enough free slots, but no long range of them.

use std::collections::BTreeSet;

use foldhash::HashMap;
use tunnel_common::{
    reason::Reason,
    service::{Frontend, IndexRange},
};

use super::{
    allocators::RangeAllocator,
    ref_counted_lists::RefCountedLists,
    set_values::slots,
    tracked_maps::{ChangeError, TrackedMaps},
};
use crate::reconcile::map_access::{MapReader, MapWriter};

/// The maximum number of sets that are moved for a new one.
const MAX_MOVED_SETS: usize = 256;

/// The maximum number of windows for which the moves are tried out.
const MAX_TRIED_WINDOWS: usize = 8;

/// A range of slots, either free or used by a set.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    range: IndexRange,
    is_free: bool,
}

/// The moves that make a range of slots free.
#[derive(Debug, Eq, PartialEq)]
struct Moves {
    /// The sets in the range, the longest first.
    sets: Vec<IndexRange>,
    /// The free ranges between the sets.
    gaps: Vec<IndexRange>,
}

impl<M: MapReader + MapWriter> TrackedMaps<M> {
    /// Moves sets of any port, so that the given number of free slots in a row will be free once the retired
    /// entries have been freed. Returns false if that is not possible with few moves.
    pub(super) fn make_room(&mut self, wanted: usize) -> bool {
        let Some(moves) = find_moves(&self.actual.sets, wanted) else {
            return false;
        };
        let mut owners: HashMap<u32, u32> = HashMap::default();
        for frontend in self.actual.frontends.values() {
            let Frontend { cluster, local, .. } = frontend.record;
            owners.insert(cluster.base, frontend.record.service);
            owners.insert(local.base, frontend.record.service);
        }
        let gaps = self.actual.sets.hold(&moves.gaps);
        let mut moved = BTreeSet::new();
        for set in &moves.sets {
            let owner = owners.get(&set.base).copied();
            let result = owner.map(|id| self.move_set(id, *set));
            if let Some(Err(error)) = &result {
                tracing::warn!(%error, "cannot move a backend set to other slots");
            }
            if !matches!(result, Some(Ok(()))) {
                self.actual.sets.release(gaps);
                return false;
            }
            moved.insert(set.base);
        }
        tracing::info!(
            sets = moved.len(),
            slots = wanted,
            "moved backend sets to make room for a longer one"
        );
        self.actual.sets.release_after(moved, gaps);
        true
    }

    /// Writes a copy of a port's set to other slots, and then the port's records that refer to the set.
    fn move_set(&mut self, id: u32, old: IndexRange) -> Result<(), ChangeError> {
        let records = self.actual.records_of(id);
        let records = records.filter(|it| it.cluster == old || it.local == old);
        let records: Vec<Frontend> = records.copied().collect();
        if records.len() > self.actual.free_frontends.free_count() {
            return Err(ChangeError::NoRoom(Reason::FrontendsFull));
        }
        let items = self.actual.sets.items(old).to_vec();
        let room = self.actual.sets.allocate(items.len());
        let new = room.ok_or(ChangeError::NoRoom(Reason::SlotsFragmented))?;
        let copied: Vec<_> = slots(&items).collect();
        if let Err(error) = self.maps.write_slots(new.base, &copied) {
            self.actual.sets.free(new);
            return Err(error.into());
        }
        self.actual.sets.insert(new, items);
        self.actual.sets.copy_recipe(old, new);
        let position = |set: IndexRange| if set == old { new } else { set };
        let mut records = records.into_iter();
        let written = records.try_for_each(|record| {
            self.write_frontend(Frontend {
                cluster: position(record.cluster),
                local: position(record.local),
                ..record
            })
        });
        self.actual.sets.free_unused(new);
        written
    }
}

/// Finds the range of slots that becomes free with the fewest moves of sets to free ranges outside of it.
fn find_moves(sets: &RefCountedLists<u32>, wanted: usize) -> Option<Moves> {
    let wanted = u32::try_from(wanted).ok()?;
    let free = sets.free_ranges();
    let free_ranges = free.free_ranges().map(|(base, len)| Stretch {
        range: IndexRange { base, len },
        is_free: true,
    });
    let used = sets.all().map(|(base, items)| Stretch {
        range: IndexRange {
            base,
            len: u32::try_from(items.len()).unwrap_or(u32::MAX),
        },
        is_free: false,
    });
    let mut stretches: Vec<Stretch> = free_ranges.chain(used).collect();
    stretches.sort_unstable_by_key(|stretch| stretch.range.base);
    let mut windows = windows(&stretches, wanted);
    windows.sort_by_key(|window| {
        let sets = window.iter().filter(|stretch| !stretch.is_free);
        let lengths = sets.map(|stretch| stretch.range.len);
        lengths.fold((0_u32, 0_u32), |(count, slots), len| {
            (count + 1, slots + len)
        })
    });
    let mut windows = windows.into_iter().take(MAX_TRIED_WINDOWS);
    windows.find_map(|window| try_moves(free, window))
}

/// Returns, for each free range, the shortest window of adjacent ranges that begins with it and has the wanted
/// length.
fn windows(stretches: &[Stretch], wanted: u32) -> Vec<&[Stretch]> {
    let starts = (0..stretches.len()).filter(|at| stretches.get(*at).is_some_and(|it| it.is_free));
    starts
        .filter_map(|start| window_at(stretches.get(start..)?, wanted))
        .collect()
}

fn window_at(stretches: &[Stretch], wanted: u32) -> Option<&[Stretch]> {
    let first = stretches.first()?.range.base;
    let mut end = first;
    // A window with more sets than may be moved is of no use.
    for (at, stretch) in stretches.iter().enumerate().take(2 * MAX_MOVED_SETS + 1) {
        // Slots that are neither free nor in a set are still being read.
        if stretch.range.base != end {
            return None;
        }
        end += stretch.range.len;
        if end - first >= wanted {
            return stretches.get(..=at);
        }
    }
    None
}

/// Returns the moves that make a window free, if each set in it fits into a free range outside of it.
fn try_moves(free: &RangeAllocator, window: &[Stretch]) -> Option<Moves> {
    let of_kind = |is_free: bool| {
        let stretches = window.iter().filter(move |it| it.is_free == is_free);
        stretches.map(|stretch| stretch.range).collect::<Vec<_>>()
    };
    let (mut sets, gaps) = (of_kind(false), of_kind(true));
    sets.sort_by_key(|set| std::cmp::Reverse(set.len));
    if sets.is_empty() || sets.len() > MAX_MOVED_SETS {
        return None;
    }
    let mut free = free.clone();
    for gap in &gaps {
        free.allocate_at(gap.base, gap.len);
    }
    let fits = sets.iter().all(|set| free.allocate(set.len).is_some());
    fits.then_some(Moves { sets, gaps })
}
