//! The owner of the steering maps. The index of an address and port is part of its steering address, so
//! it represents the same target as long as a connect to it may be under way: another key reuses a
//! removed index only after [`QUARANTINE`], and the maps store the removal, across restarts.

mod homes;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_common::{
    addr::{Address, Port},
    reason::Reason,
    steering::{Prefix, Steered, SteeringKey},
    table::Sizes,
};

pub use self::homes::QUARANTINE;
pub(super) use self::homes::nanos;
use self::homes::{Free, address_of};
use super::{
    access::{AdoptError, SteeringMaps, WriteError},
    sync::count,
};
use crate::{
    latest,
    model::{ConfigMap, Node, ObjectName, Targets, Update},
    plan::{self, SteeringPlan, SteeringProblem, SteeringRules},
};

/// The settings of steering.
#[derive(Clone, Debug)]
pub struct SteeringSettings {
    /// The rules for nodes and ports; none if steering is off.
    pub rules: Option<SteeringRules>,
    /// The steering prefixes.
    pub prefixes: Vec<Prefix>,
    /// The port of the ingress.
    pub port: u16,
}

/// The state of steering, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SteeringView {
    /// The number of edge nodes.
    pub edge_nodes: usize,
    /// The number of addresses and ports that are steered.
    pub entries: usize,
    /// The number of addresses and ports that found no room.
    #[serde(default)]
    pub unprogrammed: usize,
    /// True if a write failed and will be retried.
    #[serde(default)]
    pub failing: bool,
    /// The problems, each with its object.
    pub problems: Vec<String>,
}

/// The owner of the steering maps.
pub struct Steering<M> {
    maps: M,
    sizes: Sizes,
    settings: SteeringSettings,
    nodes: BTreeMap<ObjectName, Arc<Node>>,
    config_map: Option<Arc<ConfigMap>>,
    /// The content of the maps: the index of each key, and every record that was ever written.
    keys: BTreeMap<SteeringKey, u32>,
    records: BTreeMap<u32, Steered>,
    plan: SteeringPlan,
    /// Keys of an earlier process that no source has named yet. They stay until the sources hold every
    /// object they were sent.
    orphans: BTreeSet<SteeringKey>,
    /// Keys that found no room.
    homeless: BTreeSet<SteeringKey>,
    synced: bool,
    whole: bool,
    /// True if a change came since the last sync.
    has_changed: bool,
    /// True if the last sync could not write everything.
    has_failed: bool,
    pub(super) known: BTreeSet<SteeringProblem>,
    /// The counter of each reason in this process.
    pub(super) counts: BTreeMap<Reason, u64>,
    targets: watch::Sender<Arc<Targets>>,
}

impl<M: SteeringMaps> Steering<M> {
    /// Adopts the content of the maps. `now` is the time since the machine started.
    ///
    /// # Errors
    ///
    /// The maps can't be read or written.
    pub fn adopt(
        mut maps: M,
        sizes: Sizes,
        settings: SteeringSettings,
        now: Duration,
    ) -> Result<Self, AdoptError> {
        let records = (0_u32..).zip(maps.records(sizes.steered_entries())?);
        let records: BTreeMap<u32, Steered> = records
            .filter(|(_, record)| record.kind == Steered::NODE)
            .collect();
        let mut keys = BTreeMap::new();
        for (key, index) in maps.keys()? {
            if records.get(&index).is_some_and(|record| record.key == key) {
                keys.insert(key, index);
            } else {
                maps.delete_key(&key)?;
            }
        }
        let mut steering = Self {
            maps,
            sizes,
            orphans: keys.keys().copied().collect(),
            settings,
            nodes: BTreeMap::new(),
            config_map: None,
            keys,
            records,
            plan: SteeringPlan::default(),
            homeless: BTreeSet::new(),
            synced: false,
            whole: false,
            has_changed: true,
            has_failed: false,
            known: BTreeSet::new(),
            counts: BTreeMap::new(),
            targets: watch::Sender::default(),
        };
        // A process that was killed may have left records that no key leads to.
        for index in steering.strays() {
            steering.retire(index, now)?;
        }
        Ok(steering)
    }

    /// Returns a receiver of the target of each index.
    #[must_use]
    pub fn targets(&self) -> watch::Receiver<Arc<Targets>> {
        self.targets.subscribe()
    }

