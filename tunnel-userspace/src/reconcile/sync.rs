//! Compares the plans with the content of the service maps, and writes the differences.

mod actual;
mod alloc;
mod canary;
mod diff;
mod entries;
mod lists;
mod occupied;
mod ports;
mod reading;
mod unclaimed;

use std::collections::{BTreeMap, BTreeSet};

use litemap::LiteMap;
use tunnel_common::{reason::Reason, table::MapSizes};

pub use self::canary::Canary;
pub(super) use self::{
    actual::Actual, alloc::count, entries::slots, lists::Lists, ports::Ports, reading::read,
};
use self::{
    diff::{Diff, Shortage},
    ports::Refused,
    unclaimed::Unclaimed,
};
use super::{
    access::{AdoptError, MapReader, MapWriter, WriteError},
    desired::DesiredPlans,
    grace::{GracePeriod, Retired},
    problems::{ProblemTracker, PortProblem, PortProblems},
};
use crate::{
    model::ObjectName,
    plan::{PortName, PortPlan},
};

/// The phase of syncing, which determines what the next sync writes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SyncPhase {
    /// A source has not delivered its first complete list: nothing is written.
    WaitingForSources,
    /// The next sync is the first one. It writes all Services, in batches.
    FirstSync,
    /// A batch of the first sync was refused, so the content of the maps is unknown. Nothing is written
    /// until the maps are read again.
    ContentUnknown,
    /// The maps were read again. The next sync writes all Services with one system call per entry, so that
    /// a refused write affects no other entry.
    FirstSyncUnbatched,
    /// A sync writes the Services that changed.
    Incremental,
}

/// Brings the service maps to the state that the plans require.
pub(super) struct MapSync<M> {
    pub(super) ports: Ports<M>,
    pub(super) unclaimed: Unclaimed,
    mode: SyncPhase,
    /// Services to be written by the next sync.
    pub(super) dirty: BTreeSet<ObjectName>,
    /// Services that wait until entries are freed after a grace period.
    pub(super) waiting_for_entries: BTreeSet<ObjectName>,
    /// True if entries were retired since the last time that Services without room were retried.
    has_shrunk: bool,
    pub(super) faults: ProblemTracker,
    /// The number of differences that audits found, and of invalid entries at the start.
    pub(super) drift: u64,
}

impl<M: MapReader + MapWriter> MapSync<M> {
    /// Takes over the maps with their present content.
    pub(super) fn adopt(maps: M, sizes: MapSizes, grace: &impl GracePeriod) -> Result<Self, AdoptError> {
        let mut ports = Ports::new(maps, sizes);
        let is_new = ports.maps.is_new();
        let strays = if is_new { 0 } else { ports.adopt(grace)? };
        Ok(Self {
            ports,
            unclaimed: Unclaimed::default(),
            mode: SyncPhase::WaitingForSources,
            dirty: BTreeSet::new(),
            waiting_for_entries: BTreeSet::new(),
            has_shrunk: false,
            faults: ProblemTracker::default(),
            drift: u64::try_from(strays).unwrap_or(u64::MAX),
        })
    }

    /// Writes the dirty Services. Those that can't be written stay dirty. Returns the Services that it tried
    /// to write.
    pub(super) fn pass(&mut self, desired: &DesiredPlans) -> BTreeSet<ObjectName> {
        if matches!(self.mode, SyncPhase::WaitingForSources | SyncPhase::ContentUnknown) {
            return BTreeSet::new();
        }
        if self.mode != SyncPhase::Incremental {
            self.find_names(desired);
        }
        let before = self.ports.actual.usage();
        let services = std::mem::take(&mut self.dirty);
        if self.mode == SyncPhase::FirstSync {
            self.ports.maps.start_batch();
            self.ports.actual.make_room(services.len());
        }
        let mut leftovers = Vec::new();
        for service in &services {
            self.write(desired, service, &mut leftovers);
        }
        if let Err(error) = self.ports.maps.flush_batch() {
            self.doubt(&error, desired);
            return services;
        }
        self.mode = SyncPhase::Incremental;
        // Deletions come last, so that an address that moves to another Service is served all the time.
        for (name, diff) in leftovers {
            if let Err(refused) = self.ports.finish(Some(&name), &diff) {
                self.dirty.insert(name.service.clone());
                let problems = PortProblems::from([(name.clone(), refused.problem())]);
                self.note(&name.service, problems);
            }
        }
        self.remove_unclaimed();
        self.has_shrunk |= before.exceeds(&self.ports.actual.usage());
        services
    }

