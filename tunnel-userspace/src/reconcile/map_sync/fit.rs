//! Fits a plan into the room that the maps have for a service port, before anything is computed or written.
//! If the room does not suffice, as many endpoints as possible are programmed. Entries that are already in the
//! maps stay there, and an endpoint that has left the EndpointSlices is replaced only once another one can be
//! written. Does no I/O.

mod backends;
mod sets;

use std::{borrow::Cow, collections::BTreeSet};

use litemap::LiteMap;
use tunnel_common::{
    reason::Reason,
    service::{FrontendKey, Membership},
    table::MapSize,
};

use super::{
    actual::ActualContent,
    allocators::to_usize,
    fitted_plan::{FittedBackend, FittedPlan, FittedSet},
    namespace_shares::{EntryCounts, ShareOfMap},
};
use crate::{
    model::TrafficPolicy,
    plan::{FrontendPlan, PortName, PortPlan},
};

/// The id of a port that has none yet, since none of its entries are in the maps.
pub(super) const NO_ID: u32 = u32::MAX;

/// The error that the entries don't fit now, but will once retired entries are freed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct WaitsForEntries {
    /// The number of free slots in a row that are lacking, although enough slots are free. Other sets must be
    /// moved first.
    pub(super) range: Option<usize>,
}

/// The port whose plan is fitted, and the room that its Service has.
pub(super) struct Fit<'a> {
    pub(super) actual: &'a ActualContent,
    /// The port's id, or [`NO_ID`].
    pub(super) id: u32,
    /// The namespace that counts the entries, or `None` for the daemon's own probe, which uses the entries that
    /// the maps have beyond their configured sizes.
    pub(super) namespace: Option<&'a str>,
    pub(super) service: ServiceRoom,
    /// The port's frontends that may be removed before new ones are written, because no port has them any more.
    pub(super) abandoned: &'a [FrontendKey],
    /// The entries that will be removed at the end of this sync.
    pub(super) leaving: EntryCounts,
    /// True if retired entries will be freed after a grace period.
    pub(super) is_waiting: bool,
    /// True if the Service has already waited for entries that its namespace replaced.
    pub(super) has_waited: bool,
    /// True if sets of other ports may be moved to make room.
    pub(super) may_move: bool,
}

/// The room that a Service has because some of its ports release entries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServiceRoom {
    /// The entries that the Service may add without using more of its namespace's share than before.
    credit: EntryCounts,
    /// The number of slots that all of the Service's ports use.
    pub(super) slots: usize,
}

impl ServiceRoom {
    /// Adds the entries of a port that is removed at the end of this sync.
    pub(super) const fn add_leaving(&mut self, counts: EntryCounts) {
        self.credit.add(counts);
    }

    /// Records that a port has been written.
    pub(super) const fn record_write(&mut self, before: EntryCounts, after: EntryCounts) {
        self.credit.add(before);
        self.credit.subtract(after);
        self.slots = (self.slots + after.slots).saturating_sub(before.slots);
    }
}

/// The limit that keeps entries out of a map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Limit {
    /// The configured size of the map.
    Size,
    /// The namespace's share of the map.
    Share(ShareOfMap),
    /// The number of slots that the tables and weighted sets of one Service may use.
    ServiceTables(usize),
    /// The length of the longest range of free slots, which is shorter than the set needs.
    LongestRange(usize),
    /// The indices of removed backends that have open connections.
    Indices,
}

/// The reason why a port is not programmed completely.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Shortage {
    pub(super) reason: Reason,
    pub(super) size: MapSize,
    pub(super) limit: Limit,
}

/// A fitted plan.
#[derive(Debug)]
pub(super) struct Fitted<'a> {
    /// The entries to write, or `None` if there is no room for a new port.
    pub(super) plan: Option<FittedPlan<'a>>,
    pub(super) shortage: Option<Shortage>,
}

