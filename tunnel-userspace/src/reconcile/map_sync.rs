//! Compares the plans with the contents of the service maps and writes the differences.

mod actual;
mod allocators;
mod diff;
mod draining_backends;
mod fit;
mod fitted_plan;
mod former_owners;
mod namespace_shares;
mod orphans;
mod probe_frontend;
mod read_maps;
mod ref_counted_lists;
mod set_values;
mod slot_moves;
mod tracked_maps;
mod write_service;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use tunnel_common::{reason::Reason, table::MapSizes};

pub use self::probe_frontend::ProbeFrontend;
pub(super) use self::{
    actual::ActualContent, allocators::to_usize, read_maps::read_maps,
    ref_counted_lists::RefCountedLists, set_values::slots, tracked_maps::TrackedMaps,
};
use self::{
    actual::MapUsage,
    fit::{Fit, ServiceRoom},
    namespace_shares::EntryCounts,
    orphans::Orphans,
    tracked_maps::ChangeError,
};
use super::{
    desired_plans::DesiredPlans,
    grace_period::{GracePeriod, RetiredEntries},
    map_access::{AdoptError, MapReader, MapWriter, WriteError},
    port_problems::{PortProblem, PortProblems, ProblemTracker},
    refused_retries::RefusedRetries,
};
use crate::model::ObjectName;

/// The current phase of syncing, which determines what the next sync writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SyncPhase {
    /// At least one source has not delivered its first complete list yet, so nothing is written.
    WaitingForSources,
    /// The next sync is the first one. It writes all Services, in batches.
    FirstSync,
    /// A batch was refused during the first sync, so the contents of the maps are unknown. Nothing is written
    /// until the maps have been re-read.
    ContentUnknown,
    /// The maps have been re-read. The next sync writes all Services without batching, so that a refused
    /// write affects only a single Service.
    FirstSyncUnbatched,
    /// Each sync writes only the Services that have changed.
    Incremental,
}

/// The maximum number of refused service ports that are retried at once whenever entries are freed.
const MAX_IMMEDIATE_RETRIES: usize = 256;

/// Brings the service maps into line with the plans.
pub(super) struct MapSync<M> {
    pub(super) tracked: TrackedMaps<M>,
    pub(super) orphans: Orphans,
    phase: SyncPhase,
    /// The Services that the next sync will write.
    pub(super) dirty: BTreeSet<ObjectName>,
    /// The Services that are waiting for entries to be freed after a grace period.
    pub(super) waiting_for_entries: BTreeSet<ObjectName>,
    /// The order in which Services began to wait for entries. Those that have waited longest are written first,
    /// so that frequent changes to some Services don't keep others waiting.
    waiting_since: BTreeMap<ObjectName, u64>,
    /// The highest number used in [`Self::waiting_since`] so far.
    began_to_wait: u64,
    /// True if entries have been retired since the Services that don't fit into the maps were last retried.
    has_retired: bool,
    /// The Services that don't fit into the maps and can be retried, but are so many that they wait for
    /// [`Self::retry_refused`].
    refused_retries: RefusedRetries,
    pub(super) problems: ProblemTracker,
    /// The entries that will be removed at the end of the current sync.
    leaving: EntryCounts,
    /// The entries in use when a port did not fit into the maps during the current sync.
    used_at_refusal: Option<MapUsage>,
    /// True if the current sync has polled the removed backends that have open connections.
    has_polled_draining: bool,
    /// True if the current sync has tried to move sets to other slots.
    has_moved_sets: bool,
    /// The number of differences found by audits, plus the number of invalid entries found at startup.
    pub(super) drift: u64,
}

