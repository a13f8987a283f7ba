use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    sync::Arc,
    time::Duration,
};

use foldhash::HashMap;
use litemap::LiteMap;

use super::standing::Standing;
use crate::model::{
    ConfigMap, EndpointSlice, Kind, Node, Object, ObjectId, ObjectName, Service, ServiceCidr,
    ServiceState, Update,
};

/// The whole set of objects that a source stands for, and which of them the control loop hasn't
/// been told of.
#[derive(Clone, Debug, Default)]
pub struct Store {
    services: BTreeMap<ObjectName, Arc<Service>>,
    /// Slices by the Service that owns them, then by their own name.
    slices: BTreeMap<ObjectName, LiteMap<Arc<str>, Arc<EndpointSlice>>>,
    /// The owner of each slice.
    owners: HashMap<ObjectName, ObjectName>,
    nodes: BTreeMap<ObjectName, Arc<Node>>,
    config_maps: BTreeMap<ObjectName, Arc<ConfigMap>>,
    service_cidrs: BTreeMap<ObjectName, Arc<ServiceCidr>>,
    /// What changed since the control loop was told; nothing before it was told of everything.
    dirty: Option<Dirty>,
    standing: Standing,
}

/// The names of what changed.
#[derive(Clone, Debug, Default)]
struct Dirty {
    services: BTreeSet<ObjectName>,
    nodes: BTreeSet<ObjectName>,
    config_maps: BTreeSet<ObjectName>,
}

impl Store {
    /// Makes room for so many slices, where there are none.
    pub(super) fn make_room(&mut self, slices: usize) {
        if self.owners.is_empty() {
            self.owners.reserve(slices);
        }
    }

    /// Takes an object as it stands now, noticed at that time. An object that says nothing new
    /// changes nothing.
    pub(super) fn apply(&mut self, object: Object, at: Duration) {
        let name = object.name().clone();
        match object {
            Object::Service(service) => {
                if replace(&mut self.services, &name, service) {
                    self.service_changed(name, at);
                }
            }
            Object::EndpointSlice(slice) => self.apply_slice(slice, at),
            Object::Node(node) => {
                if replace(&mut self.nodes, &name, node) {
                    self.node_changed(name, at);
                }
            }
            Object::ConfigMap(config_map) => {
                if replace(&mut self.config_maps, &name, config_map) {
                    self.config_map_changed(name, at);
                }
            }
            Object::ServiceCidr(cidr) => {
                replace(&mut self.service_cidrs, &name, cidr);
            }
        }
    }

    /// Forgets an object.
    pub(super) fn remove(&mut self, id: &ObjectId, at: Duration) {
        let name = &id.name;
        match id.kind {
            Kind::Service => {
                if self.services.remove(name).is_some() {
                    self.service_changed(name.clone(), at);
                }
            }
            Kind::EndpointSlice => self.remove_slice(name, at),
            Kind::Node => {
                if self.nodes.remove(name).is_some() {
                    self.node_changed(name.clone(), at);
                }
            }
            Kind::ConfigMap => {
                if self.config_maps.remove(name).is_some() {
                    self.config_map_changed(name.clone(), at);
                }
            }
            Kind::ServiceCidr => {
                self.service_cidrs.remove(name);
            }
        }
    }

    fn apply_slice(&mut self, slice: Arc<EndpointSlice>, at: Duration) {
        let owner = slice.service.clone();
        let previous = self.owners.insert(slice.name.clone(), owner.clone());
        if let Some(previous) = previous.filter(|previous| *previous != owner) {
            self.leave(previous, &slice.name, at);
        }
        let slices = self.slices.entry(owner.clone());
        let slices = slices.or_insert_with(|| LiteMap::with_capacity(1));
        let known = slices.get(&*slice.name.name);
        if known.is_none_or(|known| **known != *slice) {
            slices.insert(Arc::clone(&slice.name.name), slice);
            self.endpoints_changed(owner, at);
        }
    }

    fn remove_slice(&mut self, name: &ObjectName, at: Duration) {
        if let Some(owner) = self.owners.remove(name) {
            self.leave(owner, name, at);
        }
    }

    /// Takes a slice from the Service that owned it.
    fn leave(&mut self, owner: ObjectName, name: &ObjectName, at: Duration) {
        if let Some(slices) = self.slices.get_mut(&owner) {
            slices.remove(&*name.name);
            if slices.is_empty() {
                self.slices.remove(&owner);
            }
        }
        self.endpoints_changed(owner, at);
    }

    /// Endpoints of a Service that isn't there are of no use until it comes.
    fn endpoints_changed(&mut self, owner: ObjectName, at: Duration) {
        if self.services.contains_key(&owner) {
            self.service_changed(owner, at);
        }
    }