impl Fitted<'_> {
    /// Returns true if free backend indices would provide room.
    pub(super) fn lacks_indices(&self) -> bool {
        self.shortage
            .is_some_and(|shortage| shortage.limit == Limit::Indices)
    }

    /// Describes a shortage for operators: the map that is full, the endpoints that are programmed, and what
    /// uses the entries.
    pub(super) fn describe(
        &self,
        shortage: &Shortage,
        plan: &PortPlan,
        name: &PortName,
        actual: &ActualContent,
    ) -> String {
        let key = shortage.size.key();
        let mut text = shortage.reason.meaning().to_owned();
        let (namespace, percent) = (&name.service.namespace, actual.shares.percent());
        match shortage.limit {
            Limit::Share(ShareOfMap { used, limit, .. }) => text.push_str(&format!(
                ": namespace {namespace} uses {used} of at most {limit} entries of bpf.maps.{key} \
                 (service.namespaceShare: {percent})"
            )),
            Limit::ServiceTables(limit) => text.push_str(&format!(
                ": a Service with Maglev tables or weights may use at most {limit} entries of bpf.maps.{key}, \
                 {percent} % of the limit of namespace {namespace} (service.namespaceShare)"
            )),
            Limit::LongestRange(longest) => text.push_str(&format!(
                ": the longest range of free entries of bpf.maps.{key} has {longest} entries"
            )),
            Limit::Size if shortage.reason == Reason::SlotsReduced => {
                text.push_str(&format!(": bpf.maps.{key} is used up"));
            }
            Limit::Size | Limit::Indices => {}
        }
        let used = plan.used_sets();
        let wanted = plan.endpoints.iter();
        let wanted = wanted.filter(|it| it.sets.intersection(used) != Membership::NONE);
        let (programmed, wanted) = (self.programmed_endpoints(plan), wanted.count());
        text.push_str(&format!(
            "; {programmed} of {wanted} endpoints are programmed"
        ));
        let draining = actual.draining.len();
        if shortage.size == MapSize::Backends && draining > 0 {
            text.push_str(&format!(
                "; open connections still use the indices of {draining} removed backends"
            ));
            if let Some((namespace, count)) = actual.shares.most_draining() {
                text.push_str(&format!(", of which {count} were of namespace {namespace}"));
            }
        }
        text
    }

    /// Returns how many of a plan's endpoints are programmed for new connections.
    fn programmed_endpoints(&self, plan: &PortPlan) -> usize {
        let Some(fitted) = &self.plan else {
            return 0;
        };
        let endpoints = plan.endpoints.iter();
        let programmed = endpoints.filter(|endpoint| {
            let backend = fitted.backend(&endpoint.target);
            backend.is_some_and(|backend| backend.sets != Membership::NONE)
        });
        programmed.count()
    }
}

/// The number of entries that a port may add to a map.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// The limit that results from the map's configured size.
    by_size: usize,
    /// The limit that results from the namespace's share.
    by_share: usize,
    /// The entries that the change releases, so that this many may be added in any case.
    released: usize,
    share: Option<ShareOfMap>,
    /// The value of `by_share` once the maps show that the namespace's replaced backends have no open
    /// connections.
    by_share_later: usize,
}

impl Room {
    fn allowed(self) -> usize {
        self.by_size.min(self.by_share)
    }

    /// Returns the limit that decides how many entries are allowed.
    fn limit(self) -> Limit {
        let share = self.share.filter(|_| self.by_share < self.by_size);
        share.map_or(Limit::Size, Limit::Share)
    }

    /// Returns the shortage of a map that has less room than needed.
    fn shortage(self, size: MapSize, full: Reason) -> Shortage {
        let limit = self.limit();
        let reason = if matches!(limit, Limit::Share(_)) {
            Reason::NamespaceShareExceeded
        } else {
            full
        };
        Shortage {
            reason,
            size,
            limit,
        }
    }
}