    /// Applies the changes of an update. Writes nothing.
    pub fn update(&mut self, update: &Update) {
        for (name, node) in &update.nodes {
            self.has_changed = true;
            match node {
                Some(node) => self.nodes.insert(name.clone(), Arc::clone(node)),
                None => self.nodes.remove(name),
            };
        }
        let wanted = self.settings.rules.as_ref().map(|rules| &rules.config_map);
        for (name, config_map) in &update.config_maps {
            if Some(name) == wanted {
                self.has_changed = true;
                self.config_map.clone_from(config_map);
            }
        }
        self.has_changed |= (update.synced, update.whole) != (self.synced, self.whole);
        self.synced |= update.synced;
        self.whole = update.whole;
    }

    /// Returns true if a change waits to be written.
    #[must_use]
    pub const fn has_changed(&self) -> bool {
        self.synced && self.has_changed
    }

    /// Returns true if another sync may succeed where the last one failed: a write failed, or a
    /// quarantine may have ended.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.synced && (self.has_failed || !self.homeless.is_empty())
    }

    /// Plans, and writes the differences. Failed writes are retried at the next sync.
    pub fn pass(&mut self, now: Duration) {
        if !self.synced {
            return;
        }
        if self.has_changed {
            self.plan = match &self.settings.rules {
                Some(rules) => plan::steering(&self.nodes, self.config_map.as_deref(), rules),
                None => SteeringPlan::default(),
            };
        }
        self.has_changed = false;
        let written = self.write(now);
        self.has_failed = written.is_err();
        let mut problems = self.plan.problems.clone();
        problems.extend(self.no_room());
        problems.extend(written.err().map(|error| SteeringProblem {
            reason: Reason::WriteFailed,
            node: None,
            object: "the steering maps".to_owned(),
            text: format!("{error}: {}", error.source),
        }));
        self.note(problems);
    }

    /// Returns one problem for all keys that found no room, since there may be very many.
    fn no_room(&self) -> Option<SteeringProblem> {
        let first = self.plan.targets.get(self.homeless.first()?)?;
        let others = self.homeless.len() - 1;
        Some(SteeringProblem {
            reason: Reason::SteeringFull,
            node: None,
            object: format!("{first} and {others} more"),
            text: Reason::SteeringFull.meaning().to_owned(),
        })
    }

    fn write(&mut self, now: Duration) -> Result<(), WriteError> {
        self.homeless.clear();
        self.keep_orphans();
        // Records whose key a failed write did not create.
        for index in self.strays() {
            self.retire(index, now)?;
        }
        let is_stale =
            |key: &SteeringKey| !self.plan.targets.contains_key(key) && !self.orphans.contains(key);
        let stale: Vec<_> = self.keys.keys().copied().filter(is_stale).collect();
        let staying = self.keys.len() - stale.len();
        // Zero if an earlier process had more room.
        let mut room = count(self.sizes.steering).saturating_sub(staying);
        let end = self.canary_index();
        let mut free = Free::new(&self.records, end, &self.settings.prefixes, now);
        // Records first, then their targets are published, then the keys are written.
        let mut homes = BTreeMap::new();
        for key in self.plan.targets.keys() {
            if let Some(index) = self.home_of(key) {
                homes.insert(*key, index);
                continue;
            }
            let is_new = !self.keys.contains_key(key);
            let has_room = !is_new || room > 0;
            let Some((index, to)) = has_room.then(|| free.find_home(key)).flatten() else {
                self.homeless.insert(*key);
                continue;
            };
            room -= usize::from(is_new);
            let record = Steered {
                removed: 0,
                key: *key,
                to,
                to_port: Port::from_host(self.settings.port),
                kind: Steered::NODE,
            };
            self.maps.write_record(index, &record)?;
            self.records.insert(index, record);
            homes.insert(*key, index);
        }
        self.publish(&homes, true);
        let mut left = Vec::new();
        // Removed keys make room for new ones.
        for key in stale {
            self.maps.delete_key(&key)?;
            left.extend(self.keys.remove(&key));
        }
        for (key, index) in &homes {
            if self.keys.get(key) != Some(index) {
                self.maps.write_key(key, *index)?;
                left.extend(self.keys.insert(*key, *index));
            }
        }
        for index in left {
            self.retire(index, now)?;
        }
        self.publish(&homes, false);
        Ok(())
    }

    /// Keeps keys of an earlier process that no source names while the sources lack some objects: their
    /// Node, or the list of their port, may be the object that could not be read. Keys that are known to
    /// be unwanted are dropped.
    fn keep_orphans(&mut self) {
        let rules = self.settings.rules.as_ref().filter(|_| !self.whole);
        let Some(rules) = rules.filter(|rules| !rules.is_own_edge(&self.nodes)) else {
            self.orphans.clear();
            return;
        };
        // By address: true if all Nodes with the address are edge nodes.
        let mut known: BTreeMap<Address, bool> = BTreeMap::new();
        for node in self.nodes.values() {
            for address in &node.internal_ips {
                let all_edge = known.entry(Address::from_ip(*address)).or_insert(true);
                *all_edge &= rules.is_edge(node);
            }
        }
        let has_ports = self.config_map.is_some();
        self.orphans.retain(|key| {
            let is_edge = known.get(&key.address);
            let may_be_wanted = is_edge.is_none_or(|is_edge| *is_edge && !has_ports);
            may_be_wanted && !self.plan.targets.contains_key(key)
        });
    }

    /// Returns the index of a key, if its record has the wanted steering address.
    fn home_of(&self, key: &SteeringKey) -> Option<u32> {
        let index = *self.keys.get(key)?;
        let record = self.records.get(&index)?;
        let to = address_of(&self.settings.prefixes, key, index)?;
        (record.to == to && record.to_port == Port::from_host(self.settings.port)).then_some(index)
    }

    /// Writes a key for the probe: a connect to it shows the daemon's own network namespace.
    ///
    /// # Errors
    ///
    /// The maps can't be written. The same holds for the other methods.
    pub fn put_canary(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        let record = Steered {
            removed: 0,
            key: *key,
            to: key.address,
            to_port: key.port,
            kind: Steered::CANARY,
        };
        let index = self.canary_index();
        self.maps.forget_host()?;
        self.maps.write_record(index, &record)?;
        self.maps.write_key(key, index)
    }

    /// Removes the probe's key, and returns the cookie of the network namespace that the programs
    /// stored; 0 if they saw no connect.
    ///
    /// # Errors
    ///
    /// As [`Self::put_canary`], or the maps can't be read.
    pub fn take_canary(&mut self, key: &SteeringKey) -> Result<u64, AdoptError> {
        self.maps.delete_key(key)?;
        Ok(self.maps.host()?)
    }

    /// Returns the records that are not marked as removed, and to which no key leads.
    fn strays(&self) -> Vec<u32> {
        let led: BTreeSet<u32> = self.keys.values().copied().collect();
        let is_stray = |record: &Steered, index| record.removed == 0 && !led.contains(index);
        let strays = self
            .records
            .iter()
            .filter(|(index, it)| is_stray(it, index));
        strays.map(|(index, _)| *index).collect()
    }

    /// Marks a record as removed: only its time of removal changes.
    fn retire(&mut self, index: u32, now: Duration) -> Result<(), WriteError> {
        if let Some(record) = self.records.get_mut(&index) {
            let removed = Steered {
                removed: nanos(now).max(1),
                ..*record
            };
            self.maps.write_record(index, &removed)?;
            *record = removed;
        }
        Ok(())
    }

    /// Publishes the target of each index; with the old ones too, as long as their keys exist.
    fn publish(&self, homes: &BTreeMap<SteeringKey, u32>, with_old: bool) {
        let mut targets: Targets = homes
            .iter()
            .filter_map(|(key, index)| Some((*index, self.plan.targets.get(key)?.clone())))
            .collect();
        if with_old {
            for (index, target) in self.targets.borrow().iter() {
                targets.entry(*index).or_insert_with(|| target.clone());
            }
        }
        latest::put(&self.targets, Arc::new(targets));
    }

    /// Replaces the problems, and logs the new ones.
    fn note(&mut self, problems: BTreeSet<SteeringProblem>) {
        for problem in problems.difference(&self.known) {
            *self.counts.entry(problem.reason).or_default() += 1;
            let reason = problem.reason.label();
            let SteeringProblem { object, text, .. } = problem;
            tracing::warn!(reason, object, text, "not steered as planned");
        }
        for problem in self.known.difference(&problems) {
            let SteeringProblem { object, text, .. } = problem;
            tracing::info!(object, text, "steering problem resolved");
        }
        self.known = problems;
    }

    /// Returns the last index, which is reserved for the probe.
    const fn canary_index(&self) -> u32 {
        self.sizes.steered_entries() - 1
    }

    /// Returns the state for status.
    #[must_use]
    pub fn view(&self) -> SteeringView {
        let in_words = |problem: &SteeringProblem| format!("{}: {}", problem.object, problem.text);
        SteeringView {
            edge_nodes: self.plan.edge_nodes,
            entries: self.keys.len(),
            unprogrammed: self.homeless.len(),
            failing: self.has_failed,
            problems: self.known.iter().map(in_words).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
