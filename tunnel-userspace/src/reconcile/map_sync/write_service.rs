//! Writes the planned entries of one Service's ports.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use tunnel_common::{reason::Reason, service::FrontendKey};

use super::{
    MapSync, SyncPhase,
    actual::ActualContent,
    allocators::to_usize,
    diff::{PortDiff, has_room_for_source_ranges},
    fit::{Fit, Fitted, NO_ID, ServiceRoom, WaitsForEntries},
    fitted_plan::FittedPlan,
    namespace_shares::EntryCounts,
    tracked_maps::ChangeError,
};
use crate::{
    model::ObjectName,
    plan::{PortName, PortPlan, ServicePlan},
    reconcile::{
        desired_plans::DesiredPlans,
        map_access::{MapReader, MapWriter},
        port_problems::{PortProblem, PortProblems},
    },
};

impl<M: MapReader + MapWriter> MapSync<M> {
    /// Writes a Service. Adds to `deletions` the changes whose deletions the caller must apply later.
    pub(super) fn write_service(
        &mut self,
        desired: &DesiredPlans,
        service: &ObjectName,
        deletions: &mut Vec<(PortName, PortDiff)>,
    ) {
        let (wanted, mut problems) = desired.plan_to_write(service);
        self.waiting_for_entries.remove(service);
        self.hand_over_ids(service, &wanted);
        let mut room = ServiceRoom::default();
        let known = self.tracked.actual.ids.get(service);
        let mut unwanted: Vec<PortName> = Vec::new();
        for (name, id) in known.into_iter().flatten() {
            let counts = self.tracked.actual.counts_of(*id);
            room.slots += counts.slots;
            if !wanted.contains_key(name) {
                room.add_leaving(counts);
                unwanted.push(name.clone());
            }
        }
        for name in unwanted {
            if let Some(id) = self.tracked.actual.id(&name)
                && !self.orphans.keeps_backends(&name)
            {
                let actual = &mut self.tracked.actual;
                let counts = actual.counts_of(id);
                self.leaving.add(counts);
                let namespace = &service.namespace;
                actual.shares.add_leaving(namespace, counts.backends);
                let diff = PortDiff::between(actual, id, &FittedPlan::empty());
                deletions.push((name, diff));
            }
        }
        for (name, plan) in &wanted {
            match self.write_port(desired, (name, plan), &mut room, &mut problems) {
                Ok(diff) => deletions.extend(diff.map(|diff| (name.clone(), diff))),
                Err(error) => {
                    self.dirty.insert(service.clone());
                    problems.insert(name.clone(), error.problem());
                }
            }
        }
        self.replace_problems(service, problems);
    }

    /// Gives the entries of ports that a Service no longer has to new ports of the Service at the same addresses.
    /// A port that gets another name therefore keeps its backends.
    fn hand_over_ids(&mut self, service: &ObjectName, wanted: &ServicePlan) {
        let actual = &mut self.tracked.actual;
        let known = actual.ids.get(service).into_iter().flatten();
        let unwanted = known.filter(|(name, _)| !wanted.contains_key(*name));
        let mut unwanted: BTreeMap<u32, PortName> =
            unwanted.map(|(name, id)| (*id, name.clone())).collect();
        for (name, plan) in wanted {
            if unwanted.is_empty() {
                break;
            }
            if actual.id(name).is_some() {
                continue;
            }
            let found = actual.find_id(plan, |id| unwanted.contains_key(id));
            if let Some((id, old)) = found.and_then(|id| unwanted.remove_entry(&id)) {
                actual.remove_name(&old);
                actual.set_id(name.clone(), id);
            }
        }
    }

    /// Writes a port's planned entries, or as many of them as there is room for. Returns the diff, whose
    /// deletions the caller must apply later, or `None` if nothing was written.
    fn write_port(
        &mut self,
        desired: &DesiredPlans,
        (name, plan): (&PortName, &Arc<PortPlan>),
        service: &mut ServiceRoom,
        problems: &mut PortProblems,
    ) -> Result<Option<PortDiff>, ChangeError> {
        if self.orphans.keeps_backends(name) {
            return Ok(None);
        }
        let known_id = self.known_id(name, plan);
        let id = known_id.unwrap_or(NO_ID);
        let actual = &self.tracked.actual;
        let has_ranges = has_room_for_source_ranges(actual, id, plan);
        let plan = if has_ranges {
            Cow::Borrowed(&**plan)
        } else {
            Cow::Owned(plan.with_source_ranges(actual.source_ranges_of(id)))
        };
        let abandoned = self.abandoned_frontends(desired, id);
        let fitted = self.fit_port(id, name, &plan, (*service, &abandoned));
        let Some(fitted) = fitted else {
            self.waiting_for_entries.insert(name.service.clone());
            return Ok(None);
        };
        let is_short = !has_ranges || fitted.shortage.is_some();
        if is_short {
            let used = self.tracked.actual.usage();
            let known = self.used_at_refusal.unwrap_or(used);
            self.used_at_refusal = Some(known.max(&used));
        }
        if !has_ranges {
            let reason = Reason::SourceRangesFull;
            problems.insert(name.clone(), PortProblem::new(reason, reason.meaning()));
        } else if let Some(shortage) = fitted.shortage {
            let text = fitted.describe(&shortage, &plan, name, &self.tracked.actual);
            add_shortage(problems, name, shortage.reason, &text);
        }
        let Some(fitted) = fitted.plan else {
            if known_id.is_some() {
                self.tracked.retire_id_if_unused(Some(name), id);
            }
            return Ok(None);
        };
        let Some(id) = known_id.or_else(|| self.new_id(name)) else {
            let reason = Reason::FrontendsFull;
            problems.insert(name.clone(), PortProblem::new(reason, reason.meaning()));
            return Ok(None);
        };
        let diff = self.write_fitted(id, name, &fitted, service)?;
        // The backends that make room for the missing ones are removed at the end of this sync.
        let has_removals = |diff: &PortDiff| !diff.removed_backends.is_empty();
        self.has_retired |= is_short && diff.as_ref().is_some_and(has_removals);
        Ok(diff)
    }

