//! The contents of the service maps, kept in this process's memory: read once, then updated with every write.

use std::{collections::BTreeSet, sync::Arc};

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tunnel_common::{
    service::{BackendState, Frontend, FrontendKey, IndexRange, Membership, SourceRange},
    table::{MapSize, MapSizes},
};

use super::{
    allocators::{IndexAllocator, to_usize},
    draining_backends::DrainingBackends,
    namespace_shares::{EntryCounts, MapState, NamespaceShares, ShareOfMap},
    ref_counted_lists::RefCountedLists,
};
use crate::{
    model::ObjectName,
    plan::{BackendTarget, PortName, PortPlan},
    reconcile::{
        grace_period::{RetiredEntries, RetiredEntry},
        map_access::{MapReader, ReadError},
    },
};

/// A frontend in the maps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct ProgrammedFrontend {
    /// The index of the frontend's record.
    pub(crate) index: u32,
    /// The frontend's record.
    pub(crate) record: Frontend,
}

/// The map entries that have one service port's id.
#[derive(Debug, Default)]
pub(crate) struct ProgrammedPort {
    /// The frontends whose records have this id.
    pub(crate) frontends: LiteMap<FrontendKey, ()>,
    /// The serving backends, each with its index.
    pub(crate) backends: LiteMap<BackendTarget, u32>,
    /// The namespace of the Service; `None` if the entries belong to no known Service.
    pub(super) namespace: Option<Arc<str>>,
    /// The entries that count against the namespace's share.
    pub(super) counted: EntryCounts,
}

/// The two fields of a backend that are updated in place.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::reconcile) struct BackendStatus {
    pub(in crate::reconcile) state: BackendState,
    pub(in crate::reconcile) membership: Membership,
}

/// The contents of the service maps.
#[derive(Debug)]
pub(crate) struct ActualContent {
    pub(crate) sizes: MapSizes,
    pub(crate) frontends: HashMap<FrontendKey, ProgrammedFrontend>,
    /// The backend sets, as lists of backend indices.
    pub(in crate::reconcile) sets: RefCountedLists<u32>,
    /// The lists of source ranges that restrict frontends.
    pub(in crate::reconcile) source_ranges: RefCountedLists<SourceRange>,
    pub(crate) ports: HashMap<u32, ProgrammedPort>,
    /// The ids of each Service's ports.
    pub(crate) ids: HashMap<ObjectName, LiteMap<PortName, u32>>,
    /// The last state and set membership of each backend index, all zeros for an index that was never used.
    pub(super) backend_statuses: Vec<BackendStatus>,
    pub(crate) used_backends: u32,
    pub(crate) free_frontends: IndexAllocator,
    pub(crate) free_backends: IndexAllocator,
    /// The indices of removed backends that still have open connections.
    pub(in crate::reconcile) draining: DrainingBackends,
    pub(crate) free_ids: IndexAllocator,
    pub(super) shares: NamespaceShares,
}

impl ActualContent {
    /// Returns the contents of newly created maps.
    pub(crate) fn empty(sizes: MapSizes) -> Self {
        let none = BTreeSet::new();
        Self {
            sizes,
            frontends: HashMap::new(),
            sets: RefCountedLists::new(sizes.slot_entries()),
            source_ranges: RefCountedLists::new_shared(sizes.source_range_entries()),
            ports: HashMap::new(),
            ids: HashMap::new(),
            backend_statuses: vec![BackendStatus::default(); to_usize(sizes.backend_entries())],
            used_backends: 0,
            free_frontends: IndexAllocator::new(sizes.frontend_entries(), &none),
            free_backends: IndexAllocator::new(sizes.backend_entries(), &none),
            draining: DrainingBackends::default(),
            free_ids: IndexAllocator::new(sizes.frontend_entries(), &none),
            shares: NamespaceShares::new(100),
        }
    }

