//! Reconciles the steering maps. A steering address contains the index of its record, so an index must keep
//! its meaning for as long as a connection to that address may be in progress. A removed index is therefore
//! not reused for another key until [`QUARANTINE`] has passed. The time of removal is stored in the maps, so
//! this also holds across restarts.

mod held_addresses;
mod host_namespace;
mod index_allocation;
mod pod_namespaces;
mod quarantined_nodes;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;
use tunnel_common::{
    addr::{Address, Port},
    reason::Reason,
    steering::{Prefix, SteeringKey, SteeringRecord},
    table::MapSizes,
};

pub(super) use self::index_allocation::nanos;
use self::{
    held_addresses::HeldAddresses,
    index_allocation::{FreeIndices, NoIndex, steering_address},
    pod_namespaces::LocalPods,
    quarantined_nodes::QuarantinedNodes,
    view::ProblemLog,
};
pub use self::{index_allocation::QUARANTINE, view::SteeringView};
use super::{
    held_addresses_file::{DAMAGED_FILE, HELD_ADDRESSES_FILE, SavedHolders},
    map_access::{AdoptError, SteeringMaps, WriteError},
    map_sync::to_usize,
};
use crate::{
    model::{
        ClusterUpdate, ConfigMap, LinkNetworks, Node, ObjectName, PodNamespaces, SteeringTargets,
    },
    plan::{
        self, AddressHolders, KnownAddresses, SteeringInputs, SteeringPlan, SteeringProblem,
        SteeringRules,
    },
    publish,
};

/// The settings for steering.
#[derive(Clone, Debug)]
pub struct SteeringSettings {
    /// The rules for which nodes and ports to steer, or `None` if steering is off.
    pub rules: Option<SteeringRules>,
    /// The prefixes from which steering addresses are allocated.
    pub prefixes: Vec<Prefix>,
    /// The port that the ingress listens on.
    pub ingress_port: u16,
}

/// Plans steering and owns the steering maps.
pub struct SteeringReconciler<M> {
    maps: M,
    sizes: MapSizes,
    /// The cookie of the host's network namespace, once the probe has shown it.
    host_namespace: Option<u64>,
    settings: SteeringSettings,
    nodes: BTreeMap<ObjectName, Arc<Node>>,
    config_map: Option<Arc<ConfigMap>>,
    known_addresses: KnownAddresses,
    held_addresses: HeldAddresses,
    /// The keys in the map, each with the index of its record.
    keys: BTreeMap<SteeringKey, u32>,
    /// All records in the map, including those marked as removed.
    records: BTreeMap<u32, SteeringRecord>,
    plan: SteeringPlan,
    /// Keys left by an earlier process that are not planned. They are kept as long as an object is missing
    /// from the sources, since that object may be the one that needs them.
    orphans: BTreeSet<SteeringKey>,
    /// Planned keys for which there is no free index or no free map entry.
    unallocated: BTreeSet<SteeringKey>,
    quarantined: QuarantinedNodes,
    /// The Nodes that get no index for some of their addresses, since they have too many in quarantine.
    waiting: BTreeSet<Arc<str>>,
    /// The problem that occurred when the holders of addresses were restored, if there was one.
    restore_problem: Option<SteeringProblem>,
    synced: bool,
    is_complete: bool,
    /// True if a Node that is not in `nodes` does not exist.
    are_nodes_current: bool,
    /// True if the plan's inputs have changed since the last sync.
    has_changed: bool,
    /// True if a write failed during the last sync.
    has_failed: bool,
    pub(super) known_problems: BTreeSet<SteeringProblem>,
    problem_log: ProblemLog,
    /// The number of problems that have occurred since this process started, by reason.
    pub(super) reason_counts: BTreeMap<Reason, u64>,
    targets: watch::Sender<Arc<SteeringTargets>>,
    pods: LocalPods,
}

