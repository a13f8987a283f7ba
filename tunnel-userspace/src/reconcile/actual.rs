//! What the maps hold, as this process knows it: read once, then kept.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tunnel_common::service::{
    Backend, Front, FrontKey, Membership, NEAR, Near, Set, Slot, Source, State,
};

use super::{
    MapReader, ReadError, Sizes,
    alloc::{Indices, Ranges, count},
    grace::Retired,
    occupied::Occupied,
    sources::Sources,
};
use crate::{
    model::ObjectName,
    plan::{PortName, Target},
};

/// A front that is programmed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Programmed {
    /// The index of its record.
    pub(crate) index: u32,
    /// Its record.
    pub(crate) record: Front,
}

/// A range of slots that records use.
#[derive(Debug)]
pub(crate) struct SetUse {
    /// How many records use it.
    pub(crate) records: u32,
    /// The backends of its slots.
    pub(crate) backends: Vec<u32>,
}

/// So many slots are counted faster than looked up.
const FEW: usize = 16;

/// The slots of a set with these backends.
pub(super) fn slots(backends: &[u32]) -> impl Iterator<Item = Slot> {
    let mut shares: HashMap<u32, u32> = HashMap::new();
    let looked_up = if backends.len() > FEW { backends } else { &[] };
    for backend in looked_up {
        let share = shares.entry(*backend).or_default();
        *share = share.saturating_add(1);
    }
    let counted = |backend: &u32| backends.iter().filter(|other| *other == backend).count();
    let slot = move |backend: &u32| Slot {
        backend: *backend,
        share: match shares.get(backend) {
            Some(share) => *share,
            None => u32::try_from(counted(backend)).unwrap_or(u32::MAX),
        },
    };
    backends.iter().map(slot)
}