impl Fit<'_> {
    /// Fits a plan into the maps.
    pub(super) fn fit<'p>(&self, plan: Cow<'p, PortPlan>) -> Result<Fitted<'p>, WaitsForEntries> {
        let (frontends, mut shortage) = self.fit_frontends(&plan);
        let is_programmed = self.actual.ports.contains_key(&self.id);
        let lacks_frontends = frontends.as_ref().unwrap_or(&plan.frontends).is_empty();
        if lacks_frontends {
            // Backends without a frontend would be of no use.
            let plan = is_programmed.then(FittedPlan::empty);
            return Ok(Fitted { plan, shortage });
        }
        let used_sets = plan.used_sets();
        let sets = [Membership::CLUSTER, Membership::LOCAL].into_iter();
        let mut used = sets.filter(|set| used_sets.includes(*set));
        let wants_endpoints = used.any(|set| plan.endpoints.has_any_in(set));
        let (mut backends, lacking) = self.fit_backends(&plan, used_sets)?;
        shortage = shortage.or(lacking);
        let is_refused = |backends: &[FittedBackend]| {
            let mut backends = backends.iter();
            wants_endpoints && !is_programmed && backends.all(|it| it.sets == Membership::NONE)
        };
        if is_refused(&backends) {
            let plan = None;
            return Ok(Fitted { plan, shortage });
        }
        let (mut sets, lacking) = self.fit_sets(plan.algorithm, &mut backends)?;
        shortage = shortage.or(lacking);
        if is_refused(&backends) {
            let plan = None;
            return Ok(Fitted { plan, shortage });
        }
        self.keep_old_members(&plan, used_sets, &mut backends, &mut sets);
        let [cluster, local] = sets;
        Ok(Fitted {
            plan: Some(FittedPlan {
                plan,
                fitting_frontends: frontends,
                abandoned: self.abandoned.to_vec(),
                backends,
                cluster,
                local,
            }),
            shortage,
        })
    }

    /// Selects the frontends to program: those that are in the maps, and as many others as there is room for,
    /// the most important kinds of addresses first. Returns `None` if there is room for all of them.
    fn fit_frontends(
        &self,
        plan: &PortPlan,
    ) -> (Option<LiteMap<FrontendKey, FrontendPlan>>, Option<Shortage>) {
        let is_new = |key: &FrontendKey| !self.actual.frontends.contains_key(key);
        let new = plan.frontends.keys().filter(|key| is_new(key)).count();
        if new == 0 {
            return (None, None);
        }
        let room = self.room(MapSize::Frontends, plan.frontends.len() - new);
        if new <= room.allowed() {
            return (None, None);
        }
        let new = plan.frontends.iter().filter(|(key, _)| is_new(key));
        let mut new: Vec<_> = new.map(|(key, frontend)| (frontend.kind, *key)).collect();
        new.sort_unstable();
        let left_out = new.into_iter().skip(room.allowed());
        let left_out: BTreeSet<_> = left_out.map(|(_, key)| key).collect();
        let mut frontends = plan.frontends.clone();
        frontends.retain(|key, _| !left_out.contains(key));
        let shortage = room.shortage(MapSize::Frontends, Reason::FrontendsFull);
        (Some(frontends), Some(shortage))
    }

    /// Returns how many entries the port may add to a map, given how many of its entries stay.
    fn room(&self, size: MapSize, kept: usize) -> Room {
        let (actual, capacity) = (self.actual, self.actual.sizes.of(size));
        let counted = actual.counts_of(self.id).of(size);
        let given_up = counted.saturating_sub(kept);
        let released = given_up + self.service.credit.of(size);
        let freed = given_up + self.leaving.of(size);
        let (used, freed) = match size {
            // The map has no spare entries, and entries are deleted from it last, except those that no port
            // has any more.
            MapSize::Frontends => (actual.frontends.len(), self.abandoned.len()),
            MapSize::Slots => (to_usize(actual.sets.used), freed),
            MapSize::Backends => (to_usize(actual.used_backends), freed),
            MapSize::SourceRanges
            | MapSize::Steering
            | MapSize::Affinity
            | MapSize::SharedTranslations
            | MapSize::Flows
            | MapSize::Fragments => (0, 0),
        };
        let Some(namespace) = self.namespace else {
            return Room {
                by_size: usize::MAX,
                by_share: usize::MAX,
                released,
                share: None,
                by_share_later: usize::MAX,
            };
        };
        // Entries that the Service has not replaced yet are its credit.
        let credit = self.service.credit.of(size);
        let share = actual.share_of(namespace, size).map(|share| ShareOfMap {
            pending: share.pending.saturating_sub(credit),
            ..share
        });
        let room_in = |share: ShareOfMap| {
            let replaceable = if size == MapSize::Backends {
                released.min(actual.shares.replaceable_backends(share, capacity))
            } else {
                released
            };
            share.limit.saturating_sub(share.used) + replaceable
        };
        let later = share.map(ShareOfMap::without_pending);
        Room {
            by_size: (to_usize(capacity) + freed).saturating_sub(used),
            by_share: share.map_or(usize::MAX, room_in),
            released,
            share,
            by_share_later: later.map_or(usize::MAX, room_in),
        }
    }

    /// Returns an error if the port has too little room only because it is not known yet whether backends that
    /// its namespace has replaced have open connections. A Service waits for this only once, unless the
    /// namespace has replaced backends during this sync.
    fn wait_for_replaced(&self, room: Room, new: usize) -> Result<(), WaitsForEntries> {
        let wanted = new.min(room.by_size);
        let is_short = room.by_share < wanted && room.by_share < room.by_share_later;
        let Some(namespace) = self.namespace.filter(|_| is_short) else {
            return Ok(());
        };
        if self.actual.shares.has_leaving(namespace) || self.is_waiting && !self.has_waited {
            return Err(WaitsForEntries::default());
        }
        Ok(())
    }

    /// Keeps the present members of each set for which no other member can be programmed.
    fn keep_old_members(
        &self,
        plan: &PortPlan,
        used_sets: Membership,
        backends: &mut Vec<FittedBackend>,
        sets: &mut [FittedSet; 2],
    ) {
        let policies = [
            (TrafficPolicy::Cluster, Membership::CLUSTER),
            (TrafficPolicy::Local, Membership::LOCAL),
        ];
        for ((policy, set), fitted) in policies.into_iter().zip(sets) {
            let is_wanted = used_sets.includes(set) && plan.endpoints.has_any_in(set);
            if !is_wanted || *fitted != FittedSet::Empty {
                continue;
            }
            let mut records = self.actual.records_of(self.id);
            let old = records.find_map(|record| {
                let range = match policy {
                    TrafficPolicy::Cluster => record.cluster,
                    TrafficPolicy::Local => record.local,
                };
                (range.len > 0).then_some(range)
            });
            let Some(old) = old else { continue };
            let members: BTreeSet<u32> = self.actual.sets.items(old).iter().copied().collect();
            let known = self.actual.ports.get(&self.id).into_iter();
            let known = known.flat_map(|port| &port.backends);
            for (target, index) in known.filter(|(_, index)| members.contains(index)) {
                let position = backends.binary_search_by_key(target, |backend| backend.target);
                let kept = FittedBackend {
                    target: *target,
                    weight: 1,
                    sets: set,
                    index: Some(*index),
                };
                match position.map(|position| backends.get_mut(position)) {
                    Ok(backend) => {
                        backend
                            .into_iter()
                            .for_each(|it| it.sets = it.sets.union(set));
                    }
                    Err(position) => backends.insert(position, kept),
                }
            }
            *fitted = FittedSet::Existing(old);
        }
    }
}
