//! Computes the difference between the contents of the maps and the plan for one service port. Does no I/O.

use tunnel_common::{
    select::MAX_SOURCE_RANGES,
    service::{
        Frontend, FrontendKey, IndexRange, InlineBackend, MAX_INLINE_BACKENDS, Membership,
        SourceRange,
    },
};

use super::{
    actual::ActualContent, allocators::to_usize, fitted_plan::FittedPlan,
    set_values::inline_backends,
};
use crate::{
    model::TrafficPolicy,
    plan::{BackendTarget, FrontendKind, FrontendPlan, PortPlan},
};

/// The changes that bring one service port's entries into line with its plan.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct PortDiff {
    pub(crate) id: u32,
    pub(crate) new_backends: Vec<(BackendTarget, Membership)>,
    /// The indices of backends whose set membership changes, each with the new membership.
    pub(crate) set_changes: Vec<(u32, Membership)>,
    /// Frontends that are new or whose record changes.
    pub(crate) upserts: Vec<(FrontendKey, FrontendPlan)>,
    pub(crate) deletes: Vec<FrontendKey>,
    /// Source ranges that must be written.
    pub(crate) new_source_ranges: Vec<SourceRange>,
    /// Backends that are no longer planned.
    pub(crate) removed_backends: Vec<(BackendTarget, u32)>,
}

impl PortDiff {
    /// Compares the entries that have a service port's id with the entries to write.
    pub(crate) fn between(actual: &ActualContent, id: u32, fitted: &FittedPlan<'_>) -> Self {
        let sets = fitted.cluster.existing().zip(fitted.local.existing());
        let records = sets.map(|sets| RecordBuilder::new(actual, id, fitted, sets));
        let is_right = |(key, frontend): &(&FrontendKey, &FrontendPlan)| {
            let known = actual.frontends.get(*key).zip(records.as_ref());
            known.is_some_and(|(known, records)| known.record == records.build(**key, frontend))
        };
        let frontends = fitted.frontends();
        let upserts = frontends.iter().filter(|frontend| !is_right(frontend));
        let upserts = upserts.map(|(key, frontend)| (*key, *frontend)).collect();
        let (mut new_backends, mut set_changes) = (Vec::new(), Vec::new());
        for backend in &fitted.backends {
            let sets = backend.sets;
            match backend.index {
                None => new_backends.push((backend.target, sets)),
                Some(index) if actual.backend_status(index).membership != sets => {
                    set_changes.push((index, sets))
                }
                Some(_) => {}
            }
        }
        let used_ranges = fitted.plan.used_source_ranges();
        let new_source_ranges = match actual.source_ranges.find_shared(used_ranges) {
            Some(_) => Vec::new(),
            None => used_ranges.to_vec(),
        };
        let port = actual.ports.get(&id);
        let deletes = port
            .into_iter()
            .flat_map(|port| port.frontends.keys())
            .filter(|key| !frontends.contains_key(key))
            .copied()
            .collect();
        let removed_backends = port
            .into_iter()
            .flat_map(|port| &port.backends)
            .filter(|(target, _)| fitted.backend(target).is_none())
            .map(|(target, index)| (*target, *index))
            .collect();
        Self {
            id,
            new_backends,
            set_changes,
            upserts,
            deletes,
            new_source_ranges,
            removed_backends,
        }
    }
}

/// Returns true if there is room for the source ranges that a plan restricts its frontends to.
pub(crate) fn has_room_for_source_ranges(actual: &ActualContent, id: u32, plan: &PortPlan) -> bool {
    let wanted = plan.used_source_ranges();
    if actual.source_ranges.find_shared(wanted).is_some() {
        return true;
    }
    let of_records = actual.records_of(id).map(|record| record.source_ranges);
    let removed = actual.source_ranges.unused_without(of_records);
    let used = to_usize(actual.source_ranges.used) + wanted.len() - removed;
    wanted.len() <= to_usize(MAX_SOURCE_RANGES) && used <= to_usize(actual.sizes.source_ranges)
}