    /// Assigns the ids in the maps to service ports, after a start: a port gets the id that is in the record
    /// of one of its frontends. Ids that no port gets are orphaned.
    fn find_names(&mut self, desired: &DesiredPlans) {
        let (actual, unclaimed) = (&mut self.ports.actual, &mut self.unclaimed);
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for (name, plan) in desired.plans.values().flatten() {
            let holder = actual.holder(plan, |id| !taken.contains(id));
            let is_owner = |key| desired.frontend_owners.owner(key) == Some(name);
            if let Some(id) = holder
                && plan.frontends.keys().any(is_owner)
            {
                taken.insert(id);
                actual.set_id(name.clone(), id);
            }
        }
        unclaimed.set(actual.nameless());
        self.dirty.extend(desired.plans.keys().cloned());
        if unclaimed.may_go {
            return;
        }
        for (service, plans) in &desired.plans {
            // A port without endpoints keeps its backends: the missing object may be its slice.
            let lost = plans.iter().filter(|(name, plan)| {
                let id = actual.id(name);
                let port = id.and_then(|id| actual.ports.get(&id));
                !plan.has_endpoints && port.is_some_and(|port| !port.backends.is_empty())
            });
            unclaimed.keep(service, lost.map(|(name, _)| name.clone()).collect());
        }
        let (orphans, held) = unclaimed.len();
        tracing::warn!(
            service_ports = orphans,
            services = held,
            "an object of the sources is missing or was refused, so entries of the earlier process are not \
             removed"
        );
    }

    fn write(
        &mut self,
        desired: &DesiredPlans,
        service: &ObjectName,
        leftovers: &mut Vec<(PortName, Diff)>,
    ) {
        let (wanted, mut problems) = desired.plan_to_write(service);
        let known = self.ports.actual.ids.get(service);
        let known = known.into_iter().flat_map(LiteMap::keys);
        let unwanted = known.filter(|name| !wanted.contains_key(*name));
        let unwanted: Vec<PortName> = unwanted.cloned().collect();
        let nothing = PortPlan::default();
        let unwanted = unwanted.iter().map(|name| (name, &nothing));
        let wanted = wanted.iter().map(|(name, plan)| (name, &**plan));
        for (name, plan) in unwanted.chain(wanted) {
            match self.upsert(name, plan, &mut problems) {
                Ok(diff) => leftovers.extend(diff.map(|diff| (name.clone(), diff))),
                Err(refused) => {
                    self.dirty.insert(service.clone());
                    problems.insert(name.clone(), refused.problem());
                }
            }
        }
        self.note(service, problems);
    }

    /// Writes the planned entries of a port, or as many as there is room for. Returns the difference; the
    /// caller makes its deletions later.
    fn upsert(
        &mut self,
        name: &PortName,
        plan: &PortPlan,
        problems: &mut PortProblems,
    ) -> Result<Option<Diff>, Refused> {
        if self.unclaimed.keeps(name) {
            return Ok(None);
        }
        let Some(id) = self.id(name, plan) else {
            let problem = PortProblem::no_room(Reason::FrontendsFull, 0, 0);
            problems.insert(name.clone(), problem);
            return Ok(None);
        };
        let (ports, protocol) = (&mut self.ports, name.protocol);
        let mut result = ports.program(id, protocol, plan);
        if matches!(result, Err(Refused::Full(_))) && ports.look_at_occupied() > 0 {
            result = ports.program(id, protocol, plan);
        }
        let Err(Refused::Full(Shortage { reason, is_passing })) = result else {
            return result.map(Some);
        };
        if is_passing && (ports.waiting || !ports.retired.0.is_empty()) {
            self.waiting_for_entries.insert(name.service.clone());
            return Ok(None);
        }
        let actual = &ports.actual;
        let problem = PortProblem::no_room(reason, plan.cluster.len(), actual.occupied.len());
        problems.insert(name.clone(), problem);
        let reduced = if reason == Reason::SourceRangesFull {
            plan.with_source_ranges(actual.sources_of(id))
        } else {
            let Some(port) = actual.ports.get(&id) else {
                ports.retire_unused(Some(name), id);
                return Ok(None);
            };
            plan.reduced_to(
                |key| port.fronts.contains_key(key),
                |target| port.backends.contains_key(target),
                reason == Reason::SlotsFull,
            )
        };
        ports.program(id, protocol, &reduced).map(Some)
    }

    /// Returns the id of a port. A port without one gets the orphaned id of one of its frontends, or a free
    /// id; `None` if there is no free id.
    fn id(&mut self, name: &PortName, plan: &PortPlan) -> Option<u32> {
        let actual = &mut self.ports.actual;
        if let Some(id) = actual.id(name) {
            return Some(id);
        }
        let claimed = actual.holder(plan, |id| self.unclaimed.claim(*id));
        let id = claimed.or_else(|| actual.free_ids.take())?;
        actual.set_id(name.clone(), id);
        Some(id)
    }

