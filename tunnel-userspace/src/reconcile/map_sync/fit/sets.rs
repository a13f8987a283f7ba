//! Selects the layout of the backend sets, and their members if the slots don't suffice for all of them.

use tunnel_common::{
    reason::Reason,
    service::{Algorithm, IndexRange, Membership},
    table::MapSize,
};

use super::{EntryCounts, Fit, Limit, Room, Shortage, WaitsForEntries};
use crate::{
    plan::SlotLayout,
    reconcile::map_sync::{
        allocators::to_usize,
        fitted_plan::{FittedBackend, FittedSet, find_existing, members, weighted_members},
    },
};

const SETS: [Membership; 2] = [Membership::CLUSTER, Membership::LOCAL];

/// Sets that may be programmed, and the slots that they need.
struct Candidate {
    sets: [FittedSet; 2],
    /// The number of slots of each set that must be written.
    new: Vec<usize>,
    /// The number of slots in the sets that are already in the maps.
    kept: usize,
    has_new_table: bool,
}

impl Candidate {
    fn new_slots(&self) -> usize {
        self.new.iter().sum()
    }
}

impl Fit<'_> {
    /// Selects the sets to program. If a set's table has no room, the set becomes plain, with one slot for
    /// each member. If a plain set has no room either, as many members as possible stay in the set.
    pub(super) fn fit_sets(
        &self,
        algorithm: Algorithm,
        backends: &mut Vec<FittedBackend>,
    ) -> Result<([FittedSet; 2], Option<Shortage>), WaitsForEntries> {
        let required = self.candidate(Some(algorithm), backends);
        let Err(mut limit) = self.check(&required) else {
            return Ok((required.sets, None));
        };
        self.wait_for_range(limit, &required)?;
        if required.has_new_table {
            let plain = self.candidate(None, backends);
            match self.check(&plain) {
                Ok(()) => {
                    let shortage = Shortage {
                        reason: Reason::SlotsReduced,
                        size: MapSize::Slots,
                        limit,
                    };
                    return Ok((plain.sets, Some(shortage)));
                }
                Err(of_plain) => {
                    self.wait_for_range(of_plain, &plain)?;
                    limit = of_plain;
                }
            }
        }
        self.truncate(self.room(MapSize::Slots, 0), backends);
        let truncated = self.candidate(None, backends);
        if let Err(of_truncated) = self.check(&truncated) {
            self.wait_for_range(of_truncated, &truncated)?;
            self.truncate_to(backends, [0, 0]);
        }
        let sets = self.candidate(None, backends).sets;
        let reason = match limit {
            Limit::Share(_) => Reason::NamespaceShareExceeded,
            Limit::LongestRange(_) => Reason::SlotsFragmented,
            Limit::Size | Limit::ServiceTables(_) | Limit::Indices => Reason::SlotsFull,
        };
        let shortage = Shortage {
            reason,
            size: MapSize::Slots,
            limit,
        };
        Ok((sets, Some(shortage)))
    }

    /// Returns an error if sets don't fit only because no range of free slots is long enough, and either sets of
    /// other ports may be moved, or entries will be freed.
    fn wait_for_range(&self, limit: Limit, candidate: &Candidate) -> Result<(), WaitsForEntries> {
        let will_be_freed = self.is_waiting && !self.has_waited;
        if !matches!(limit, Limit::LongestRange(_)) || !self.may_move && !will_be_freed {
            return Ok(());
        }
        let range = self.may_move.then(|| candidate.new_slots());
        Err(WaitsForEntries { range })
    }

    /// Returns the sets of the given backends, with the layouts that the algorithm requires, or with plain
    /// layouts if there is none.
    fn candidate(&self, algorithm: Option<Algorithm>, backends: &[FittedBackend]) -> Candidate {
        let mut candidate = Candidate {
            sets: [FittedSet::Empty; 2],
            new: Vec::new(),
            kept: 0,
            has_new_table: false,
        };
        let mut kept: Option<IndexRange> = None;
        for (set, fitted) in SETS.into_iter().zip(&mut candidate.sets) {
            let members = weighted_members(backends, set);
            if members.is_empty() {
                continue;
            }
            let layout = algorithm.map_or(SlotLayout::Plain, |algorithm| {
                SlotLayout::required(algorithm, &members)
            });
            *fitted = match find_existing(self.actual, self.id, backends, set, layout) {
                Some(range) => {
                    if kept.replace(range) != Some(range) {
                        candidate.kept += to_usize(range.len);
                    }
                    FittedSet::Existing(range)
                }
                None => {
                    candidate.has_new_table |= layout != SlotLayout::Plain;
                    candidate.new.push(layout.slot_count(&members));
                    FittedSet::New(layout)
                }
            };
        }
        let [cluster, local] = SETS.map(|set| members(backends, set));
        if let [FittedSet::New(one), FittedSet::New(other)] = candidate.sets
            && one == other
            && cluster.eq(local)
        {
            candidate.sets = [FittedSet::New(one), FittedSet::SameAsCluster];
            candidate.new.truncate(1);
        }
        candidate
    }

    /// Checks that there is room for the slots of sets. Returns the limit that leaves no room for them.
    fn check(&self, candidate: &Candidate) -> Result<(), Limit> {
        let new = candidate.new_slots();
        if new == 0 {
            return Ok(());
        }
        let room = self.room(MapSize::Slots, candidate.kept);
        if new > room.allowed() {
            return Err(room.limit());
        }
        if candidate.has_new_table {
            self.check_tables(room, new)?;
        }
        let largest = self.actual.sets.largest_free();
        if fit_into(&candidate.new, largest) {
            Ok(())
        } else {
            let [longest, _] = largest;
            Err(Limit::LongestRange(longest))
        }
    }

    /// Checks that the Service may have the tables. Its slots may not exceed the configured part of its
    /// namespace's limit, so that plain sets of other Services in the namespace find room.
    fn check_tables(&self, room: Room, new: usize) -> Result<(), Limit> {
        let Some(share) = room.share else {
            return Ok(());
        };
        let others = self.service.slots.saturating_sub(room.released);
        let limit = self.actual.shares.part_of(share.limit);
        let limit = limit.max(EntryCounts::GUARANTEED.of(MapSize::Slots));
        if new <= room.released || others + new <= limit {
            Ok(())
        } else {
            Err(Limit::ServiceTables(limit))
        }
    }

    /// Leaves out members of the sets until the slots fit.
    fn truncate(&self, room: Room, backends: &mut Vec<FittedBackend>) {
        let [cluster, local] = SETS.map(|set| members(backends, set).count());
        let is_shared = members(backends, SETS[0]).eq(members(backends, SETS[1]));
        let slots = room.allowed();
        let [largest, second] = self.actual.sets.largest_free();
        let lengths = if is_shared {
            [slots.min(largest); 2]
        } else {
            let of_local = local.min((slots / 2).max(slots.saturating_sub(cluster)));
            let of_cluster = cluster.min(slots - of_local).min(largest);
            [of_cluster, of_local.min((largest - of_cluster).max(second))]
        };
        self.truncate_to(backends, lengths);
    }

    /// Reduces the sets to the given numbers of members. Members that are already in the set in the maps come
    /// first, then those that are in the maps. New backends that end up in no set are left out.
    fn truncate_to(&self, backends: &mut Vec<FittedBackend>, lengths: [usize; 2]) {
        for (set, length) in SETS.into_iter().zip(lengths) {
            let rank = |backend: &FittedBackend| {
                let status = backend.index.map(|index| self.actual.backend_status(index));
                let is_member = status.is_some_and(|status| status.membership.includes(set));
                (!is_member, backend.index.is_none())
            };
            let mut positions: Vec<usize> = (0..backends.len()).collect();
            positions.retain(|at| backends.get(*at).is_some_and(|it| it.sets.includes(set)));
            positions.sort_by_key(|at| backends.get(*at).map(rank));
            for position in positions.into_iter().skip(length) {
                if let Some(backend) = backends.get_mut(position) {
                    backend.sets = without(backend.sets, set);
                }
            }
        }
        backends.retain(|it| it.index.is_some() || it.sets != Membership::NONE);
    }
}

/// Returns true if ranges of the given lengths fit into the two largest free ranges.
fn fit_into(lengths: &[usize], [largest, second]: [usize; 2]) -> bool {
    match lengths {
        [] => true,
        [one] => *one <= largest,
        [one, other, ..] => {
            let (long, short) = (one.max(other), one.min(other));
            *long <= largest && (*short <= largest - long || *short <= second)
        }
    }
}

fn without(sets: Membership, set: Membership) -> Membership {
    let others = SETS.into_iter().filter(|other| !other.equals(set));
    let kept = others.map(|other| sets.intersection(other));
    kept.fold(Membership::NONE, Membership::union)
}