    /// Returns the indices of the serving backends.
    pub(super) fn serving_indices(&self) -> BTreeSet<u32> {
        let ports = self.ports.values();
        ports
            .flat_map(|port| port.backends.values().copied())
            .collect()
    }

    /// Returns the last state and set membership of a backend index.
    pub(in crate::reconcile) fn backend_status(&self, index: u32) -> BackendStatus {
        let known = self.backend_statuses.get(to_usize(index));
        known.copied().unwrap_or_default()
    }

    /// Updates the tracked state and set membership of a backend index.
    pub(super) fn update_backend_status(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut BackendStatus),
    ) {
        self.backend_statuses.get_mut(to_usize(index)).map(change);
    }

    /// Returns a service port's id, if it has one.
    pub(crate) fn id(&self, name: &PortName) -> Option<u32> {
        self.ids.get(&name.service)?.get(name).copied()
    }

    /// Assigns an id that was found in the maps to a service port. The removed backends with this id count
    /// against the port's namespace.
    pub(super) fn claim_id(&mut self, name: PortName, id: u32) {
        self.shares.assign_removed(id, &name.service.namespace);
        self.set_id(name, id);
    }

    /// Assigns an id to a service port.
    pub(crate) fn set_id(&mut self, name: PortName, id: u32) {
        self.recount(id, Some(&name.service.namespace));
        let ids = self.ids.entry(name.service.clone());
        ids.or_insert_with(|| LiteMap::with_capacity(1))
            .insert(name, id);
    }

    /// Returns the first id that `is_wanted` accepts among those stored in the records of a plan's frontends.
    pub(super) fn find_id(
        &self,
        plan: &PortPlan,
        is_wanted: impl FnMut(&u32) -> bool,
    ) -> Option<u32> {
        let known = plan
            .frontends
            .keys()
            .filter_map(|key| self.frontends.get(key));
        known
            .map(|frontend| frontend.record.service)
            .find(is_wanted)
    }

    /// Returns the index of the service port's serving backend at the given address and port.
    pub(crate) fn backend(&self, id: u32, target: &BackendTarget) -> Option<u32> {
        self.ports.get(&id)?.backends.get(target).copied()
    }

    /// Returns the frontend records that have a service port's id.
    pub(crate) fn records_of(&self, id: u32) -> impl Iterator<Item = &Frontend> {
        let ports = self.ports.get(&id).into_iter();
        let keys = ports.flat_map(|port| port.frontends.keys());
        keys.filter_map(|key| Some(&self.frontends.get(key)?.record))
    }

    /// Returns the source ranges of a port's restricted frontends, or an empty slice if no frontend is
    /// restricted.
    pub(crate) fn source_ranges_of(&self, id: u32) -> Arc<[SourceRange]> {
        let mut records = self.records_of(id);
        let list = records.find_map(|it| self.source_ranges.shared_items(it.source_ranges));
        list.unwrap_or_default()
    }

    /// Counts the entries of a service port again, after they have changed. `namespace` is `None` if the
    /// port's namespace is unknown or has not changed.
    pub(super) fn recount(&mut self, id: u32, namespace: Option<&Arc<str>>) {
        let slots = self.slots_of(id);
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        if port.namespace.is_none() {
            port.namespace = namespace.cloned();
        }
        let Some(namespace) = &port.namespace else {
            return;
        };
        let counts = EntryCounts {
            frontends: port.frontends.len(),
            slots,
            backends: port.backends.len(),
        };
        let old = std::mem::replace(&mut port.counted, counts);
        self.shares.replace(namespace, old, counts);
    }

    /// Removes a service port that has no entries left.
    pub(super) fn remove_port(&mut self, id: u32) {
        if let Some(port) = self.ports.remove(&id)
            && let Some(namespace) = &port.namespace
        {
            let none = EntryCounts::default();
            self.shares.replace(namespace, port.counted, none);
        }
    }

    /// Returns the counted entries of a service port.
    pub(super) fn counts_of(&self, id: u32) -> EntryCounts {
        let port = self.ports.get(&id);
        port.map(|port| port.counted).unwrap_or_default()
    }

    /// Returns the number of slots in the sets that a port's records refer to.
    fn slots_of(&self, id: u32) -> usize {
        let mut records = self.records_of(id);
        let (first, second) = (records.next(), records.next());
        if second.is_none() {
            return first.map_or(0, |record| {
                let is_shared = record.local == record.cluster;
                let local = if is_shared { 0 } else { record.local.len };
                to_usize(record.cluster.len + local)
            });
        }
        let mut sets: Vec<IndexRange> = Vec::with_capacity(2);
        for set in self.records_of(id).flat_map(|it| [it.cluster, it.local]) {
            // All records of a port usually refer to the same two sets.
            if set.len > 0 && !sets.iter().rev().take(2).any(|known| *known == set) {
                sets.push(set);
            }
        }
        sets.sort_unstable_by_key(|set| set.base);
        sets.dedup();
        sets.into_iter().map(|set| to_usize(set.len)).sum()
    }

    /// Returns a namespace's use and limit of a map, or `None` if the share is not limited.
    pub(super) fn share_of(&self, namespace: &str, size: MapSize) -> Option<ShareOfMap> {
        let map = MapState {
            size,
            capacity: self.sizes.of(size),
            used: self.used(size),
        };
        self.shares.share_of(namespace, map)
    }

    /// Returns the number of entries in use in a map, including those of removed backends that still have
    /// open connections.
    fn used(&self, size: MapSize) -> usize {
        match size {
            MapSize::Frontends => self.frontends.len(),
            MapSize::Slots => to_usize(self.sets.used),
            MapSize::Backends => to_usize(self.used_backends) + self.draining.len(),
            MapSize::SourceRanges => to_usize(self.source_ranges.used),
            MapSize::Steering
            | MapSize::Affinity
            | MapSize::SharedTranslations
            | MapSize::Flows
            | MapSize::Fragments => 0,
        }
    }

    /// Increments the reference counts of the lists that a record refers to.
    pub(crate) fn add_references(&mut self, record: &Frontend) {
        self.sets.add_reference(record.cluster);
        self.sets.add_reference(record.local);
        self.source_ranges.add_reference(record.source_ranges);
    }

    /// Decrements the reference counts of the lists that a record refers to, and retires each list that has
    /// no references left.
    pub(crate) fn remove_references(&mut self, record: &Frontend, retired: &mut RetiredEntries) {
        let sets = [record.cluster, record.local].into_iter();
        let slots = sets.filter_map(|set| self.sets.remove_reference(set));
        retired.0.extend(slots.map(RetiredEntry::Slots));
        let ranges = self.source_ranges.remove_reference(record.source_ranges);
        retired.0.extend(ranges.map(RetiredEntry::SourceRanges));
    }

    /// Finds the free backend indices and those of removed backends that still have open connections. A grace
    /// period must have passed since the maps were read, so that all programs have counted their connections.
    pub(super) fn find_draining(&mut self, reader: &impl MapReader) -> Result<(), ReadError> {
        let (used, entries) = (self.serving_indices(), self.sizes.backend_entries());
        (self.draining, self.free_backends) = DrainingBackends::find(reader, entries, used);
        if self.draining.len() == 0 {
            return Ok(());
        }
        let draining = self.draining.indices();
        let mut former_ids = BTreeSet::new();
        for (index, backend) in (0_u32..).zip(reader.backends(entries)?) {
            if draining.contains(&index) {
                self.shares.add_found(index, backend.service);
                former_ids.insert(backend.service);
            }
        }
        // If the id were reused, the next daemon would take the new owner for that of the removed backends.
        self.free_ids.postpone(&former_ids);
        Ok(())
    }

    /// Removes the id assigned to a service port.
    pub(crate) fn remove_name(&mut self, name: &PortName) {
        if let Some(ids) = self.ids.get_mut(&name.service) {
            ids.remove(name);
            if ids.is_empty() {
                self.ids.remove(&name.service);
            }
        }
    }

    /// Reserves memory for the given number of Services, so that inserting them doesn't reallocate.
    pub(crate) fn reserve(&mut self, services: usize) {
        self.frontends.reserve(services);
        self.sets.reserve(services);
        self.ports.reserve(services);
        self.ids.reserve(services);
    }

    /// Returns the ids that are not assigned to any service port.
    pub(crate) fn unassigned_ids(&self) -> BTreeSet<u32> {
        let named = self.ids.values().flat_map(LiteMap::values).copied();
        let mut unassigned: BTreeSet<u32> = self.ports.keys().copied().collect();
        for id in named {
            unassigned.remove(&id);
        }
        unassigned
    }

    /// Returns the number of entries in use in each map.
    pub(crate) fn usage(&self) -> MapUsage {
        MapUsage {
            frontends: self.frontends.len(),
            slots: self.sets.used,
            source_ranges: self.source_ranges.used,
            backends: self.used_backends,
        }
    }

    /// Returns the number of frontends and service port ids whose entries differ from those in `other`.
    pub(crate) fn differences(&self, other: &Self) -> usize {
        let new = other.frontends.keys();
        let new = new.filter(|key| !self.frontends.contains_key(key));
        let frontends = self.frontends.keys().chain(new);
        let frontends = frontends.filter(|key| {
            let [known, new] = [self, other].map(|of| {
                let frontend = of.frontends.get(*key)?;
                Some((frontend, of.lists_of(&frontend.record)))
            });
            known != new
        });
        let ports = other.ports.keys();
        let ports =
            ports.filter(|id| self.backends_with_sets(**id) != other.backends_with_sets(**id));
        frontends.count() + ports.count()
    }

    /// Returns the backend sets and source ranges that a record refers to.
    fn lists_of(&self, record: &Frontend) -> ([&[u32]; 2], &[SourceRange]) {
        let sets = [record.cluster, record.local].map(|set| self.sets.items(set));
        (sets, self.source_ranges.items(record.source_ranges))
    }

    /// Returns a port's serving backends and the set membership of each.
    fn backends_with_sets(
        &self,
        id: u32,
    ) -> Option<(&LiteMap<BackendTarget, u32>, Vec<Membership>)> {
        let backends = &self.ports.get(&id)?.backends;
        let sets = backends
            .values()
            .map(|index| self.backend_status(*index).membership);
        Some((backends, sets.collect()))
    }

    /// Takes over the service port names from an earlier read of the maps, for ids that still exist.
    pub(crate) fn move_names_from(&mut self, earlier: &mut Self) {
        self.shares.take_owners_from(&earlier.shares);
        for (service, mut ids) in std::mem::take(&mut earlier.ids) {
            ids.retain(|_, id| self.ports.contains_key(id));
            for id in ids.values() {
                self.recount(*id, Some(&service.namespace));
                self.shares.assign_removed(*id, &service.namespace);
            }
            if !ids.is_empty() {
                self.ids.insert(service, ids);
            }
        }
    }
}

/// The number of entries in use in each map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapUsage {
    pub(crate) frontends: usize,
    pub(crate) slots: u32,
    pub(crate) source_ranges: u32,
    pub(crate) backends: u32,
}

impl MapUsage {
    /// Returns the greater number of entries for each map.
    pub(crate) fn max(self, other: &Self) -> Self {
        Self {
            frontends: self.frontends.max(other.frontends),
            slots: self.slots.max(other.slots),
            source_ranges: self.source_ranges.max(other.source_ranges),
            backends: self.backends.max(other.backends),
        }
    }

    /// Returns true if any of the numbers is greater than in `other`.
    pub(crate) const fn exceeds(&self, other: &Self) -> bool {
        self.frontends > other.frontends
            || self.slots > other.slots
            || self.source_ranges > other.source_ranges
            || self.backends > other.backends
    }
}