impl<M: SteeringMaps> SteeringReconciler<M> {
    /// Takes over the maps with their current contents. `now` is the time since boot.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps can't be read or written.
    pub fn adopt(
        mut maps: M,
        sizes: MapSizes,
        settings: SteeringSettings,
        now: Duration,
    ) -> Result<Self, AdoptError> {
        let records = (0_u32..).zip(maps.records(sizes.steered_entries())?);
        let records: BTreeMap<u32, SteeringRecord> = records
            .filter(|(_, record)| record.kind == SteeringRecord::NODE)
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
            host_namespace: None,
            orphans: keys.keys().copied().collect(),
            settings,
            nodes: BTreeMap::new(),
            config_map: None,
            known_addresses: KnownAddresses::default(),
            held_addresses: HeldAddresses::default(),
            keys,
            records,
            plan: SteeringPlan::default(),
            unallocated: BTreeSet::new(),
            quarantined: QuarantinedNodes::default(),
            waiting: BTreeSet::new(),
            restore_problem: None,
            synced: false,
            is_complete: false,
            are_nodes_current: false,
            has_changed: true,
            has_failed: false,
            known_problems: BTreeSet::new(),
            problem_log: ProblemLog::default(),
            reason_counts: BTreeMap::new(),
            targets: watch::Sender::default(),
            pods: LocalPods::default(),
        };
        // A process that was killed may have left behind records that no key refers to.
        for index in steering.unreferenced_records() {
            steering.mark_removed(index, now)?;
        }
        Ok(steering)
    }

    /// Returns a receiver for the targets that steering addresses stand for, keyed by index.
    #[must_use]
    pub fn targets(&self) -> watch::Receiver<Arc<SteeringTargets>> {
        self.targets.subscribe()
    }

    /// Restores the edge nodes that hold addresses, as saved by an earlier process. If some could not be read, the
    /// status says so for as long as this process runs.
    pub fn restore_holders(&mut self, saved: SavedHolders) {
        self.held_addresses.restore(saved.holders);
        self.restore_problem = saved.problem.map(|problem| SteeringProblem {
            reason: Reason::AddressUnconfirmed,
            node: None,
            object: HELD_ADDRESSES_FILE.to_owned(),
            text: format!(
                "{problem}; it is unknown which edge nodes had these addresses first (the file is kept as \
                 {DAMAGED_FILE})"
            ),
        });
    }

    /// Returns a receiver for the edge nodes that hold addresses, which the next process needs.
    #[must_use]
    pub fn holders(&self) -> watch::Receiver<Arc<AddressHolders>> {
        self.held_addresses.subscribe()
    }

    /// Replaces the addresses of this node. Doesn't write to the maps.
    pub fn set_own_addresses(&mut self, addresses: Arc<BTreeSet<IpAddr>>) {
        let changed = self.known_addresses.set_own(addresses);
        self.replan_if_claimed(changed);
    }

    /// Replaces the networks that this node has routes to. Doesn't write to the maps.
    pub fn set_networks(&mut self, networks: &Arc<LinkNetworks>) {
        let old = self.known_addresses.set_networks(Arc::clone(networks));
        // Each pod has a route, so most changes concern no edge node.
        let mut claimed = self.plan.claimed.iter();
        self.has_changed |= claimed.any(|address| old.find(*address) != networks.find(*address));
    }

    /// Plans steering again if edge nodes claim any of the addresses.
    fn replan_if_claimed(&mut self, changed: Vec<IpAddr>) {
        let mut changed = changed.iter();
        self.has_changed |= changed.any(|address| self.plan.claimed.contains(address));
    }

    /// Returns a receiver for the namespaces of this node's Pods, by address.
    #[must_use]
    pub fn pod_namespaces(&self) -> watch::Receiver<Arc<PodNamespaces>> {
        self.pods.namespaces()
    }

    /// Applies the changes in an update. Doesn't write to the maps.
    pub fn update(&mut self, update: &ClusterUpdate) {
        if let Some(rules) = &self.settings.rules {
            self.pods.update(&update.pods, &rules.own_node);
        }
        for (name, node) in &update.nodes {
            self.has_changed = true;
            match node {
                Some(node) => self.nodes.insert(name.clone(), Arc::clone(node)),
                None => self.nodes.remove(name),
            };
        }
        if self.settings.rules.is_some() {
            for (name, state) in &update.services {
                let changed = self.known_addresses.set_service(name, state.as_ref());
                self.replan_if_claimed(changed);
            }
        }
        let port_config_map = self.settings.rules.as_ref().map(|rules| &rules.config_map);
        for (name, config_map) in &update.config_maps {
            if Some(name) == port_config_map {
                self.has_changed = true;
                self.config_map.clone_from(config_map);
            }
        }
        let old = (self.synced, self.is_complete, self.are_nodes_current);
        self.has_changed |= (update.synced, update.complete, update.nodes_current) != old;
        self.synced |= update.synced;
        self.is_complete = update.complete;
        self.are_nodes_current = update.nodes_current;
    }

    /// Returns true if a change is waiting to be written.
    #[must_use]
    pub const fn has_changed(&self) -> bool {
        self.synced && self.has_changed
    }

    /// Returns true if the last sync left something to retry: a write that failed, a key that is waiting for an
    /// index to come out of quarantine, or an address that is kept for one Node and that another Node claims.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        let is_waiting = !self.unallocated.is_empty() || !self.waiting.is_empty();
        self.synced && (self.has_failed || is_waiting || self.plan.has_reserved)
    }

    /// Plans steering again if its inputs have changed, and writes the differences to the maps. Failed writes
    /// are retried by the next sync.
    pub fn sync(&mut self, now: Duration) {
        if !self.synced {
            return;
        }
        if self.has_changed || self.plan.has_reserved {
            self.plan(now);
        }
        self.has_changed = false;
        let written = self.write(now);
        self.has_failed = written.is_err();
        let mut problems = self.plan.problems.clone();
        problems.extend(self.full_problem());
        problems.extend(self.restore_problem.clone());
        problems.extend(quarantined_nodes::problems(&self.waiting));
        problems.extend(written.err().map(|error| SteeringProblem {
            reason: Reason::WriteFailed,
            node: None,
            object: "the steering maps".to_owned(),
            text: format!("{error}: {}", error.source),
        }));
        self.replace_problems(problems, now);
    }

    /// Plans steering. The Nodes to which addresses are steered hold these addresses from now on.
    fn plan(&mut self, now: Duration) {
        let Some(rules) = &self.settings.rules else {
            self.plan = SteeringPlan::default();
            return;
        };
        let held = &mut self.held_addresses;
        held.release(&self.nodes, self.are_nodes_current, now);
        let inputs = SteeringInputs {
            nodes: &self.nodes,
            config_map: self.config_map.as_deref(),
            known: &self.known_addresses,
            holders: held.holders(),
        };
        self.plan = plan::plan_steering(inputs, rules);
        held.hold(&self.plan.owners);
    }

    fn write(&mut self, now: Duration) -> Result<(), WriteError> {
        self.unallocated.clear();
        self.waiting.clear();
        self.prune_orphans();
        // A failed write may have left records that no key refers to.
        for index in self.unreferenced_records() {
            self.mark_removed(index, now)?;
        }
        let is_stale =
            |key: &SteeringKey| !self.plan.targets.contains_key(key) && !self.orphans.contains(key);
        let stale: Vec<_> = self.keys.keys().copied().filter(is_stale).collect();
        let staying = self.keys.len() - stale.len();
        // Zero if an earlier process with larger maps left more keys than fit.
        let mut room = to_usize(self.sizes.steering).saturating_sub(staying);
        let end = self.probe_index();
        let prefixes = &self.settings.prefixes;
        let mut free = FreeIndices::new(&self.records, &mut self.quarantined, end, prefixes, now);
        // Records are written first, then their targets are published, then the keys are written.
        let mut allocated = BTreeMap::new();
        for (key, target) in &self.plan.targets {
            if let Some(index) = self.allocated_index(key) {
                allocated.insert(*key, index);
                continue;
            }
            let is_new = !self.keys.contains_key(key);
            let has_room = !is_new || room > 0;
            let allocation = if has_room {
                free.allocate(key, &target.node)
            } else {
                Err(NoIndex::Full)
            };
            let (index, to) = match allocation {
                Ok(allocated) => allocated,
                Err(NoIndex::Full) => {
                    self.unallocated.insert(*key);
                    continue;
                }
                Err(NoIndex::NodeWaits) => {
                    self.waiting.insert(Arc::clone(&target.node));
                    continue;
                }
            };
            room -= usize::from(is_new);
            let record = SteeringRecord {
                removed_at: 0,
                key: *key,
                steering_address: to,
                ingress_port: Port::from_host(self.settings.ingress_port),
                kind: SteeringRecord::NODE,
            };
            self.maps.write_record(index, &record)?;
            self.records.insert(index, record);
            allocated.insert(*key, index);
        }
        self.publish(&allocated, true);
        let mut unused = Vec::new();
        // Deletions come first, to make room for new keys.
        for key in stale {
            self.maps.delete_key(&key)?;
            unused.extend(self.keys.remove(&key));
        }
        for (key, index) in &allocated {
            if self.keys.get(key) != Some(index) {
                self.maps.write_key(key, *index)?;
                unused.extend(self.keys.insert(*key, *index));
            }
        }
        for index in unused {
            self.mark_removed(index, now)?;
        }
        self.publish(&allocated, false);
        Ok(())
    }

    /// Drops the orphaned keys that need not be kept. While an object is missing from the sources, a key is
    /// kept if that object may be the key's Node or the ConfigMap that lists the key's port.
    fn prune_orphans(&mut self) {
        let rules = self.settings.rules.as_ref().filter(|_| !self.is_complete);
        let Some(rules) = rules.filter(|rules| !rules.is_own_edge(&self.nodes)) else {
            self.orphans.clear();
            return;
        };
        // The addresses of all known Nodes. The value is true if every Node that has the address is an edge
        // node.
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

    /// Returns a key's index if its record has the right steering address and ingress port.
    fn allocated_index(&self, key: &SteeringKey) -> Option<u32> {
        let index = *self.keys.get(key)?;
        let record = self.records.get(&index)?;
        let to = steering_address(&self.settings.prefixes, key, index)?;
        (record.steering_address == to
            && record.ingress_port == Port::from_host(self.settings.ingress_port))
        .then_some(index)
    }

    /// Returns the indices of all records that no key refers to, except those marked as removed.
    fn unreferenced_records(&self) -> Vec<u32> {
        let referenced: BTreeSet<u32> = self.keys.values().copied().collect();
        let is_unreferenced =
            |record: &SteeringRecord, index| record.removed_at == 0 && !referenced.contains(index);
        let unreferenced = self
            .records
            .iter()
            .filter(|(index, it)| is_unreferenced(it, index));
        unreferenced.map(|(index, _)| *index).collect()
    }

    /// Marks a record as removed by setting its time of removal. The rest of the record is unchanged.
    fn mark_removed(&mut self, index: u32, now: Duration) -> Result<(), WriteError> {
        if let Some(target) = self.targets.borrow().get(&index) {
            self.quarantined.add(index, Arc::clone(&target.node));
        }
        if let Some(record) = self.records.get_mut(&index) {
            let removed = SteeringRecord {
                removed_at: nanos(now).max(1),
                ..*record
            };
            self.maps.write_record(index, &removed)?;
            *record = removed;
        }
        Ok(())
    }

    /// Publishes the target of each index. If `with_old` is true, the targets of removed indices stay
    /// published, since their keys still exist.
    fn publish(&self, allocated: &BTreeMap<SteeringKey, u32>, with_old: bool) {
        let mut targets: SteeringTargets = allocated
            .iter()
            .filter_map(|(key, index)| Some((*index, self.plan.targets.get(key)?.clone())))
            .collect();
        if with_old {
            for (index, target) in self.targets.borrow().iter() {
                targets.entry(*index).or_insert_with(|| target.clone());
            }
        }
        publish::publish_if_changed(&self.targets, Arc::new(targets));
    }

    /// Returns the last index, which is reserved for the probe.
    const fn probe_index(&self) -> u32 {
        self.sizes.steered_entries() - 1
    }
}

#[cfg(test)]
pub(in crate::reconcile) mod tests;
