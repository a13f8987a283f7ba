//! Which service id belongs to which port of which Service.

use std::collections::BTreeSet;

use tunnel_common::addr::Protocol;

use super::Reconciler;
use crate::{
    model::{Family, ObjectName},
    plan::{PortName, PortPlan},
};

impl<M> Reconciler<M> {
    /// Retires the id of a port of which nothing is programmed.
    pub(super) fn forget_unused(&mut self, name: &PortName, id: u32) {
        let is_unused = self
            .actual
            .ports
            .get(&id)
            .is_none_or(|port| port.fronts.is_empty() && port.backends.is_empty());
        if !is_unused {
            return;
        }
        self.actual.ports.remove(&id);
        if let Some(ids) = self.actual.ids.get_mut(&name.service) {
            ids.remove(name);
            if ids.is_empty() {
                self.actual.ids.remove(&name.service);
            }
        }
        self.retired.ids.push(id);
    }

    /// The id of a port, given out now if it has none and a plan. A port whose front an earlier
    /// process programmed takes over its id.
    pub(super) fn id(&mut self, name: &PortName, plan: Option<&PortPlan>) -> Option<u32> {
        if let Some(id) = self.actual.id(name) {
            return Some(id);
        }
        let plan = plan?;
        let id = self
            .orphan_of(plan)
            .or_else(|| self.actual.free_ids.take())?;
        self.actual.set_id(name.clone(), id);
        Some(id)
    }

    /// The id of an orphan that holds a front of a plan; it is an orphan no longer.
    fn orphan_of(&mut self, plan: &PortPlan) -> Option<u32> {
        if self.orphans.is_empty() {
            return None;
        }
        let id = self
            .actual
            .holders(plan.fronts.keys())
            .find(|id| self.orphans.contains(&orphan(*id)))?;
        self.orphans.remove(&orphan(id));
        self.actual.ids.remove(&orphan(id));
        Some(id)
    }

    /// Finds the names of the ids that the maps hold: an id belongs to the port that now owns one
    /// of its fronts. An id whose fronts nobody owns is removed as a port without a plan, once the
    /// sources are whole.
    pub(super) fn seed(&mut self) {
        self.seeded = true;
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for plans in self.plans.values() {
            for (name, plan) in plans {
                let id = self
                    .actual
                    .holders(plan.fronts.keys())
                    .find(|id| !taken.contains(id));
                if let Some(id) = id
                    && plan
                        .fronts
                        .keys()
                        .any(|key| self.claims.owner(key) == Some(name))
                {
                    taken.insert(id);
                    self.actual.set_id(name.clone(), id);
                }
            }
        }
        let orphans: Vec<u32> = self
            .actual
            .ports
            .keys()
            .copied()
            .filter(|id| !taken.contains(id))
            .collect();
        for id in orphans {
            let service = orphan(id);
            let name = PortName {
                service: service.clone(),
                port: "".into(),
                protocol: Protocol::TCP,
                family: Family::V4,
            };
            self.actual.set_id(name, id);
            self.orphans.insert(service);
        }
        self.dirty.extend(self.plans.keys().cloned());
        if !self.whole {
            self.hold_endpoints();
            let (orphans, held) = (self.orphans.len(), self.held.len());
            tracing::warn!(
                orphans,
                held,
                "not everything is known yet, or something was refused: what an earlier process programmed stays"
            );
        }
    }

    /// Lets ports without any endpoint keep those of an earlier process: what names them may be
    /// what was refused.
    fn hold_endpoints(&mut self) {
        for (service, plans) in &self.plans {
            let lost = plans.iter().filter(|(name, plan)| {
                let id = self.actual.id(name);
                let port = id.and_then(|id| self.actual.ports.get(&id));
                !plan.has_endpoints && port.is_some_and(|port| !port.backends.is_empty())
            });
            let lost: BTreeSet<_> = lost.map(|(name, _)| name.clone()).collect();
            if !lost.is_empty() {
                self.held.insert(service.clone(), lost);
            }
        }
    }
}

/// The name of what an earlier process programmed under an id. No object can have it, since a
/// namespace is never empty.
fn orphan(id: u32) -> ObjectName {
    ObjectName::new("", format!("orphan-{id}"))
}
