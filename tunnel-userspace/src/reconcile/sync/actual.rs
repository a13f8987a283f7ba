//! What the maps hold, as this process knows it: read once, then kept.

use std::collections::BTreeSet;

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tunnel_common::{
    service::{Front, FrontKey, Membership, Source, State},
    table::Sizes,
};

use super::{
    alloc::{Indices, count},
    lists::Lists,
    occupied::Occupied,
};
use crate::{
    model::ObjectName,
    plan::{PortName, PortPlan, Target},
    reconcile::{
        access::Counts,
        grace::{Entry, Retired},
    },
};

/// A front that is programmed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Programmed {
    /// The index of its record.
    pub(crate) index: u32,
    /// Its record.
    pub(crate) record: Front,
}

/// What is programmed for one service id.
#[derive(Debug, Default)]
pub(crate) struct PortUse {
    /// The fronts whose records carry the id.
    pub(crate) fronts: LiteMap<FrontKey, ()>,
    /// The backends that serve.
    pub(crate) backends: LiteMap<Target, u32>,
}

/// The words of a backend that change.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::reconcile) struct Standing {
    pub(in crate::reconcile) state: State,
    pub(super) sets: Membership,
}

/// What the maps hold.
#[derive(Debug)]
pub(crate) struct Actual {
    pub(crate) sizes: Sizes,
    pub(crate) fronts: HashMap<FrontKey, Programmed>,
    /// The backends of each set.
    pub(in crate::reconcile) sets: Lists<u32>,
    /// The clients that may use restricted fronts.
    pub(in crate::reconcile) sources: Lists<Source>,
    pub(crate) ports: HashMap<u32, PortUse>,
    /// The ids of the ports of each Service.
    pub(crate) ids: HashMap<ObjectName, LiteMap<PortName, u32>>,
    /// The last standing of each backend index, 0 of one that was never used.
    pub(super) standings: Vec<Standing>,
    pub(crate) used_backends: u32,
    pub(crate) free_fronts: Indices,
    pub(crate) free_backends: Indices,
    /// Neither in use nor free.
    pub(in crate::reconcile) occupied: Occupied,
    pub(crate) free_ids: Indices,
}

impl Actual {
    /// What maps hold that were just made.
    pub(crate) fn empty(sizes: Sizes) -> Self {
        let none = BTreeSet::new();
        Self {
            sizes,
            fronts: HashMap::new(),
            sets: Lists::new(sizes.slot_entries()),
            sources: Lists::shared(sizes.source_entries()),
            ports: HashMap::new(),
            ids: HashMap::new(),
            standings: vec![Standing::default(); count(sizes.backend_entries())],
            used_backends: 0,
            free_fronts: Indices::new(sizes.front_entries(), &none),
            free_backends: Indices::new(sizes.backend_entries(), &none),
            occupied: Occupied::default(),
            free_ids: Indices::new(sizes.front_entries(), &none),
        }
    }

    /// The indices of the backends that serve.
    pub(super) fn used_backends(&self) -> BTreeSet<u32> {
        let ports = self.ports.values();
        ports
            .flat_map(|port| port.backends.values().copied())
            .collect()
    }

    /// The last standing of a backend index.
    pub(in crate::reconcile) fn standing(&self, index: u32) -> Standing {
        let known = self.standings.get(count(index));
        known.copied().unwrap_or_default()
    }

    /// Notes the standing of a backend index.
    pub(super) fn note(&mut self, index: u32, change: impl FnOnce(&mut Standing)) {
        self.standings.get_mut(count(index)).map(change);
    }

    /// The id of a port, if it has one.
    pub(crate) fn id(&self, name: &PortName) -> Option<u32> {
        self.ids.get(&name.service)?.get(name).copied()
    }

    /// Gives an id to a port.
    pub(crate) fn set_id(&mut self, name: PortName, id: u32) {
        let ids = self.ids.entry(name.service.clone());
        ids.or_insert_with(|| LiteMap::with_capacity(1))
            .insert(name, id);
    }

    /// The first wanted one of the ids that hold fronts of a plan.
    pub(super) fn holder(
        &self,
        plan: &PortPlan,
        is_wanted: impl FnMut(&u32) -> bool,
    ) -> Option<u32> {
        let known = plan.fronts.keys().filter_map(|key| self.fronts.get(key));
        known.map(|front| front.record.service).find(is_wanted)
    }

