//! The content of the service maps in the memory of this process: read once, then updated with every write.

use std::collections::BTreeSet;

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tunnel_common::{
    service::{Frontend, FrontendKey, Membership, SourceRange, BackendState},
    table::MapSizes,
};

use super::{
    alloc::{Indices, count},
    lists::Lists,
    occupied::Occupied,
};
use crate::{
    model::ObjectName,
    plan::{PortName, PortPlan, BackendTarget},
    reconcile::{
        access::CounterReader,
        grace::{RetiredEntry, Retired},
    },
};

/// A frontend in the maps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Programmed {
    /// The index of its record.
    pub(crate) index: u32,
    /// The record.
    pub(crate) record: Frontend,
}

/// The entries in the maps that have the id of one service port.
#[derive(Debug, Default)]
pub(crate) struct PortUse {
    /// The frontends whose records have the id.
    pub(crate) fronts: LiteMap<FrontendKey, ()>,
    /// The indices of the serving backends.
    pub(crate) backends: LiteMap<BackendTarget, u32>,
}

/// The two words of a backend that change in place.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::reconcile) struct Standing {
    pub(in crate::reconcile) state: BackendState,
    pub(super) sets: Membership,
}

/// The content of the service maps.
#[derive(Debug)]
pub(crate) struct Actual {
    pub(crate) sizes: MapSizes,
    pub(crate) fronts: HashMap<FrontendKey, Programmed>,
    /// The backend indices of each set.
    pub(in crate::reconcile) sets: Lists<u32>,
    /// The ranges of clients that may use restricted frontends.
    pub(in crate::reconcile) sources: Lists<SourceRange>,
    pub(crate) ports: HashMap<u32, PortUse>,
    /// The ids of service ports, by Service.
    pub(crate) ids: HashMap<ObjectName, LiteMap<PortName, u32>>,
    /// The last state and sets of each backend index; zeros for an index that was never used.
    pub(super) standings: Vec<Standing>,
    pub(crate) used_backends: u32,
    pub(crate) free_fronts: Indices,
    pub(crate) free_backends: Indices,
    /// The indices of removed backends that still have open connections.
    pub(in crate::reconcile) occupied: Occupied,
    pub(crate) free_ids: Indices,
}

impl Actual {
    /// Returns the content of newly created maps.
    pub(crate) fn empty(sizes: MapSizes) -> Self {
        let none = BTreeSet::new();
        Self {
            sizes,
            fronts: HashMap::new(),
            sets: Lists::new(sizes.slot_entries()),
            sources: Lists::shared(sizes.source_range_entries()),
            ports: HashMap::new(),
            ids: HashMap::new(),
            standings: vec![Standing::default(); count(sizes.backend_entries())],
            used_backends: 0,
            free_fronts: Indices::new(sizes.frontend_entries(), &none),
            free_backends: Indices::new(sizes.backend_entries(), &none),
            occupied: Occupied::default(),
            free_ids: Indices::new(sizes.frontend_entries(), &none),
        }
    }

    /// Returns the indices of the serving backends.
    pub(super) fn used_backends(&self) -> BTreeSet<u32> {
        let ports = self.ports.values();
        ports
            .flat_map(|port| port.backends.values().copied())
            .collect()
    }

    /// Returns the last state and sets of a backend index.
    pub(in crate::reconcile) fn standing(&self, index: u32) -> Standing {
        let known = self.standings.get(count(index));
        known.copied().unwrap_or_default()
    }

    /// Updates the tracked state and sets of a backend index.
    pub(super) fn note(&mut self, index: u32, change: impl FnOnce(&mut Standing)) {
        self.standings.get_mut(count(index)).map(change);
    }

    /// Returns the id of a service port, if it has one.
    pub(crate) fn id(&self, name: &PortName) -> Option<u32> {
        self.ids.get(&name.service)?.get(name).copied()
    }

    /// Assigns an id to a service port.
    pub(crate) fn set_id(&mut self, name: PortName, id: u32) {
        let ids = self.ids.entry(name.service.clone());
        ids.or_insert_with(|| LiteMap::with_capacity(1))
            .insert(name, id);
    }

    /// Returns the first id that `is_wanted` accepts, of those in the records of a plan's frontends.
    pub(super) fn holder(
        &self,
        plan: &PortPlan,
        is_wanted: impl FnMut(&u32) -> bool,
    ) -> Option<u32> {
        let known = plan.frontends.keys().filter_map(|key| self.fronts.get(key));
        known.map(|front| front.record.service).find(is_wanted)
    }

    /// Returns the index of a service port's serving backend with an address and port.
    pub(crate) fn backend(&self, id: u32, target: &BackendTarget) -> Option<u32> {
        self.ports.get(&id)?.backends.get(target).copied()
    }

