//! Computes the difference between the contents of the maps and the plan for one service port. Does no I/O.

use std::collections::BTreeMap;

use tunnel_common::{
    reason::Reason,
    select::MAX_SOURCE_RANGES,
    service::{
        Frontend, FrontendKey, IndexRange, InlineBackend, MAX_INLINE_BACKENDS, Membership,
        SourceRange,
    },
};

use super::{actual::ActualContent, allocators::to_usize, set_values::inline_backends};
use crate::{
    model::TrafficPolicy,
    plan::{BackendTarget, FrontendPlan, PortPlan},
};

/// The reason why a plan doesn't fit into the maps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Shortage {
    /// The reason to report, which says which map is full.
    pub(crate) reason: Reason,
    /// True if there will be room once retired entries are freed, or false if the map's configured size is
    /// too small.
    pub(crate) is_temporary: bool,
}

/// The changes that bring one service port's entries into line with its plan.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct PortDiff {
    pub(crate) id: u32,
    pub(crate) new_backends: Vec<(BackendTarget, Membership)>,
    /// The indices of backends whose set membership changes, each with the new membership.
    pub(crate) set_changes: Vec<(u32, Membership)>,
    /// The set for traffic policy `Cluster` if it is already in the maps, or `None` if its slots must be
    /// written.
    pub(crate) cluster_set: Option<IndexRange>,
    /// The set for traffic policy `Local` if it is already in the maps, or `None` if its slots must be
    /// written.
    pub(crate) local_set: Option<IndexRange>,
    /// Frontends that are new or whose record changes.
    pub(crate) upserts: Vec<(FrontendKey, FrontendPlan)>,
    pub(crate) deletes: Vec<FrontendKey>,
    /// Source ranges that must be written.
    pub(crate) new_source_ranges: Vec<SourceRange>,
    /// Backends that are no longer planned.
    pub(crate) removed_backends: Vec<(BackendTarget, u32)>,
}

impl PortDiff {
    /// Compares the entries that have a service port's id with the port's plan.
    pub(crate) fn between(actual: &ActualContent, id: u32, plan: &PortPlan) -> Self {
        let cluster = existing_set(actual, id, &plan.cluster, |frontend| frontend.cluster);
        let local = existing_set(actual, id, &plan.local, |frontend| frontend.local);
        let is_right = |(key, frontend): &(&FrontendKey, &FrontendPlan)| {
            let known = actual.frontends.get(*key).zip(cluster.zip(local));
            known.is_some_and(|(known, sets)| {
                known.record == frontend_record(actual, (**key, frontend), id, plan, sets)
            })
        };
        let upserts = plan.frontends.iter().filter(|frontend| !is_right(frontend));
        let upserts = upserts.map(|(key, frontend)| (*key, *frontend)).collect();
        let wanted = memberships(plan);
        let (mut new_backends, mut set_changes) = (Vec::new(), Vec::new());
        for (target, sets) in &wanted {
            match actual.backend(id, target) {
                None => new_backends.push((**target, *sets)),
                Some(index) if actual.backend_status(index).membership != *sets => {
                    set_changes.push((index, *sets))
                }
                Some(_) => {}
            }
        }
        let used_ranges = plan.used_source_ranges();
        let new_source_ranges = match actual.source_ranges.find_shared(used_ranges) {
            Some(_) => Vec::new(),
            None => used_ranges.to_vec(),
        };
        let port = actual.ports.get(&id);
        let deletes = port
            .into_iter()
            .flat_map(|port| port.frontends.keys())
            .filter(|key| !plan.frontends.contains_key(key))
            .copied()
            .collect();
        let removed_backends = port
            .into_iter()
            .flat_map(|port| &port.backends)
            .filter(|(target, _)| !wanted.contains_key(target))
            .map(|(target, index)| (*target, *index))
            .collect();
        Self {
            id,
            new_backends,
            set_changes,
            cluster_set: cluster,
            local_set: local,
            upserts,
            deletes,
            new_source_ranges,
            removed_backends,
        }
    }

    /// Checks that the maps have room for the changes, first against their configured sizes and then against
    /// their free entries. The maps have more entries than configured, but only so that old and new entries
    /// can coexist until the old ones are freed.
    pub(crate) fn check_room(
        &self,
        actual: &ActualContent,
        plan: &PortPlan,
    ) -> Result<(), Shortage> {
        let full = |reason, is_temporary| {
            Err(Shortage {
                reason,
                is_temporary,
            })
        };
        let sizes = actual.sizes;
        let exceeds = |new: usize, used: u32, removed: usize, size: u32| {
            new > 0 && to_usize(used) + new - removed > to_usize(size)
        };
        let is_new = |(key, _): &&(FrontendKey, FrontendPlan)| !actual.frontends.contains_key(key);
        let new_keys = self.upserts.iter().filter(is_new).count();
        if new_keys > 0 && actual.frontends.len() + new_keys > to_usize(sizes.frontends) {
            return full(Reason::FrontendsFull, false);
        }
        let (new, removed) = (self.new_backends.len(), self.removed_backends.len());
        if exceeds(new, actual.used_backends, removed, sizes.backends) {
            return full(Reason::BackendsFull, false);
        }
        let new = self.new_slots(plan);
        if exceeds(
            new,
            actual.sets.used,
            self.retired_slots(actual),
            sizes.slots,
        ) {
            return full(Reason::SlotsFull, false);
        }
        let of_records = actual
            .records_of(self.id)
            .map(|record| record.source_ranges);
        let (new, removed) = (
            self.new_source_ranges.len(),
            actual.source_ranges.unused_without(of_records),
        );
        if new > to_usize(MAX_SOURCE_RANGES)
            || exceeds(new, actual.source_ranges.used, removed, sizes.source_ranges)
        {
            return full(Reason::SourceRangesFull, false);
        }
        if self.upserts.len() > actual.free_frontends.free_count() {
            return full(Reason::FrontendsFull, true);
        }
        if self.new_backends.len() > actual.free_backends.free_count() {
            return full(Reason::BackendsFull, true);
        }
        Ok(())
    }

