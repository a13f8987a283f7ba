use std::collections::{BTreeMap, BTreeSet};

use crate::{model::ObjectName, plan::PortName, reconcile::problems::Problem};

/// Entries of an earlier process that no source names. They stay while the sources lack some objects:
/// the object that names them may have been refused.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Unclaimed {
    /// Ids without a port, with the problem of those whose removal was refused.
    ids: BTreeMap<u32, Option<Problem>>,
    /// Ports without endpoints that keep the entries of an earlier process, by Service.
    kept: BTreeMap<ObjectName, BTreeSet<PortName>>,
    /// True if the sources hold every object, so that entries may be removed.
    pub(super) may_go: bool,
}

impl Unclaimed {
    /// Applies the completeness of the sources. Returns the Services whose ports keep nothing any more.
    pub(super) fn heard(&mut self, whole: bool) -> impl Iterator<Item = ObjectName> + use<> {
        self.may_go = whole;
        let freed = whole.then(|| std::mem::take(&mut self.kept));
        freed.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Clears everything, since the maps are read again.
    pub(super) fn forget(&mut self) {
        self.ids.clear();
        self.kept.clear();
    }

    /// Replaces the ids without a port.
    pub(super) fn set(&mut self, ids: BTreeSet<u32>) {
        self.ids = ids.into_iter().map(|id| (id, None)).collect();
    }

    /// Puts back an id whose removal was refused, to be retried.
    pub(super) fn put_back(&mut self, id: u32, problem: Problem) {
        self.ids.insert(id, Some(problem));
    }

    /// Assigns an id to a port; returns true if it was unclaimed.
    pub(super) fn claim(&mut self, id: u32) -> bool {
        self.ids.remove(&id).is_some()
    }

    /// Returns the ids that are to be removed now.
    pub(super) fn take_due(&mut self) -> impl Iterator<Item = u32> + use<> {
        let due = self.may_go.then(|| std::mem::take(&mut self.ids));
        due.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Returns true if ids are to be removed.
    pub(super) fn is_due(&self) -> bool {
        self.may_go && !self.ids.is_empty()
    }

    /// Returns the number of ids, and the number of Services that keep endpoints.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.ids.len(), self.kept.len())
    }

    /// Makes ports of a Service keep the endpoints of an earlier process.
    pub(super) fn keep(&mut self, service: &ObjectName, ports: BTreeSet<PortName>) {
        if !ports.is_empty() {
            self.kept.insert(service.clone(), ports);
        }
    }

    /// Stops keeping endpoints for a Service that a source has updated.
    pub(in crate::reconcile) fn told(&mut self, service: &ObjectName) {
        self.kept.remove(service);
    }

    /// Returns true if a port keeps the endpoints of an earlier process.
    pub(super) fn keeps(&self, name: &PortName) -> bool {
        let kept = self.kept.get(&name.service);
        kept.is_some_and(|ports| ports.contains(name))
    }

    /// Returns the problems with ids whose removal was refused.
    pub(super) fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.ids.values().flatten()
    }
}