/// A placeholder for source ranges that have not been written yet. It differs from every real range.
const UNWRITTEN: IndexRange = IndexRange {
    base: u32::MAX,
    len: u32::MAX,
};

/// Builds the records of a port's frontends. All of the port's backends and sets must be in the maps.
pub(crate) struct RecordBuilder<'a> {
    id: u32,
    plan: &'a PortPlan,
    cluster: IndexRange,
    local: IndexRange,
    /// The copies of backends for each traffic policy.
    inline_backends: [[InlineBackend; MAX_INLINE_BACKENDS]; 2],
    source_ranges: IndexRange,
}

impl<'a> RecordBuilder<'a> {
    pub(crate) fn new(
        actual: &ActualContent,
        id: u32,
        fitted: &'a FittedPlan<'_>,
        (cluster, local): (IndexRange, IndexRange),
    ) -> Self {
        let shared = actual.source_ranges.find_shared(&fitted.plan.source_ranges);
        let sets = [(cluster, Membership::CLUSTER), (local, Membership::LOCAL)];
        Self {
            id,
            plan: &fitted.plan,
            cluster,
            local,
            inline_backends: sets
                .map(|(range, set)| record_backends(actual, (id, fitted), set, range)),
            source_ranges: shared.unwrap_or(UNWRITTEN),
        }
    }

    /// Returns a frontend's record.
    pub(crate) fn build(&self, key: FrontendKey, frontend: &FrontendPlan) -> Frontend {
        let plan = self.plan;
        let [sockets, packets] = [frontend.socket_policy, frontend.packet_policy]
            .map(|policy| policy == TrafficPolicy::Local);
        let [of_cluster, of_local] = self.inline_backends;
        let skips_sockets = plan.socket_translation_disabled || frontend.has_listener;
        let is_restricted = plan.is_restricted(frontend);
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        // Under policy Local, only backends on this node are used, which see the client.
        let sender_flags = match (frontend.kind, packets) {
            (FrontendKind::ClusterIp, _) => Frontend::MASQUERADE_FOREIGN,
            (_, false) => Frontend::MASQUERADE,
            (_, true) => 0,
        };
        let admits_host = is_restricted.then_some(frontend.admits_host);
        let flags = flag(sockets, Frontend::SOCKETS_LOCAL)
            | flag(packets, Frontend::PACKETS_LOCAL)
            | flag(plan.has_endpoints, Frontend::HAS_ENDPOINTS)
            | flag(skips_sockets, Frontend::NOT_SOCKETS)
            | flag(admits_host == Some(Some(true)), Frontend::ADMITS_HOST)
            | flag(admits_host == Some(None), Frontend::HOST_UNKNOWN);
        Frontend {
            key,
            service: self.id,
            cluster: self.cluster,
            algorithm: plan.algorithm,
            flags,
            packet_flags: sender_flags | flag(frontend.has_listener, Frontend::NOT_PACKETS),
            reserved: 0,
            inline_backends: if sockets { of_local } else { of_cluster },
            local: self.local,
            affinity_timeout: plan.affinity_timeout,
            source_ranges: if is_restricted {
                self.source_ranges
            } else {
                IndexRange::default()
            },
        }
    }
}

/// Returns the copies of a set's backends to store in a record: all of them if the set is small, or none
/// otherwise.
fn record_backends(
    actual: &ActualContent,
    (id, fitted): (u32, &FittedPlan<'_>),
    set: Membership,
    range: IndexRange,
) -> [InlineBackend; MAX_INLINE_BACKENDS] {
    let indices = actual.sets.items(range);
    if indices.is_empty() || indices.len() > MAX_INLINE_BACKENDS {
        return [InlineBackend::NONE; MAX_INLINE_BACKENDS];
    }
    let target = |index: &u32| {
        let of_index = |target: &BackendTarget| actual.backend(id, target) == Some(*index);
        fitted
            .members(set)
            .map(|member| member.target)
            .find(of_index)
    };
    let targets: Option<Vec<_>> = indices.iter().map(target).collect();
    targets.map_or([InlineBackend::NONE; MAX_INLINE_BACKENDS], |targets| {
        inline_backends(&targets, indices)
    })
}
