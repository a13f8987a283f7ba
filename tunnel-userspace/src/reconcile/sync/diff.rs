//! What must change so that the maps hold what a plan says. Pure.

use std::collections::BTreeMap;

use tunnel_common::{
    reason::Reason,
    select::SOURCES_OF_FRONT,
    service::{Front, FrontKey, Membership, NEAR, Near, Set, Source},
};

use super::{
    actual::Actual,
    alloc::count,
    slots::{near, slots},
};
use crate::{
    model::TrafficPolicy,
    plan::{FrontPlan, PortPlan, Target},
};

/// A set as it is to be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum SetChange {
    /// The set that is there is right.
    Keep(Set),
    /// New slots are needed, with these backends.
    Write(Vec<Target>),
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Shortage {
    /// The reason, as it is counted.
    pub(crate) reason: Reason,
    /// Whether there will be room once the old is freed; else the sizes of the maps are used up.
    pub(crate) is_passing: bool,
}

/// The difference for one service id.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Diff {
    pub(crate) id: u32,
    pub(crate) new_backends: Vec<(Target, Membership)>,
    /// Backends that stay, but not in the sets that they were in.
    pub(crate) moves: Vec<(u32, Membership)>,
    pub(crate) cluster: SetChange,
    pub(crate) local: SetChange,
    pub(crate) upserts: Vec<FrontKey>,
    pub(crate) deletes: Vec<FrontKey>,
    /// Ranges of clients that are not in the map yet.
    pub(crate) new_sources: Vec<Source>,
    pub(crate) gone: Vec<(Target, u32)>,
}

impl Diff {
    /// The difference between what is programmed for an id and its plan.
    pub(crate) fn between(actual: &Actual, id: u32, plan: &PortPlan) -> Self {
        let cluster = set_change(actual, id, &plan.cluster, |front| front.cluster);
        let local = set_change(actual, id, &plan.local, |front| front.local);
        let is_right = |key: &&FrontKey| match (&cluster, &local) {
            (SetChange::Keep(cluster), SetChange::Keep(local)) => {
                let wanted = record(actual, **key, id, plan, (*cluster, *local));
                actual
                    .fronts
                    .get(key)
                    .is_some_and(|front| front.record == wanted)
            }
            (SetChange::Write(_), _) | (_, SetChange::Write(_)) => false,
        };
        let upserts = plan
            .fronts
            .keys()
            .filter(|key| !is_right(key))
            .copied()
            .collect();
        let wanted = memberships(plan);
        let (mut new_backends, mut moves) = (Vec::new(), Vec::new());
        for (target, sets) in &wanted {
            match actual.backend(id, target) {
                None => new_backends.push((**target, *sets)),
                Some(index) if actual.standing(index).sets != *sets => moves.push((index, *sets)),
                Some(_) => {}
            }
        }
        let used_sources = plan.used_sources();
        let new_sources = match actual.sources.find(used_sources) {
            Some(_) => Vec::new(),
            None => used_sources.to_vec(),
        };
        let port = actual.ports.get(&id);
        let deletes = port
            .into_iter()
            .flat_map(|port| port.fronts.keys())
            .filter(|key| !plan.fronts.contains_key(key))
            .copied()
            .collect();
        let gone = port
            .into_iter()
            .flat_map(|port| &port.backends)
            .filter(|(target, _)| !wanted.contains_key(target))
            .map(|(target, index)| (*target, *index))
            .collect();
        Self {
            id,
            new_backends,
            moves,
            cluster,
            local,
            upserts,
            deletes,
            new_sources,
            gone,
        }
    }

    /// Whether there is room for it: first by the sizes that the config gives, then by what is
    /// free at this moment. Room beyond the sizes is only for the time in which the old and the
    /// new are both there.
    pub(crate) fn room(&self, actual: &Actual) -> Result<(), Shortage> {
        let full = |reason, is_passing| Err(Shortage { reason, is_passing });
        let is_new = |key: &&FrontKey| !actual.fronts.contains_key(key);
        let new_keys = self.upserts.iter().filter(is_new).count();
        let fronts = actual.fronts.len().saturating_add(new_keys);
        let backends = count(actual.used_backends)
            .saturating_add(self.new_backends.len())
            .saturating_sub(self.gone.len());
        let new_slots = self.cluster.new_len().saturating_add(self.local.new_len());
        let slots = count(actual.sets.used)
            .saturating_add(new_slots)
            .saturating_sub(self.old_slots(actual));
        if new_keys > 0 && fronts > count(actual.sizes.fronts) {
            return full(Reason::FrontsFull, false);
        }
        if !self.new_backends.is_empty() && backends > count(actual.sizes.backends) {
            return full(Reason::BackendsFull, false);
        }
        if new_slots > 0 && slots > count(actual.sizes.slots) {
            return full(Reason::SlotsFull, false);
        }
        let of_records = actual.records(self.id).map(|record| record.sources);
        let sources = count(actual.sources.used)
            .saturating_add(self.new_sources.len())
            .saturating_sub(actual.sources.left(of_records));
        let most = count(actual.sizes.sources.min(SOURCES_OF_FRONT));
        if !self.new_sources.is_empty() && (sources > most || self.new_sources.len() > most) {
            return full(Reason::SourcesFull, false);
        }
        if self.upserts.len() > actual.free_fronts.free() {
            return full(Reason::FrontsFull, true);
        }
        if self.new_backends.len() > actual.free_backends.free() {
            return full(Reason::BackendsFull, true);
        }
        Ok(())
    }

