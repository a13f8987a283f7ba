//! Entries of an earlier process that belong to no object of the sources.

use std::collections::{BTreeMap, BTreeSet};

use crate::{model::ObjectName, plan::PortName, reconcile::port_problems::PortProblem};

/// Entries of an earlier process that belong to no object of the sources. They stay as long as an object of
/// the sources is missing or was refused, since it may be the one that requires them.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Orphans {
    /// The ids of entries without a service port. An id has a problem if the kernel refused its removal.
    ids: BTreeMap<u32, Option<PortProblem>>,
    /// Service ports without endpoints that keep the backends of an earlier process.
    keeping: BTreeMap<ObjectName, BTreeSet<PortName>>,
    /// True if no object of the sources is missing, so that the entries may be removed.
    pub(super) may_remove: bool,
}

impl Orphans {
    /// Records that the sources are complete, or that an object is missing. Returns the Services that no
    /// longer keep the backends of an earlier process.
    pub(super) fn set_complete(
        &mut self,
        complete: bool,
    ) -> impl Iterator<Item = ObjectName> + use<> {
        self.may_remove = complete;
        let freed = complete.then(|| std::mem::take(&mut self.keeping));
        freed.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Removes everything, before the maps are read again.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.keeping.clear();
    }

    /// Replaces the ids without a service port.
    pub(super) fn set_ids(&mut self, ids: BTreeSet<u32>) {
        self.ids = ids.into_iter().map(|id| (id, None)).collect();
    }

    /// Adds an id again whose removal the kernel refused, for a retry.
    pub(super) fn add_refused(&mut self, id: u32, problem: PortProblem) {
        self.ids.insert(id, Some(problem));
    }

    /// Removes an id, since a service port gets it. Returns true if it was an orphan.
    pub(super) fn take_id(&mut self, id: u32) -> bool {
        self.ids.remove(&id).is_some()
    }

    /// Takes the ids whose entries must be removed now.
    pub(super) fn take_removable(&mut self) -> impl Iterator<Item = u32> + use<> {
        let due = self.may_remove.then(|| std::mem::take(&mut self.ids));
        due.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Returns true if there are entries to remove now.
    pub(super) fn has_removable(&self) -> bool {
        self.may_remove && !self.ids.is_empty()
    }

    /// Returns the number of ids, and the number of Services that keep backends.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.ids.len(), self.keeping.len())
    }

    /// Lets ports of a Service keep the backends of an earlier process.
    pub(super) fn keep_backends(&mut self, service: &ObjectName, ports: BTreeSet<PortName>) {
        if !ports.is_empty() {
            self.keeping.insert(service.clone(), ports);
        }
    }

    /// Stops keeping backends for a Service, since a source has updated it.
    pub(in crate::reconcile) fn stop_keeping(&mut self, service: &ObjectName) {
        self.keeping.remove(service);
    }

    /// Returns true if a port keeps the backends of an earlier process.
    pub(super) fn keeps_backends(&self, name: &PortName) -> bool {
        let kept = self.keeping.get(&name.service);
        kept.is_some_and(|ports| ports.contains(name))
    }

    /// Returns the problems with entries whose removal the kernel refused.
    pub(super) fn problems(&self) -> impl Iterator<Item = &PortProblem> {
        self.ids.values().flatten()
    }
}
