//! Map entries left by an earlier process that don't belong to any object from the sources.

use std::collections::{BTreeMap, BTreeSet};

use crate::{model::ObjectName, plan::PortName, reconcile::port_problems::PortProblem};

/// Map entries left by an earlier process that don't belong to any object from the sources. They are kept as
/// long as an object is missing or was refused, since that object may be the one that needs them.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Orphans {
    /// The ids that don't belong to any service port, each with a problem if the kernel refused to remove its
    /// entries.
    ids: BTreeMap<u32, Option<PortProblem>>,
    /// Service ports that have no endpoints and keep the backends left by an earlier process.
    keeping: BTreeMap<ObjectName, BTreeSet<PortName>>,
    /// True if no object is missing from the sources, so that the entries may be removed.
    pub(super) may_remove: bool,
}

impl Orphans {
    /// Records whether the sources are complete or an object is missing. Returns the Services that no longer
    /// keep the backends left by an earlier process.
    pub(super) fn set_complete(
        &mut self,
        complete: bool,
    ) -> impl Iterator<Item = ObjectName> + use<> {
        self.may_remove = complete;
        let freed = complete.then(|| std::mem::take(&mut self.keeping));
        freed.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Forgets all orphans after the maps have been re-read.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.keeping.clear();
    }

    /// Replaces the ids that don't belong to any service port.
    pub(super) fn set_ids(&mut self, ids: BTreeSet<u32>) {
        self.ids = ids.into_iter().map(|id| (id, None)).collect();
    }

    /// Puts back an id whose entries the kernel refused to remove, so that the removal is retried.
    pub(super) fn add_refused(&mut self, id: u32, problem: PortProblem) {
        self.ids.insert(id, Some(problem));
    }

    /// Removes an id because it is being assigned to a service port. Returns true if it was an orphan.
    pub(super) fn take_id(&mut self, id: u32) -> bool {
        self.ids.remove(&id).is_some()
    }

    /// Removes and returns the ids whose map entries must be removed now.
    pub(super) fn take_removable(&mut self) -> impl Iterator<Item = u32> + use<> {
        let due = self.may_remove.then(|| std::mem::take(&mut self.ids));
        due.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Returns true if there are entries to remove now.
    pub(super) fn has_removable(&self) -> bool {
        self.may_remove && !self.ids.is_empty()
    }

    /// Returns the number of orphaned ids and the number of Services that keep backends.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.ids.len(), self.keeping.len())
    }

    /// Lets some of a Service's ports keep the backends left by an earlier process.
    pub(super) fn keep_backends(&mut self, service: &ObjectName, ports: BTreeSet<PortName>) {
        if !ports.is_empty() {
            self.keeping.insert(service.clone(), ports);
        }
    }

    /// Stops keeping backends for a Service, because a source has updated it.
    pub(in crate::reconcile) fn stop_keeping(&mut self, service: &ObjectName) {
        self.keeping.remove(service);
    }

    /// Returns true if a port keeps the backends left by an earlier process.
    pub(super) fn keeps_backends(&self, name: &PortName) -> bool {
        let kept = self.keeping.get(&name.service);
        kept.is_some_and(|ports| ports.contains(name))
    }

    /// Returns the problems with entries that the kernel refused to remove.
    pub(super) fn problems(&self) -> impl Iterator<Item = &PortProblem> {
        self.ids.values().flatten()
    }
}