    /// Returns the records with the id of a service port.
    pub(crate) fn records(&self, id: u32) -> impl Iterator<Item = &Frontend> {
        let ports = self.ports.get(&id).into_iter();
        let keys = ports.flat_map(|port| port.fronts.keys());
        keys.filter_map(|key| Some(&self.fronts.get(key)?.record))
    }

    /// Returns the ranges of clients that may use the restricted frontends of a port; empty if no frontend
    /// is restricted.
    pub(crate) fn sources_of(&self, id: u32) -> &[SourceRange] {
        let mut lists = self.records(id).map(|it| self.sources.items(it.source_ranges));
        lists.find(|list| !list.is_empty()).unwrap_or_default()
    }

    /// Increments the reference counts of a record's lists.
    pub(crate) fn hold(&mut self, record: &Frontend) {
        self.sets.hold(record.cluster);
        self.sets.hold(record.local);
        self.sources.hold(record.source_ranges);
    }

    /// Decrements the reference counts of a record's lists, and retires each list without a reference.
    pub(crate) fn release(&mut self, record: &Frontend, retired: &mut Retired) {
        let sets = [record.cluster, record.local].into_iter();
        let slots = sets.filter_map(|set| self.sets.release(set));
        retired.0.extend(slots.map(RetiredEntry::Slots));
        let sources = self.sources.release(record.source_ranges);
        retired.0.extend(sources.map(RetiredEntry::SourceRanges));
    }

    /// Finds the free backend indices, and the removed ones that still have open connections. A grace period
    /// must have passed since the maps were read, so that all programs have counted their connections.
    pub(crate) fn find_occupied(&mut self, reader: &impl CounterReader) {
        let used = self.used_backends();
        (self.occupied, self.free_backends) =
            Occupied::find(reader, self.sizes.backend_entries(), used);
    }

    /// Removes a service port from the ids.
    pub(crate) fn forget_name(&mut self, name: &PortName) {
        if let Some(ids) = self.ids.get_mut(&name.service) {
            ids.remove(name);
            if ids.is_empty() {
                self.ids.remove(&name.service);
            }
        }
    }

    /// Reserves memory for this number of Services, so that inserting them doesn't reallocate.
    pub(crate) fn make_room(&mut self, services: usize) {
        self.fronts.reserve(services);
        self.sets.make_room(services);
        self.ports.reserve(services);
        self.ids.reserve(services);
    }

    /// Returns the ids that are assigned to no service port.
    pub(crate) fn nameless(&self) -> BTreeSet<u32> {
        let named = self.ids.values().flat_map(LiteMap::values).copied();
        let mut nameless: BTreeSet<u32> = self.ports.keys().copied().collect();
        for id in named {
            nameless.remove(&id);
        }
        nameless
    }

    /// Returns the number of entries in use, by map.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            fronts: self.fronts.len(),
            slots: self.sets.used,
            sources: self.sources.used,
            backends: self.used_backends,
        }
    }

    /// Returns the number of frontends and service port ids that differ from `other`.
    pub(crate) fn differences(&self, other: &Self) -> usize {
        let new = other.fronts.keys();
        let new = new.filter(|key| !self.fronts.contains_key(key));
        let fronts = self.fronts.keys().chain(new);
        let fronts = fronts.filter(|key| {
            let [known, new] = [self, other].map(|of| {
                let front = of.fronts.get(*key)?;
                Some((front, of.lists(&front.record)))
            });
            known != new
        });
        let ports = other.ports.keys();
        let ports = ports.filter(|id| self.placed(**id) != other.placed(**id));
        fronts.count() + ports.count()
    }

    /// Returns the backend sets and client ranges of a record.
    fn lists(&self, record: &Frontend) -> ([&[u32]; 2], &[SourceRange]) {
        let sets = [record.cluster, record.local].map(|set| self.sets.items(set));
        (sets, self.sources.items(record.source_ranges))
    }

    /// Returns the serving backends of a port, and the set membership of each.
    fn placed(&self, id: u32) -> Option<(&LiteMap<BackendTarget, u32>, Vec<Membership>)> {
        let backends = &self.ports.get(&id)?.backends;
        let sets = backends.values().map(|index| self.standing(*index).sets);
        Some((backends, sets.collect()))
    }

    /// Moves the names of the service ports from an earlier reading, for ids that still exist.
    pub(crate) fn take_names(&mut self, earlier: &mut Self) {
        for (service, mut ids) in std::mem::take(&mut earlier.ids) {
            ids.retain(|_, id| self.ports.contains_key(id));
            if !ids.is_empty() {
                self.ids.insert(service, ids);
            }
        }
    }
}

/// The number of entries in use, by map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) fronts: usize,
    pub(crate) slots: u32,
    pub(crate) sources: u32,
    pub(crate) backends: u32,
}

impl Usage {
    /// Returns true if any number is greater than in `other`.
    pub(crate) const fn exceeds(&self, other: &Self) -> bool {
        self.fronts > other.fronts
            || self.slots > other.slots
            || self.sources > other.sources
            || self.backends > other.backends
    }
}