/// A backend as a record holds it.
pub(super) fn near(target: &Target, slot: Slot) -> Near {
    Near {
        address: target.address,
        port: target.port,
        share: u16::try_from(slot.share).unwrap_or(u16::MAX),
        index: slot.backend,
    }
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
struct Standing {
    state: State,
    sets: Membership,
}

/// What the maps hold that makes no sense: what a crash or a foreign hand left behind.
#[derive(Debug, Default)]
pub(crate) struct Stray {
    /// Keys whose index leads to no sound record of theirs. They go before anything is written,
    /// since what they lead to counts as free.
    pub(crate) fronts: Vec<FrontKey>,
    /// Backends that serve, but no front.
    pub(crate) backends: Vec<u32>,
}

/// What the maps hold.
#[derive(Debug)]
pub(crate) struct Actual {
    pub(crate) sizes: Sizes,
    pub(crate) fronts: HashMap<FrontKey, Programmed>,
    pub(crate) sets: HashMap<u32, SetUse>,
    pub(super) sources: Sources,
    pub(crate) ports: HashMap<u32, PortUse>,
    /// The ids of the ports of each Service.
    pub(crate) ids: HashMap<ObjectName, LiteMap<PortName, u32>>,
    /// The last standing of each backend index, 0 of one that was never used.
    standings: Vec<Standing>,
    pub(crate) used_slots: u32,
    pub(crate) used_backends: u32,
    pub(crate) free_fronts: Indices,
    pub(crate) free_slots: Ranges,
    pub(crate) free_backends: Indices,
    /// Neither in use nor free.
    pub(super) occupied: Occupied,
    pub(crate) free_ids: Indices,
}

impl Actual {
    /// What maps hold that were just made.
    pub(crate) fn empty(sizes: Sizes) -> Self {
        let none = BTreeSet::new();
        Self {
            sizes,
            fronts: HashMap::new(),
            sets: HashMap::new(),
            sources: Sources::new(sizes.source_entries()),
            ports: HashMap::new(),
            ids: HashMap::new(),
            standings: vec![Standing::default(); count(sizes.backend_entries())],
            used_slots: 0,
            used_backends: 0,
            free_fronts: Indices::new(sizes.front_entries(), &none),
            free_slots: Ranges::new(sizes.slot_entries()),
            free_backends: Indices::new(sizes.backend_entries(), &none),
            occupied: Occupied::default(),
            free_ids: Indices::new(sizes.front_entries(), &none),
        }
    }

    /// Reads the maps. What they hold that makes no sense is left out of the result and named in
    /// its second part. Indices of backends that are gone count as free, until
    /// [`Self::find_occupied`] was asked.
    pub(crate) fn read(reader: &impl MapReader, sizes: Sizes) -> Result<(Self, Stray), ReadError> {
        let (backends, standings) = Self::read_backends(reader, sizes)?;
        let mut actual = Self {
            standings,
            ..Self::empty(sizes)
        };
        let mut stray = Stray::default();
        for (key, index) in reader.fronts()? {
            if !actual.adopt(reader, &backends, key, index)? {
                stray.fronts.push(key);
            }
        }
        stray.backends = actual.adopt_backends(&backends);
        let used_fronts = actual.fronts.values().map(|front| front.index).collect();
        let used_backends = actual.used_backends();
        let used_ids = actual.ports.keys().copied().collect();
        actual.used_backends = u32::try_from(used_backends.len()).unwrap_or(u32::MAX);
        actual.free_fronts = Indices::new(sizes.front_entries(), &used_fronts);
        actual.free_backends = Indices::new(sizes.backend_entries(), &used_backends);
        actual.free_ids = Indices::new(sizes.front_entries(), &used_ids);
        Ok((actual, stray))
    }

    /// The backends that serve, and the standing of every index.
    fn read_backends(
        reader: &impl MapReader,
        sizes: Sizes,
    ) -> Result<(BTreeMap<u32, Backend>, Vec<Standing>), ReadError> {
        let all = reader.backends(sizes.backend_entries())?;
        let standings = all.iter().map(|backend| Standing {
            state: backend.state,
            sets: backend.sets,
        });
        let standings = standings.collect();
        let serving = (0_u32..)
            .zip(all)
            .filter(|(_, backend)| backend.state.is_serving());
        Ok((serving.collect(), standings))
    }

    /// The indices of the backends that serve.
    pub(super) fn used_backends(&self) -> BTreeSet<u32> {
        let ports = self.ports.values();
        ports
            .flat_map(|port| port.backends.values().copied())
            .collect()
    }

    /// The last state of a backend index.
    pub(crate) fn state(&self, index: u32) -> State {
        self.standing(index).state
    }

    /// The sets that a backend is in.
    pub(crate) fn sets_of(&self, index: u32) -> Membership {
        self.standing(index).sets
    }

    /// Notes the state of a backend index.
    pub(crate) fn set_state(&mut self, index: u32, state: State) {
        if let Some(known) = self.standings.get_mut(count(index)) {
            known.state = state;
        }
    }

    /// Notes the sets that a backend is in.
    pub(crate) fn set_sets_of(&mut self, index: u32, sets: Membership) {
        if let Some(known) = self.standings.get_mut(count(index)) {
            known.sets = sets;
        }
    }

    fn standing(&self, index: u32) -> Standing {
        let known = self.standings.get(count(index));
        known.copied().unwrap_or_default()
    }

    /// Takes over a front; says whether its record, sets and backends make sense.
    fn adopt(
        &mut self,
        reader: &impl MapReader,
        backends: &BTreeMap<u32, Backend>,
        key: FrontKey,
        index: u32,
    ) -> Result<bool, ReadError> {
        if index >= self.sizes.front_entries() {
            return Ok(false);
        }
        let record = reader.front(index)?;
        let is_sound = record.key == key
            && record.service < self.sizes.front_entries()
            && self.adopt_set(reader, backends, &record, record.cluster)?
            && self.adopt_set(reader, backends, &record, record.local)?
            && self.sources.adopt(reader, record.sources)?
            && self.is_near(backends, &record);
        if is_sound {
            self.hold(record.cluster);
            self.hold(record.local);
            self.sources.hold(record.sources);
            self.fronts.insert(key, Programmed { index, record });
            self.ports
                .entry(record.service)
                .or_default()
                .fronts
                .insert(key, ());
        }
        Ok(is_sound)
    }

    fn adopt_set(
        &mut self,
        reader: &impl MapReader,
        backends: &BTreeMap<u32, Backend>,
        record: &Front,
        set: Set,
    ) -> Result<bool, ReadError> {
        if set.len == 0 {
            return Ok(true);
        }
        if let Some(known) = self.sets.get(&set.base) {
            return Ok(u32::try_from(known.backends.len()) == Ok(set.len));
        }
        let end = set.base.checked_add(set.len);
        if end.is_none_or(|end| end > self.sizes.slot_entries()) {
            return Ok(false);
        }
        let places = set.base..set.base.saturating_add(set.len);
        let held = places.map(|place| reader.slot(place));
        let held = held.collect::<Result<Vec<_>, _>>()?;
        let indices: Vec<_> = held.iter().map(|slot| slot.backend).collect();
        let is_own = |backend: &Backend| backend.service == record.service;
        let are_own = |index: &u32| backends.get(index).is_some_and(is_own);
        if !indices.iter().all(are_own) || !slots(&indices).eq(held) {
            return Ok(false);
        }
        if !self.free_slots.take_at(set.base, set.len) {
            return Ok(false);
        }
        self.used_slots = self.used_slots.saturating_add(set.len);
        self.sets.insert(
            set.base,
            SetUse {
                records: 0,
                backends: indices,
            },
        );
        Ok(true)
    }

    /// Whether the backends that a record holds itself are those of its set.
    fn is_near(&self, backends: &BTreeMap<u32, Backend>, record: &Front) -> bool {
        let of_sockets = record.of_sockets();
        let held = self.sets.get(&of_sockets.base);
        let indices = held
            .filter(|_| (1..=NEAR).contains(&count(of_sockets.len)))
            .map(|set| set.backends.as_slice());
        let mut wanted = [Near::NONE; NEAR];
        for (place, slot) in wanted.iter_mut().zip(slots(indices.unwrap_or_default())) {
            let Some(backend) = backends.get(&slot.backend) else {
                return false;
            };
            let target = Target {
                address: backend.address,
                port: backend.port,
            };
            *place = near(&target, slot);
        }
        record.near == wanted
    }

    fn adopt_backends(&mut self, backends: &BTreeMap<u32, Backend>) -> Vec<u32> {
        let placed: BTreeSet<u32> = self
            .sets
            .values()
            .flat_map(|set| set.backends.iter().copied())
            .collect();
        let mut stray = Vec::new();
        // A backend that is in a set goes before one that only finishes what it has.
        let (first, second): (Vec<_>, Vec<_>) = backends
            .iter()
            .partition(|(index, _)| placed.contains(index));
        for (index, backend) in first.into_iter().chain(second) {
            let target = Target {
                address: backend.address,
                port: backend.port,
            };
            match self.ports.get_mut(&backend.service) {
                Some(port) if !port.backends.contains_key(&target) => {
                    port.backends.insert(target, *index);
                }
                Some(_) | None => {
                    stray.push(*index);
                    self.set_state(*index, backend.state.gone());
                }
            }
        }
        stray
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

    /// The ids that hold some of these fronts.
    pub(crate) fn holders<'a>(
        &'a self,
        fronts: impl Iterator<Item = &'a FrontKey> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        fronts
            .filter_map(|key| self.fronts.get(key))
            .map(|front| front.record.service)
    }

    /// The index of a backend of a service that serves there.
    pub(crate) fn backend(&self, id: u32, target: &Target) -> Option<u32> {
        self.ports.get(&id)?.backends.get(target).copied()
    }

    /// The clients that may use some front of a port, as they are programmed.
    pub(crate) fn sources_of(&self, id: u32) -> Option<Vec<Source>> {
        let fronts = self.ports.get(&id)?.fronts.keys();
        let mut fronts = fronts.filter_map(|key| self.fronts.get(key));
        let sources = fronts.find_map(|front| self.sources.ranges(front.record.sources))?;
        Some(sources.to_vec())
    }

    /// Counts one more record that uses a set.
    pub(crate) fn hold(&mut self, set: Set) {
        if let Some(known) = self.sets.get_mut(&set.base)
            && set.len > 0
        {
            known.records = known.records.saturating_add(1);
        }
    }

    /// Counts one record less that uses a set, and retires the set with the last.
    pub(crate) fn release(&mut self, set: Set, retired: &mut Retired) {
        let Some(known) = self.sets.get_mut(&set.base) else {
            return;
        };
        if set.len == 0 {
            return;
        }
        known.records = known.records.saturating_sub(1);
        if known.records == 0 {
            self.sets.remove(&set.base);
            self.used_slots = self.used_slots.saturating_sub(set.len);
            retired.slots.push(set);
        }
    }

    /// Gives back what no program can reach any more.
    pub(crate) fn free(&mut self, retired: &Retired, reader: &impl MapReader) {
        for index in &retired.fronts {
            self.free_fronts.give(*index);
        }
        for set in &retired.slots {
            self.free_slots.give(set.base, set.len);
        }
        for set in &retired.sources {
            self.sources.give(*set);
        }
        for index in &retired.backends {
            self.free_backend(reader, *index);
        }
        for id in &retired.ids {
            self.free_ids.give(*id);
        }
    }

    /// How much is in use.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            fronts: self.fronts.len(),
            slots: self.used_slots,
            sources: self.sources.used(),
            backends: self.used_backends,
        }
    }

    /// How many fronts and service ids differ between two readings.
    pub(crate) fn differences(&self, other: &Self) -> usize {
        let fronts = self.fronts.iter().filter(|(key, front)| {
            let same = |known: &&Programmed| {
                let (own, others) = (self.backends_of(front), other.backends_of(front));
                let sources = |it: &Self| it.sources.ranges(front.record.sources).cloned();
                known == front && own == others && sources(self) == sources(other)
            };
            other.fronts.get(key).filter(same).is_none()
        });
        let missing = other
            .fronts
            .keys()
            .filter(|key| !self.fronts.contains_key(key));
        let ports = other.ports.iter().filter(|(id, port)| {
            let known = self.ports.get(id).map(|port| &port.backends);
            let mut indices = port.backends.values();
            known.is_none_or(|backends| *backends != port.backends)
                || indices.any(|index| self.sets_of(*index) != other.sets_of(*index))
        });
        fronts
            .count()
            .saturating_add(missing.count())
            .saturating_add(ports.count())
    }

    fn backends_of(&self, front: &Programmed) -> [Option<&Vec<u32>>; 2] {
        [front.record.cluster, front.record.local].map(|set| {
            let known = self.sets.get(&set.base).filter(|_| set.len > 0);
            known.map(|set| &set.backends)
        })
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
