use std::collections::{BTreeMap, BTreeSet};

use crate::{model::ObjectName, plan::PortName, reconcile::problems::Problem};

/// What an earlier process programmed and the sources don't name. It stays while they don't hold
/// everything they were told: what names it may be what was refused.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Unclaimed {
    /// Ids that no port has, with the problem of those whose removal was refused.
    ids: BTreeMap<u32, Option<Problem>>,
    /// Ports without endpoints that keep those of an earlier process, by their Service.
    kept: BTreeMap<ObjectName, BTreeSet<PortName>>,
    /// Whether the sources hold everything, so that it may go.
    pub(super) may_go: bool,
}

impl Unclaimed {
    /// Takes whether the sources hold everything. Gives the Services that keep nothing any more.
    pub(super) fn heard(&mut self, whole: bool) -> impl Iterator<Item = ObjectName> + use<> {
        self.may_go = whole;
        let freed = whole.then(|| std::mem::take(&mut self.kept));
        freed.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Forgets everything: the maps are read again.
    pub(super) fn forget(&mut self) {
        self.ids.clear();
        self.kept.clear();
    }

    /// Takes the ids that no port has now.
    pub(super) fn set(&mut self, ids: BTreeSet<u32>) {
        self.ids = ids.into_iter().map(|id| (id, None)).collect();
    }

    /// Keeps an id whose removal was refused, until it is removed.
    pub(super) fn put_back(&mut self, id: u32, problem: Problem) {
        self.ids.insert(id, Some(problem));
    }

    /// Gives an id to a port that takes it over; whether it was unclaimed.
    pub(super) fn claim(&mut self, id: u32) -> bool {
        self.ids.remove(&id).is_some()
    }

    /// The ids that are to be removed now.
    pub(super) fn take_due(&mut self) -> impl Iterator<Item = u32> + use<> {
        let due = self.may_go.then(|| std::mem::take(&mut self.ids));
        due.into_iter().flat_map(BTreeMap::into_keys)
    }

    /// Whether ids are to be removed.
    pub(super) fn is_due(&self) -> bool {
        self.may_go && !self.ids.is_empty()
    }

    /// How many ids there are, and how many Services keep endpoints.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.ids.len(), self.kept.len())
    }

    /// Lets ports of a Service keep the endpoints of an earlier process.
    pub(super) fn keep(&mut self, service: &ObjectName, ports: BTreeSet<PortName>) {
        if !ports.is_empty() {
            self.kept.insert(service.clone(), ports);
        }
    }

    /// Lets a Service that a source told of anew keep nothing.
    pub(in crate::reconcile) fn told(&mut self, service: &ObjectName) {
        self.kept.remove(service);
    }

    /// Whether a port keeps the endpoints of an earlier process.
    pub(super) fn keeps(&self, name: &PortName) -> bool {
        let kept = self.kept.get(&name.service);
        kept.is_some_and(|ports| ports.contains(name))
    }

    /// The problems with ids whose removal was refused.
    pub(super) fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.ids.values().flatten()
    }
}