impl<M: MapReader + MapWriter> MapSync<M> {
    /// Takes over the maps with their current contents.
    pub(super) fn adopt(
        maps: M,
        (sizes, namespace_share): (MapSizes, u8),
        grace: &impl GracePeriod,
    ) -> Result<Self, AdoptError> {
        let mut tracked = TrackedMaps::new(maps, sizes, namespace_share);
        let is_new = tracked.maps.is_new();
        let invalid_keys = if is_new { 0 } else { tracked.adopt(grace)? };
        Ok(Self {
            tracked,
            orphans: Orphans::default(),
            phase: SyncPhase::WaitingForSources,
            dirty: BTreeSet::new(),
            waiting_for_entries: BTreeSet::new(),
            waiting_since: BTreeMap::new(),
            began_to_wait: 0,
            has_retired: false,
            refused_retries: RefusedRetries::default(),
            problems: ProblemTracker::default(),
            leaving: EntryCounts::default(),
            used_at_refusal: None,
            has_polled_draining: false,
            has_moved_sets: false,
            drift: u64::try_from(invalid_keys).unwrap_or(u64::MAX),
        })
    }

    /// Writes the dirty Services. Those that can't be written stay dirty. Returns the Services that it tried
    /// to write.
    pub(super) fn write_changes(&mut self, desired: &DesiredPlans) -> BTreeSet<ObjectName> {
        if matches!(
            self.phase,
            SyncPhase::WaitingForSources | SyncPhase::ContentUnknown
        ) {
            return BTreeSet::new();
        }
        if self.phase != SyncPhase::Incremental {
            self.assign_ids(desired);
        }
        let before = self.tracked.actual.usage();
        self.leaving = EntryCounts::default();
        self.tracked.actual.shares.clear_leaving();
        self.has_polled_draining = false;
        self.has_moved_sets = false;
        let services = std::mem::take(&mut self.dirty);
        if self.phase == SyncPhase::FirstSync {
            self.tracked.maps.start_batch();
            self.tracked.actual.reserve(services.len());
        }
        let mut deletions = Vec::new();
        for service in self.in_order(&services) {
            self.write_service(desired, service, &mut deletions);
            if self.waiting_for_entries.contains(service) {
                self.began_to_wait += 1;
                let since = self.waiting_since.entry(service.clone());
                since.or_insert(self.began_to_wait);
            } else if !self.waiting_since.is_empty() {
                self.waiting_since.remove(service);
            }
        }
        if let Err(error) = self.tracked.maps.flush_batch() {
            self.enter_content_unknown(&error, desired);
            return services;
        }
        if self.phase != SyncPhase::Incremental {
            // Sets are not moved during the first sync.
            self.dirty
                .extend(self.problems.fragmented_services().cloned());
        }
        self.phase = SyncPhase::Incremental;
        // Deletions come last, so that an address that moves to another Service is served without
        // interruption.
        for (name, diff) in deletions {
            if let Err(error) = self.tracked.remove_unplanned(Some(&name), &diff) {
                self.dirty.insert(name.service.clone());
                let problems = PortProblems::from([(name.clone(), error.problem())]);
                // The problems of the Service's other ports are still the same.
                self.problems.replace(&name.service, problems, false);
            }
        }
        self.remove_orphans();
        // A port that was refused may have been refused only because later deletions came too late.
        let after = self.tracked.actual.usage();
        let at_refusal = self.used_at_refusal.take();
        // Entries may have been retired even if others took their number.
        self.has_retired |= !self.tracked.retired.0.is_empty()
            || before.exceeds(&after)
            || at_refusal.is_some_and(|it| it.exceeds(&after));
        services
    }

    /// Assigns the ids found in the maps to service ports after startup: each port gets the id stored in the
    /// record of one of its frontends. Ids that no port gets become orphans.
    fn assign_ids(&mut self, desired: &DesiredPlans) {
        let (actual, orphans) = (&mut self.tracked.actual, &mut self.orphans);
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for (name, plan) in desired.plans.values().flatten() {
            let known_id = actual.find_id(plan, |id| !taken.contains(id));
            let is_owner = |key| desired.frontend_owners.owner(key) == Some(name);
            if let Some(id) = known_id
                && plan.frontends.keys().any(is_owner)
            {
                taken.insert(id);
                actual.claim_id(name.clone(), id);
            }
        }
        orphans.set_ids(actual.unassigned_ids());
        self.dirty.extend(desired.plans.keys().cloned());
        if orphans.may_remove {
            return;
        }
        for (service, plans) in &desired.plans {
            // A port without endpoints keeps its backends, since the missing object may be its EndpointSlice.
            let without_endpoints = plans.iter().filter(|(name, plan)| {
                let id = actual.id(name);
                let port = id.and_then(|id| actual.ports.get(&id));
                !plan.has_endpoints && port.is_some_and(|port| !port.backends.is_empty())
            });
            orphans.keep_backends(
                service,
                without_endpoints.map(|(name, _)| name.clone()).collect(),
            );
        }
        let (orphaned_ports, keeping) = orphans.counts();
        if orphaned_ports == 0 && keeping == 0 {
            return;
        }
        tracing::warn!(
            kept_service_ports = orphaned_ports,
            kept_services = keeping,
            "map entries left by the previous Culvert process are not removed until every source object has been \
             read and none is rejected"
        );
    }

