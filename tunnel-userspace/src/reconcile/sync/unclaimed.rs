//! Entries of an earlier process that belong to no object of the sources.

use std::collections::{BTreeMap, BTreeSet};

use crate::{model::ObjectName, plan::PortName, reconcile::problems::Problem};

/// Entries of an earlier process that belong to no object of the sources. They stay as long as an object of
/// the sources is missing or was refused, since it may be the one that requires them.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Unclaimed {
    /// The ids of entries without a service port. An id has a problem if the kernel refused its removal.
    ids: BTreeMap<u32, Option<Problem>>,
    /// Service ports without endpoints that keep the backends of an earlier process.
    kept: BTreeMap<ObjectName, BTreeSet<PortName>>,
    /// True if no object of the sources is missing, so that the entries may be removed.
    pub(super) may_go: bool,
}

impl Unclaimed {
    /// Sets whether an object of the sources is missing. Returns the Services that no longer keep the
    /// backends of an earlier process.
    pub(super) fn heard(&mut self, whole: bool) -> impl Iterator<Item = ObjectName> + use<> {
        self.may_go = whole;
        let freed = whole.then(|| std::mem::take(&mut self.kept));
        freed.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Removes everything, before the maps are read again.
    pub(super) fn forget(&mut self) {
        self.ids.clear();
        self.kept.clear();
    }

    /// Replaces the ids without a service port.
    pub(super) fn set(&mut self, ids: BTreeSet<u32>) {
        self.ids = ids.into_iter().map(|id| (id, None)).collect();
    }

    /// Adds an id again whose removal the kernel refused, for a retry.
    pub(super) fn put_back(&mut self, id: u32, problem: Problem) {
        self.ids.insert(id, Some(problem));
    }

    /// Removes an id, since a service port gets it. Returns true if it was an orphan.
    pub(super) fn claim(&mut self, id: u32) -> bool {
        self.ids.remove(&id).is_some()
    }

    /// Takes the ids whose entries must be removed now.
    pub(super) fn take_due(&mut self) -> impl Iterator<Item = u32> + use<> {
        let due = self.may_go.then(|| std::mem::take(&mut self.ids));
        due.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Returns true if there are entries to remove now.
    pub(super) fn is_due(&self) -> bool {
        self.may_go && !self.ids.is_empty()
    }

    /// Returns the number of ids, and the number of Services that keep backends.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.ids.len(), self.kept.len())
    }

    /// Lets ports of a Service keep the backends of an earlier process.
    pub(super) fn keep(&mut self, service: &ObjectName, ports: BTreeSet<PortName>) {
        if !ports.is_empty() {
            self.kept.insert(service.clone(), ports);
        }
    }

    /// Stops keeping backends for a Service, since a source has updated it.
    pub(in crate::reconcile) fn told(&mut self, service: &ObjectName) {
        self.kept.remove(service);
    }

    /// Returns true if a port keeps the backends of an earlier process.
    pub(super) fn keeps(&self, name: &PortName) -> bool {
        let kept = self.kept.get(&name.service);
        kept.is_some_and(|ports| ports.contains(name))
    }

    /// Returns the problems with entries whose removal the kernel refused.
    pub(super) fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.ids.values().flatten()
    }
}
