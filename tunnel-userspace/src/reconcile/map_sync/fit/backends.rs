//! Selects the endpoints to program.

use tunnel_common::{reason::Reason, service::Membership, table::MapSize};

use super::{Fit, Limit, Room, Shortage, WaitsForEntries};
use crate::{plan::PortPlan, reconcile::map_sync::fitted_plan::FittedBackend};

/// The numbers of endpoints that are added to the maps, and of those that make room for them.
struct Selection {
    /// The number of new endpoints in a set.
    in_sets: usize,
    /// The number of new endpoints in no set, which serve only open connections.
    in_no_set: usize,
    /// The number of endpoints that are in the maps, serve only open connections, and are removed.
    removed: usize,
}

impl Fit<'_> {
    /// Selects the endpoints to program: all if there is room, otherwise as many as possible. Endpoints that
    /// are in the maps and in a set come first, then new ones in a set, then those that serve only open
    /// connections.
    pub(super) fn fit_backends(
        &self,
        plan: &PortPlan,
        used_sets: Membership,
    ) -> Result<(Vec<FittedBackend>, Option<Shortage>), WaitsForEntries> {
        let is_programmed = self.actual.ports.contains_key(&self.id);
        let is_new = !is_programmed && !plan.endpoints.is_empty();
        let room_if_new = is_new.then(|| self.room(MapSize::Backends, 0));
        if let Some(room) = room_if_new {
            self.wait_for_replaced(room, plan.endpoints.len())?;
        }
        // A port that is refused costs no memory, however many endpoints it has.
        if let Some(room) = room_if_new.filter(|room| room.allowed() == 0) {
            let shortage = room.shortage(MapSize::Backends, Reason::BackendsFull);
            return Ok((Vec::new(), Some(shortage)));
        }
        let known = self.actual.ports.get(&self.id);
        let endpoints = plan.endpoints.iter().map(|endpoint| FittedBackend {
            target: endpoint.target,
            weight: endpoint.weight,
            sets: endpoint.sets.intersection(used_sets),
            index: known.and_then(|port| port.backends.get(&endpoint.target).copied()),
        });
        let mut backends: Vec<_> = endpoints.collect();
        let new = backends.iter().filter(|it| it.index.is_none()).count();
        if new == 0 {
            return Ok((backends, None));
        }
        let free = self.actual.free_backends.free_count();
        let kept = backends.len() - new;
        let room = room_if_new.unwrap_or_else(|| self.room(MapSize::Backends, kept));
        if new <= room.allowed().min(free) {
            return Ok((backends, None));
        }
        self.wait_for_replaced(room, new)?;
        let selection = self.select(&backends, room, free)?;
        let mut shortage = room.shortage(MapSize::Backends, Reason::BackendsFull);
        if free < room.allowed() {
            shortage = Shortage {
                reason: Reason::BackendsFull,
                limit: Limit::Indices,
                ..shortage
            };
        }
        retain_selected(&mut backends, &selection);
        Ok((backends, Some(shortage)))
    }

    fn select(
        &self,
        backends: &[FittedBackend],
        room: Room,
        free: usize,
    ) -> Result<Selection, WaitsForEntries> {
        let count = |is_new: bool, is_in_set: bool| {
            let all = backends.iter();
            all.filter(|it| {
                it.index.is_none() == is_new && (it.sets != Membership::NONE) == is_in_set
            })
            .count()
        };
        let allowed = room.allowed();
        let mut in_sets = count(true, true).min(allowed + count(false, false));
        let mut in_no_set = count(true, false).min(allowed.saturating_sub(in_sets));
        if in_sets + in_no_set > free {
            if self.is_waiting {
                return Err(WaitsForEntries::default());
            }
            in_sets = in_sets.min(free);
            in_no_set = in_no_set.min(free - in_sets);
        }
        Ok(Selection {
            in_sets,
            in_no_set,
            removed: in_sets.saturating_sub(allowed),
        })
    }
}

fn retain_selected(backends: &mut Vec<FittedBackend>, selection: &Selection) {
    // First, select a member for each set that has none in the maps.
    let known = backends.iter().filter(|it| it.index.is_some());
    let mut covered = known.fold(Membership::NONE, |sets, it| sets.union(it.sets));
    let (mut first, mut others) = (Vec::new(), Vec::new());
    let new = backends.iter().filter(|it| it.index.is_none());
    for backend in new.filter(|it| it.sets != Membership::NONE) {
        let with_this = covered.union(backend.sets);
        if with_this == covered {
            others.push(backend.target);
        } else {
            first.push(backend.target);
            covered = with_this;
        }
    }
    first.append(&mut others);
    first.truncate(selection.in_sets);
    first.sort_unstable();
    let (mut in_no_set, mut removed) = (selection.in_no_set, selection.removed);
    let take_one = |count: &mut usize| {
        let is_left = *count > 0;
        *count = count.saturating_sub(1);
        is_left
    };
    backends.retain(|backend| {
        let is_in_set = backend.sets != Membership::NONE;
        match (backend.index, is_in_set) {
            (Some(_), true) => true,
            (Some(_), false) => !take_one(&mut removed),
            (None, true) => first.binary_search(&backend.target).is_ok(),
            (None, false) => take_one(&mut in_no_set),
        }
    });
}
