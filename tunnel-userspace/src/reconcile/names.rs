//! Which service id belongs to which port of which Service.

use std::collections::BTreeSet;

use tunnel_common::{addr::Protocol, service::FrontKey};

use super::Reconciler;
use crate::{
    model::{Family, ObjectName},
    plan::PortName,
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

    /// The id of a port, given out now if it has none.
    pub(super) fn id(&mut self, name: &PortName, is_wanted: bool) -> Option<u32> {
        let known = self
            .actual
            .ids
            .get(&name.service)
            .and_then(|ids| ids.get(name));
        if let Some(id) = known {
            return Some(*id);
        }
        let id = if is_wanted {
            self.actual.free_ids.take()?
        } else {
            return None;
        };
        self.actual
            .ids
            .entry(name.service.clone())
            .or_default()
            .insert(name.clone(), id);
        Some(id)
    }

    /// Finds the names of the ids that the maps hold: an id belongs to the port that now owns one
    /// of its fronts. An id whose fronts nobody owns is removed as a port without a plan.
    pub(super) fn seed(&mut self) {
        self.seeded = true;
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for (service, plans) in &self.plans {
            for (name, plan) in plans {
                let held = |key: &FrontKey| {
                    self.actual
                        .fronts
                        .get(key)
                        .map(|front| front.record.service)
                };
                let id = plan
                    .fronts
                    .iter()
                    .filter_map(held)
                    .find(|id| !taken.contains(id));
                if let Some(id) = id
                    && plan
                        .fronts
                        .iter()
                        .any(|key| self.claims.owner(key) == Some(name))
                {
                    taken.insert(id);
                    let ids = self.actual.ids.entry(service.clone()).or_default();
                    ids.insert(name.clone(), id);
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
            // A name that no object can have, since a namespace is never empty.
            let service = ObjectName::new("", format!("orphan-{id}"));
            let name = PortName {
                service: service.clone(),
                port: "".into(),
                protocol: Protocol::TCP,
                family: Family::V4,
            };
            self.actual
                .ids
                .entry(service.clone())
                .or_default()
                .insert(name, id);
            self.dirty.insert(service);
        }
        self.dirty.extend(self.plans.keys().cloned());
    }
}