    /// Returns how many slots must be written.
    fn new_slots(&self, plan: &PortPlan) -> usize {
        let sets = [
            (self.cluster_set, &plan.cluster),
            (self.local_set, &plan.local),
        ];
        let new = sets.iter().filter(|(existing, _)| existing.is_none());
        new.map(|(_, targets)| targets.len()).sum()
    }

    /// Returns how many slots will no longer be in use after the changes.
    fn retired_slots(&self, actual: &ActualContent) -> usize {
        let (cluster, local) = (self.cluster_set.is_none(), self.local_set.is_none());
        let of_records = actual.records_of(self.id).flat_map(|record| {
            let cluster = cluster.then_some(record.cluster);
            cluster.into_iter().chain(local.then_some(record.local))
        });
        actual.sets.unused_without(of_records)
    }
}

/// Returns a plan's backends, each with its set membership.
fn memberships(plan: &PortPlan) -> BTreeMap<&BackendTarget, Membership> {
    let only_serving = plan.serving.iter().map(|target| (target, Membership::NONE));
    let mut all: BTreeMap<_, _> = only_serving.collect();
    let sets = [
        (&plan.cluster, Membership::CLUSTER),
        (&plan.local, Membership::LOCAL),
    ];
    for (targets, set) in sets {
        for target in targets {
            let known = all.entry(target).or_default();
            *known = known.union(set);
        }
    }
    all
}

/// A placeholder for source ranges that have not been written yet. It differs from every real range.
const UNWRITTEN: IndexRange = IndexRange {
    base: u32::MAX,
    len: u32::MAX,
};

/// Returns a frontend's record. If its backends and sets have not all been written yet, the record differs
/// from the final one.
pub(crate) fn frontend_record(
    actual: &ActualContent,
    (key, frontend): (FrontendKey, &FrontendPlan),
    id: u32,
    plan: &PortPlan,
    (cluster, local): (IndexRange, IndexRange),
) -> Frontend {
    let [sockets, packets] = [frontend.socket_policy, frontend.packet_policy]
        .map(|policy| policy == TrafficPolicy::Local);
    let of_sockets = if sockets { &plan.local } else { &plan.cluster };
    let skips_sockets = plan.socket_translation_disabled || frontend.has_listener;
    let is_restricted = plan.is_restricted(frontend);
    let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
    let admits_host = is_restricted.then_some(frontend.admits_host);
    let flags = flag(sockets, Frontend::SOCKETS_LOCAL)
        | flag(packets, Frontend::PACKETS_LOCAL)
        | flag(plan.has_endpoints, Frontend::HAS_ENDPOINTS)
        | flag(skips_sockets, Frontend::NOT_SOCKETS)
        | flag(admits_host == Some(Some(true)), Frontend::ADMITS_HOST)
        | flag(admits_host == Some(None), Frontend::HOST_UNKNOWN);
    Frontend {
        key,
        service: id,
        cluster,
        algorithm: plan.algorithm,
        flags,
        reserved: 0,
        inline_backends: record_backends(actual, id, of_sockets),
        local,
        affinity_timeout: plan.affinity_timeout,
        source_ranges: if is_restricted {
            actual
                .source_ranges
                .find_shared(&plan.source_ranges)
                .unwrap_or(UNWRITTEN)
        } else {
            IndexRange::default()
        },
    }
}

/// Returns the copies of backends to store in the record: all of them if the set is small, or none otherwise.
fn record_backends(
    actual: &ActualContent,
    id: u32,
    targets: &[BackendTarget],
) -> [InlineBackend; MAX_INLINE_BACKENDS] {
    let targets = if targets.len() > MAX_INLINE_BACKENDS {
        &[]
    } else {
        targets
    };
    let index = |target| actual.backend(id, target).unwrap_or_default();
    let indices: Vec<_> = targets.iter().map(index).collect();
    inline_backends(targets, &indices)
}

/// Returns the port's set in the maps that has exactly these backends, if there is one.
fn existing_set(
    actual: &ActualContent,
    id: u32,
    targets: &[BackendTarget],
    of: impl Fn(&Frontend) -> IndexRange,
) -> Option<IndexRange> {
    if targets.is_empty() {
        return Some(IndexRange::default());
    }
    let indices = targets.iter().map(|target| actual.backend(id, target));
    let indices = indices.collect::<Option<Vec<_>>>()?;
    let mut known = actual.records_of(id).map(of);
    known.find(|set| actual.sets.items(*set) == indices)
}