    /// The index of a backend of a service that serves there.
    pub(crate) fn backend(&self, id: u32, target: &Target) -> Option<u32> {
        self.ports.get(&id)?.backends.get(target).copied()
    }

    /// The records of a port.
    pub(crate) fn records(&self, id: u32) -> impl Iterator<Item = &Front> {
        let ports = self.ports.get(&id).into_iter();
        let keys = ports.flat_map(|port| port.fronts.keys());
        keys.filter_map(|key| Some(&self.fronts.get(key)?.record))
    }

    /// The clients that may use some front of a port, as they are programmed; none where all may use
    /// all.
    pub(crate) fn sources_of(&self, id: u32) -> &[Source] {
        let mut lists = self.records(id).map(|it| self.sources.items(it.sources));
        lists.find(|list| !list.is_empty()).unwrap_or_default()
    }

    /// Counts one more record that uses its lists.
    pub(crate) fn hold(&mut self, record: &Front) {
        self.sets.hold(record.cluster);
        self.sets.hold(record.local);
        self.sources.hold(record.sources);
    }

    /// Counts one record less, and retires each list with the last.
    pub(crate) fn release(&mut self, record: &Front, retired: &mut Retired) {
        let sets = [record.cluster, record.local].into_iter();
        let slots = sets.filter_map(|set| self.sets.release(set));
        retired.0.extend(slots.map(Entry::Slots));
        let sources = self.sources.release(record.sources);
        retired.0.extend(sources.map(Entry::Sources));
    }

    /// Finds the indices of backends that an earlier process, or a program that ran until now, left
    /// occupied. A grace period must have passed since the maps were read.
    pub(crate) fn find_occupied(&mut self, reader: &impl Counts) {
        let used = self.used_backends();
        (self.occupied, self.free_backends) =
            Occupied::find(reader, self.sizes.backend_entries(), used);
    }

    /// Takes the name of a port from its id.
    pub(crate) fn forget_name(&mut self, name: &PortName) {
        if let Some(ids) = self.ids.get_mut(&name.service) {
            ids.remove(name);
            if ids.is_empty() {
                self.ids.remove(&name.service);
            }
        }
    }

    /// Makes room for so many Services, so that they are put there in one go.
    pub(crate) fn make_room(&mut self, services: usize) {
        self.fronts.reserve(services);
        self.sets.make_room(services);
        self.ports.reserve(services);
        self.ids.reserve(services);
    }

    /// The ids that no port has.
    pub(crate) fn nameless(&self) -> BTreeSet<u32> {
        let named = self.ids.values().flat_map(LiteMap::values).copied();
        let mut nameless: BTreeSet<u32> = self.ports.keys().copied().collect();
        for id in named {
            nameless.remove(&id);
        }
        nameless
    }

    /// How much is in use.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            fronts: self.fronts.len(),
            slots: self.sets.used,
            sources: self.sources.used,
            backends: self.used_backends,
        }
    }

    /// How many fronts and service ids differ between two readings.
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

    /// The lists that a record leads to.
    fn lists(&self, record: &Front) -> ([&[u32]; 2], &[Source]) {
        let sets = [record.cluster, record.local].map(|set| self.sets.items(set));
        (sets, self.sources.items(record.sources))
    }

    /// The backends of a port, and the sets that each is in.
    fn placed(&self, id: u32) -> Option<(&LiteMap<Target, u32>, Vec<Membership>)> {
        let backends = &self.ports.get(&id)?.backends;
        let sets = backends.values().map(|index| self.standing(*index).sets);
        Some((backends, sets.collect()))
    }

    /// Takes the names of the ids that are programmed from an earlier reading.
    pub(crate) fn take_names(&mut self, earlier: &mut Self) {
        for (service, mut ids) in std::mem::take(&mut earlier.ids) {
            ids.retain(|_, id| self.ports.contains_key(id));
            if !ids.is_empty() {
                self.ids.insert(service, ids);
            }
        }
    }
}

/// How much of the maps is in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) fronts: usize,
    pub(crate) slots: u32,
    pub(crate) sources: u32,
    pub(crate) backends: u32,
}

impl Usage {
    /// Whether this is more than another, in any respect.
    pub(crate) const fn exceeds(&self, other: &Self) -> bool {
        self.fronts > other.fronts
            || self.slots > other.slots
            || self.sources > other.sources
            || self.backends > other.backends
    }
}