    fn service_changed(&mut self, name: ObjectName, at: Duration) {
        self.changed(at, |dirty| &mut dirty.services, name);
    }

    fn node_changed(&mut self, name: ObjectName, at: Duration) {
        self.changed(at, |dirty| &mut dirty.nodes, name);
    }

    fn config_map_changed(&mut self, name: ObjectName, at: Duration) {
        self.changed(at, |dirty| &mut dirty.config_maps, name);
    }

    fn changed(
        &mut self,
        at: Duration,
        of: impl FnOnce(&mut Dirty) -> &mut BTreeSet<ObjectName>,
        name: ObjectName,
    ) {
        if let Some(dirty) = &mut self.dirty {
            of(dirty).insert(name);
        }
        self.standing.changed(at);
    }

    /// Says that the first whole set is here.
    pub(super) fn set_synced(&mut self, at: Duration) {
        self.standing.set_synced(at);
    }

    /// Says whether this is everything that the source was told. Once it is, that is told.
    pub(super) fn set_whole(&mut self, whole: bool, at: Duration) {
        self.standing.set_whole(whole, at);
    }

    /// Says whether this is what an earlier process knew. Once it isn't, that is told.
    pub(super) fn set_stale(&mut self, stale: bool, at: Duration) {
        self.standing.set_stale(stale, at);
    }

    /// Whether there is something to tell.
    #[must_use]
    pub const fn is_changed(&self) -> bool {
        self.standing.is_changed()
    }

    /// What changed since the last time, as it stands now; nothing if nothing did. The first
    /// update holds everything.
    pub fn take_update(&mut self) -> Option<Update> {
        let since = self.standing.told()?;
        let dirty = self.dirty.replace(Dirty::default());
        let dirty = dirty.unwrap_or_else(|| self.everything());
        let service = |name| {
            let state = self.service(&name);
            (name, state)
        };
        Some(Update {
            services: dirty.services.into_iter().map(service).collect(),
            nodes: states(dirty.nodes, &self.nodes),
            config_maps: states(dirty.config_maps, &self.config_maps),
            synced: self.standing.synced,
            whole: self.standing.whole,
            stale: self.standing.stale,
            since,
        })
    }

    /// The names of all that the control loop is told of.
    fn everything(&self) -> Dirty {
        Dirty {
            services: self.services.keys().cloned().collect(),
            nodes: self.nodes.keys().cloned().collect(),
            config_maps: self.config_maps.keys().cloned().collect(),
        }
    }

    /// A Service with its slices.
    #[must_use]
    pub fn service(&self, name: &ObjectName) -> Option<ServiceState> {
        let service = Arc::clone(self.services.get(name)?);
        let slices = self
            .slices
            .get(name)
            .map(|slices| slices.values().map(Arc::clone).collect());
        Some(ServiceState {
            service,
            slices: slices.unwrap_or_default(),
        })
    }

    /// All Nodes, by name.
    #[must_use]
    pub const fn nodes(&self) -> &BTreeMap<ObjectName, Arc<Node>> {
        &self.nodes
    }

    /// All ConfigMaps, by name.
    #[must_use]
    pub const fn config_maps(&self) -> &BTreeMap<ObjectName, Arc<ConfigMap>> {
        &self.config_maps
    }

    /// All ServiceCIDRs, by name.
    #[must_use]
    pub const fn service_cidrs(&self) -> &BTreeMap<ObjectName, Arc<ServiceCidr>> {
        &self.service_cidrs
    }

    /// How many objects there are, by kind.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Kind, usize> {
        BTreeMap::from([
            (Kind::Service, self.services.len()),
            (Kind::EndpointSlice, self.owners.len()),
            (Kind::Node, self.nodes.len()),
            (Kind::ConfigMap, self.config_maps.len()),
            (Kind::ServiceCidr, self.service_cidrs.len()),
        ])
    }
}

/// The objects of some names, as they stand now.
fn states<T>(
    names: BTreeSet<ObjectName>,
    objects: &BTreeMap<ObjectName, Arc<T>>,
) -> Vec<(ObjectName, Option<Arc<T>>)> {
    let state = |name| {
        let object = objects.get(&name).map(Arc::clone);
        (name, object)
    };
    names.into_iter().map(state).collect()
}

/// Puts a value in place; says whether that changed anything.
fn replace<K: Clone + Ord, V: PartialEq>(
    values: &mut BTreeMap<K, Arc<V>>,
    key: &K,
    value: Arc<V>,
) -> bool {
    match values.entry(key.clone()) {
        Entry::Occupied(current) if **current.get() == *value => false,
        Entry::Occupied(mut current) => {
            current.insert(value);
            true
        }
        Entry::Vacant(place) => {
            place.insert(value);
            true
        }
    }
}

#[cfg(test)]
mod tests;