    /// Writes the probe's frontend, calls `dial`, and removes the frontend. Returns `None` if the maps have
    /// no room for it, or a Service owns the same frontend.
    pub(super) fn dial_canary<R>(
        &mut self,
        canary: &Canary,
        dial: impl FnOnce() -> R,
    ) -> Option<R> {
        let actual = &mut self.ports.actual;
        let known = actual.fronts.get(&canary.front);
        let id = match known.map(|front| front.record.service) {
            // A process that was killed has left the probe's frontend.
            Some(id) => self.unclaimed.claim(id).then_some(id)?,
            None => actual.free_ids.take()?,
        };
        let written = self
            .ports
            .program(id, canary.front.protocol, &canary.plan());
        if let Err(refused) = &written {
            let PortProblem { reason, text } = refused.problem();
            tracing::warn!(
                reason = reason.label(),
                text,
                "cannot write the frontend of the probe"
            );
        }
        let dialled = written.ok().map(|_| dial());
        if let Err(refused) = self.ports.remove(id) {
            self.unclaimed.put_back(id, refused.problem());
        }
        dialled
    }

    fn note(&mut self, service: &ObjectName, problems: PortProblems) {
        let was_tried = !self.waiting_for_entries.contains(service);
        self.faults.replace(service, problems, was_tried);
    }

    fn remove_unclaimed(&mut self) {
        for id in self.unclaimed.take_due() {
            if let Err(refused) = self.ports.remove(id) {
                let problem = refused.problem();
                tracing::warn!(id, text = %problem.text, "cannot remove entries of an earlier process");
                self.faults.count(problem.reason);
                self.unclaimed.put_back(id, problem);
            }
        }
    }

    fn doubt(&mut self, error: &WriteError, desired: &DesiredPlans) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, "a batch of the first sync was refused, reading the maps again");
        self.faults.count(Reason::WriteFailed);
        self.mode = SyncPhase::ContentUnknown;
        // Nothing may be freed: some of these entries may still be in use.
        self.ports.retired = Retired::default();
        self.dirty.extend(desired.plans.keys().cloned());
    }

    /// Reads the maps again, as at a start, after a batch of the first sync was refused.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; the call can be repeated.
    pub(super) fn begin_anew(&mut self, grace: &impl GracePeriod) -> Result<(), AdoptError> {
        self.ports.adopt(grace)?;
        self.unclaimed.forget();
        self.waiting_for_entries.clear();
        self.mode = SyncPhase::FirstSyncUnbatched;
        Ok(())
    }

    /// Reads the maps again, and compares them with their tracked content. If they differ, their content
    /// becomes the tracked one, and every Service is marked dirty. Returns the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; the tracked content stays as it was.
    pub(super) fn audit(
        &mut self,
        desired: &DesiredPlans,
        grace: &impl GracePeriod,
    ) -> Result<u64, AdoptError> {
        if self.ports.waiting || self.mode != SyncPhase::Incremental {
            return Ok(0);
        }
        let differences = u64::try_from(self.ports.audit(grace)?).unwrap_or(u64::MAX);
        if differences > 0 {
            self.unclaimed.set(self.ports.actual.nameless());
            self.dirty.extend(desired.plans.keys().cloned());
            self.dirty.extend(self.ports.actual.ids.keys().cloned());
            self.drift += differences;
        }
        Ok(differences)
    }

    /// Frees retired entries after their grace period, except for backend indices with open connections.
    /// `more` is true if another batch of retired entries waits.
    pub(super) fn free(&mut self, retired: &Retired, more: bool) {
        self.ports.free(retired, more);
        self.dirty.append(&mut self.waiting_for_entries);
        self.look_at_occupied();
        if std::mem::take(&mut self.has_shrunk) {
            self.dirty.extend(self.faults.services_without_room().cloned());
        }
    }

    /// Frees the indices of removed backends whose connections have all closed. If there are any, Services
    /// without room become dirty.
    pub(super) fn look_at_occupied(&mut self) {
        if self.ports.look_at_occupied() > 0 {
            self.dirty.extend(self.faults.services_without_room().cloned());
        }
    }
}

impl<M> MapSync<M> {
    /// Applies the state of the sources: `synced` is true once each has delivered its first complete list,
    /// `whole` if no object is missing.
    pub(super) fn heard(&mut self, synced: bool, whole: bool) {
        if synced && self.mode == SyncPhase::WaitingForSources {
            self.mode = SyncPhase::FirstSync;
        }
        self.dirty.extend(self.unclaimed.heard(whole));
    }

    /// Returns true if every source has delivered its first list.
    pub(super) fn is_synced(&self) -> bool {
        self.mode != SyncPhase::WaitingForSources
    }

    /// Returns true if the content of the maps is unknown. Nothing is written until
    /// [`Self::begin_anew`] succeeds.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.mode == SyncPhase::ContentUnknown
    }

    /// Returns true if a change waits to be written.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_synced() && (!self.dirty.is_empty() || self.unclaimed.is_due())
    }

    /// Returns all problems with service ports, and with entries of an earlier process.
    pub(super) fn problems(&self) -> impl Iterator<Item = &PortProblem> {
        let problems = self.faults.by_service.values().flat_map(BTreeMap::values);
        problems.chain(self.unclaimed.problems())
    }
}