    /// Writes the probe's frontend, calls `dial`, and removes the frontend again. Returns `None` without
    /// calling `dial` if a Service already owns the frontend or if it can't be written, for example because a
    /// map is full.
    pub(super) fn dial_probe<R>(
        &mut self,
        probe: &ProbeFrontend,
        dial: impl FnOnce() -> R,
    ) -> Option<R> {
        let actual = &mut self.tracked.actual;
        let known = actual.frontends.get(&probe.frontend);
        let id = match known.map(|frontend| frontend.record.service) {
            // A process that was killed may have left the probe's frontend behind.
            Some(id) => self.orphans.take_id(id).then_some(id)?,
            None => actual.free_ids.allocate()?,
        };
        let fit = Fit {
            actual: &self.tracked.actual,
            id,
            namespace: None,
            service: ServiceRoom::default(),
            abandoned: &[],
            leaving: EntryCounts::default(),
            is_waiting: false,
            has_waited: false,
            may_move: false,
        };
        let fitted = fit.fit(Cow::Owned(probe.plan())).ok();
        let fitted = fitted.and_then(|fitted| fitted.plan);
        let full = ChangeError::NoRoom(Reason::FrontendsFull);
        let written = fitted.ok_or(full).and_then(|fitted| {
            let protocol = probe.frontend.protocol;
            self.tracked.write_plan(id, protocol, &fitted)
        });
        if let Err(error) = &written {
            let PortProblem { reason, text } = error.problem();
            tracing::warn!(
                reason = reason.label(),
                %text,
                "cannot write the frontend of the probe"
            );
        }
        let result = written.ok().map(|_| dial());
        if let Err(error) = self.tracked.remove_all(id) {
            self.orphans.add_refused(id, error.problem());
        }
        result
    }