    /// Returns a port's frontends that no port has any more, if the map of frontends has no free entry.
    fn abandoned_frontends(&self, desired: &DesiredPlans, id: u32) -> Vec<FrontendKey> {
        let actual = &self.tracked.actual;
        if actual.frontends.len() < to_usize(actual.sizes.frontends) {
            return Vec::new();
        }
        let known = actual.ports.get(&id).into_iter();
        let known = known.flat_map(|port| port.frontends.keys());
        let is_abandoned = |key: &&FrontendKey| desired.frontend_owners.owner(key).is_none();
        known.filter(is_abandoned).copied().collect()
    }

    /// Fits a port's plan into the maps. If indices are lacking, first frees those of removed backends whose
    /// connections have been closed. Returns `None` if the port must wait for retired entries.
    fn fit_port<'p>(
        &mut self,
        id: u32,
        name: &PortName,
        plan: &Cow<'p, PortPlan>,
        (service, abandoned): (ServiceRoom, &[FrontendKey]),
    ) -> Option<Fitted<'p>> {
        let (leaving, is_waiting) = (self.leaving, self.tracked.is_waiting());
        let has_waited = self.waiting_since.contains_key(&name.service);
        let fit = |actual: &ActualContent, may_move: bool| {
            let fit = Fit {
                actual,
                id,
                namespace: Some(&name.service.namespace),
                service,
                abandoned,
                leaving,
                is_waiting,
                has_waited,
                may_move,
            };
            fit.fit(Cow::clone(plan))
        };
        // Searching for sets to move takes time, so it is done at most once for each sync.
        let may_move = self.phase == SyncPhase::Incremental && !self.has_moved_sets;
        let mut fitted = fit(&self.tracked.actual, may_move);
        if let Err(WaitsForEntries { range: Some(slots) }) = fitted {
            self.has_moved_sets = true;
            if self.tracked.make_room(slots) {
                return None;
            }
            fitted = fit(&self.tracked.actual, false);
        }
        let lacks_indices = fitted.as_ref().map_or(true, Fitted::lacks_indices);
        // One poll for each sync is enough, since it reads many counters.
        let polls = lacks_indices && !std::mem::replace(&mut self.has_polled_draining, true);
        if polls && self.tracked.poll_draining() > 0 {
            return fit(&self.tracked.actual, false).ok();
        }
        fitted.ok()
    }

    /// Writes a port's entries. Returns `None` if the port must wait for retired entries.
    fn write_fitted(
        &mut self,
        id: u32,
        name: &PortName,
        fitted: &FittedPlan<'_>,
        service: &mut ServiceRoom,
    ) -> Result<Option<PortDiff>, ChangeError> {
        let tracked = &mut self.tracked;
        let is_waiting = tracked.is_waiting();
        let before = tracked.actual.counts_of(id);
        let result = tracked.write_plan(id, name.protocol, fitted);
        tracked.actual.recount(id, Some(&name.service.namespace));
        match result {
            Ok(diff) => {
                let after = EntryCounts {
                    frontends: fitted.frontends().len(),
                    backends: fitted.backends.len(),
                    slots: tracked.actual.counts_of(id).slots,
                };
                service.record_write(before, after);
                let leaving = diff.removed_backends.len();
                self.leaving.backends += leaving;
                let shares = &mut tracked.actual.shares;
                shares.add_leaving(&name.service.namespace, leaving);
                Ok(Some(diff))
            }
            Err(ChangeError::NoRoom(_)) if is_waiting => {
                self.waiting_for_entries.insert(name.service.clone());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns a port's id, if it has one. A port that has none is assigned an orphaned id from one of its
    /// frontends' records, if there is one.
    fn known_id(&mut self, name: &PortName, plan: &PortPlan) -> Option<u32> {
        let actual = &mut self.tracked.actual;
        if let Some(id) = actual.id(name) {
            return Some(id);
        }
        let id = actual.find_id(plan, |id| self.orphans.take_id(*id))?;
        actual.claim_id(name.clone(), id);
        Some(id)
    }

    /// Assigns a free id to a port. Returns `None` if there is none.
    fn new_id(&mut self, name: &PortName) -> Option<u32> {
        let actual = &mut self.tracked.actual;
        let id = actual.free_ids.allocate()?;
        actual.set_id(name.clone(), id);
        Some(id)
    }
}

/// Adds the problem of a port for which there is not enough room. The ports of a Service often have the same
/// text, so they share it.
fn add_shortage(problems: &mut PortProblems, name: &PortName, reason: Reason, text: &str) {
    let last = problems.values().next_back();
    let last = last.filter(|last| *last.text == *text);
    let text = last.map_or_else(|| text.into(), |last| Arc::clone(&last.text));
    problems.insert(name.clone(), PortProblem::new(reason, text));
}