    /// How many slots the change leaves behind.
    fn old_slots(&self, actual: &Actual) -> usize {
        let replaced = |change: &SetChange| matches!(change, SetChange::Write(_));
        let (cluster, local) = (replaced(&self.cluster), replaced(&self.local));
        let of_records = actual.records(self.id).flat_map(|record| {
            let cluster = cluster.then_some(record.cluster);
            cluster.into_iter().chain(local.then_some(record.local))
        });
        actual.sets.left(of_records)
    }
}

impl SetChange {
    fn new_len(&self) -> usize {
        match self {
            Self::Keep(_) => 0,
            Self::Write(targets) => targets.len(),
        }
    }
}

/// Every backend of a plan, and the sets that it is in.
fn memberships(plan: &PortPlan) -> BTreeMap<&Target, Membership> {
    let only_serving = plan.serving.iter().map(|target| (target, Membership::NONE));
    let mut all: BTreeMap<_, _> = only_serving.collect();
    let sets = [
        (&plan.cluster, Membership::CLUSTER),
        (&plan.local, Membership::LOCAL),
    ];
    for (targets, set) in sets {
        for target in targets {
            let known = all.entry(target).or_default();
            *known = known.and(set);
        }
    }
    all
}

/// Where ranges of clients are that are not written yet: nowhere.
const UNWRITTEN: Set = Set {
    base: u32::MAX,
    len: u32::MAX,
};

/// The record of a front, once its backends and sets are written.
pub(crate) fn record(
    actual: &Actual,
    key: FrontKey,
    id: u32,
    plan: &PortPlan,
    (cluster, local): (Set, Set),
) -> Front {
    let front = plan.fronts.get(&key);
    let is_local = |policy: fn(&FrontPlan) -> TrafficPolicy| {
        front.is_some_and(|front| policy(front) == TrafficPolicy::Local)
    };
    let (sockets, packets) = (
        is_local(|front| front.sockets),
        is_local(|front| front.packets),
    );
    let of_sockets = if sockets { &plan.local } else { &plan.cluster };
    let is_left_alone = !plan.for_sockets || front.is_some_and(|front| front.has_listener);
    let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
    let restricted = front.filter(|front| plan.is_restricted(front));
    let admits_host = restricted.map(|front| front.admits_host);
    let flags = flag(sockets, Front::SOCKETS_LOCAL)
        | flag(packets, Front::PACKETS_LOCAL)
        | flag(plan.has_endpoints, Front::HAS_ENDPOINTS)
        | flag(is_left_alone, Front::NOT_SOCKETS)
        | flag(admits_host == Some(Some(true)), Front::ADMITS_HOST)
        | flag(admits_host == Some(None), Front::HOST_UNKNOWN);
    Front {
        key,
        service: id,
        cluster,
        algorithm: plan.algorithm,
        flags,
        reserved: 0,
        near: all_near(actual, id, of_sockets),
        local,
        affinity: plan.affinity,
        sources: match restricted {
            Some(_) => actual.sources.find(&plan.sources).unwrap_or(UNWRITTEN),
            None => Set::default(),
        },
    }
}

/// The backends that a record holds itself: all of a small set, none of a larger one.
fn all_near(actual: &Actual, id: u32, targets: &[Target]) -> [Near; NEAR] {
    let mut held = [Near::NONE; NEAR];
    if targets.len() <= NEAR {
        let index = |target| actual.backend(id, target).unwrap_or_default();
        let indices: Vec<_> = targets.iter().map(index).collect();
        let backends = targets.iter().zip(slots(&indices));
        for (place, (target, slot)) in held.iter_mut().zip(backends) {
            *place = near(target, slot);
        }
    }
    held
}

fn set_change(
    actual: &Actual,
    id: u32,
    targets: &[Target],
    of: impl Fn(&Front) -> Set,
) -> SetChange {
    if targets.is_empty() {
        return SetChange::Keep(Set::default());
    }
    let Some(indices) = targets
        .iter()
        .map(|target| actual.backend(id, target))
        .collect::<Option<Vec<_>>>()
    else {
        return SetChange::Write(targets.to_vec());
    };
    let mut known = actual.records(id).map(of);
    known
        .find(|set| actual.sets.items(*set) == indices)
        .map_or_else(|| SetChange::Write(targets.to_vec()), SetChange::Keep)
}