    /// Returns Services in the order in which they are written.
    fn in_order<'a>(&self, services: &'a BTreeSet<ObjectName>) -> Vec<&'a ObjectName> {
        let mut ordered: Vec<_> = services.iter().collect();
        if !self.waiting_since.is_empty() {
            let since = |service: &&ObjectName| self.waiting_since.get(*service).copied();
            ordered.sort_by_key(|service| since(service).unwrap_or(u64::MAX));
        }
        ordered
    }

    fn replace_problems(&mut self, service: &ObjectName, problems: PortProblems) {
        let all_ports_tried = !self.waiting_for_entries.contains(service);
        self.problems.replace(service, problems, all_ports_tried);
    }

    fn remove_orphans(&mut self) {
        for id in self.orphans.take_removable() {
            if let Err(error) = self.tracked.remove_all(id) {
                let problem = error.problem();
                tracing::warn!(id, text = %problem.text, "cannot remove entries of an earlier process");
                self.problems.count(problem.reason);
                self.orphans.add_refused(id, problem);
            }
        }
    }

    fn enter_content_unknown(&mut self, error: &WriteError, desired: &DesiredPlans) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(
            error,
            "a batch of the first sync was refused, reading the maps again"
        );
        self.problems.count(Reason::WriteFailed);
        self.phase = SyncPhase::ContentUnknown;
        // Nothing may be freed: some of these entries may still be in use.
        self.tracked.retired = RetiredEntries::default();
        self.dirty.extend(desired.plans.keys().cloned());
    }

    /// Re-reads the maps from scratch after a batch was refused during the first sync.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Self::adopt`]. The call can be retried.
    pub(super) fn read_again(&mut self, grace: &impl GracePeriod) -> Result<(), AdoptError> {
        self.tracked.adopt(grace)?;
        self.orphans.clear();
        self.waiting_for_entries.clear();
        self.waiting_since.clear();
        self.phase = SyncPhase::FirstSyncUnbatched;
        Ok(())
    }

    /// Re-reads the maps and compares them with their tracked contents. If they differ, the contents just
    /// read become the tracked contents, and every Service is marked dirty. Returns the number of
    /// differences.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Self::adopt`]. On error, the tracked contents are left unchanged.
    pub(super) fn audit(
        &mut self,
        desired: &DesiredPlans,
        grace: &impl GracePeriod,
    ) -> Result<u64, AdoptError> {
        if self.tracked.has_waiting || self.phase != SyncPhase::Incremental {
            return Ok(0);
        }
        let differences = u64::try_from(self.tracked.audit(grace)?).unwrap_or(u64::MAX);
        if differences > 0 {
            self.orphans.set_ids(self.tracked.actual.unassigned_ids());
            self.dirty.extend(desired.plans.keys().cloned());
            self.dirty.extend(self.tracked.actual.ids.keys().cloned());
            self.drift += differences;
        }
        Ok(differences)
    }

    /// Frees retired entries after their grace period, except for the indices of backends that still have
    /// open connections. `more` is true if another batch of retired entries is waiting.
    pub(super) fn free(&mut self, retired: &RetiredEntries, more: bool) {
        self.tracked.free(retired, more);
        self.dirty.append(&mut self.waiting_for_entries);
        self.poll_draining();
        if std::mem::take(&mut self.has_retired) {
            self.plan_retry();
        }
    }

    /// Marks the Services that don't fit into the maps as dirty. If they have many ports, they are retried later
    /// and in parts, so that one namespace's refused Services don't slow down every change to another's.
    fn plan_retry(&mut self) {
        let ports = self.problems.ports().values().sum::<usize>();
        if ports > MAX_IMMEDIATE_RETRIES {
            self.refused_retries.plan();
        } else {
            let without_room = self.problems.services_without_room().values();
            self.dirty.extend(without_room.flatten().cloned());
        }
    }

    /// Marks some of the Services that don't fit into the maps and wait for a retry as dirty.
    pub(super) fn retry_refused(&mut self) {
        self.dirty.extend(self.refused_retries.take(&self.problems));
    }

    /// Frees the indices of removed backends whose connections have all been closed. If any index is freed,
    /// the Services that don't fit into the maps become dirty.
    pub(super) fn poll_draining(&mut self) {
        if self.tracked.poll_draining() > 0 {
            self.plan_retry();
        }
    }
}

impl<M> MapSync<M> {
    /// Applies the state of the sources: `synced` is true once each of them has delivered its first complete
    /// list, and `complete` is true if no object is missing.
    pub(super) fn set_source_state(&mut self, synced: bool, complete: bool) {
        if synced && self.phase == SyncPhase::WaitingForSources {
            self.phase = SyncPhase::FirstSync;
        }
        self.dirty.extend(self.orphans.set_complete(complete));
    }

    /// Returns true if every source has delivered its first complete list.
    pub(super) fn is_synced(&self) -> bool {
        self.phase != SyncPhase::WaitingForSources
    }

    /// Returns true if the contents of the maps are unknown, in which case nothing is written until
    /// [`Self::read_again`] succeeds.
    pub(super) fn is_content_unknown(&self) -> bool {
        self.phase == SyncPhase::ContentUnknown
    }

    /// Returns true if Services that don't fit into the maps wait for [`Self::retry_refused`].
    pub(super) fn has_refused_to_retry(&self) -> bool {
        self.refused_retries.is_planned()
    }

    /// Returns true if a change is waiting to be written.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_synced() && (!self.dirty.is_empty() || self.orphans.has_removable())
    }

    /// Returns the number of service ports, and of ids left by an earlier process, that have a problem, by
    /// reason.
    pub(super) fn ports_with_problems(&self) -> BTreeMap<Reason, usize> {
        let mut ports = self.problems.ports().clone();
        for problem in self.orphans.problems() {
            *ports.entry(problem.reason).or_default() += 1;
        }
        ports
    }
}
