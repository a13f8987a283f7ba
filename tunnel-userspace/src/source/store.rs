//! Stores the objects from all sources. Each source writes to its own overlay. If several overlays contain
//! the same object, the one in the first overlay is used. Changes wake the control loop, which takes all of
//! them in a single update.

mod node_names;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::{Notify, watch};

use self::node_names::NodeNames;
use crate::model::{
    ClusterUpdate, EndpointSlice, Kind, NodeList, Object, ObjectId, ObjectName, ServiceState,
};

/// A source's progress towards a complete list, in ascending order. The phase of the store is the lowest
/// phase among its sources.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum SyncPhase {
    /// The source has not received its first complete list yet.
    #[default]
    Listing,
    /// The source has not responded since the daemon started, and its objects were saved by an earlier
    /// process.
    Stale,
    /// A complete list has been received, but some of its objects or files can't be used.
    Partial,
    /// A complete list has been received, and all of its objects are in use.
    Complete,
}

/// The objects from all sources, as read by the control loop.
#[derive(Debug, Default)]
pub struct Store {
    shared: Arc<Shared>,
}

/// The objects from one source, as written by that source.
#[derive(Debug)]
pub struct Overlay {
    shared: Arc<Shared>,
    index: usize,
}

/// A batch of changes to an overlay. It holds the store's lock until it is dropped, so all of its changes
/// become visible at once.
pub(super) struct OverlayEdit<'a> {
    state: MutexGuard<'a, State>,
    changed: &'a Notify,
    index: usize,
    /// The monotonic time at which the changes that follow were noticed.
    pub(super) noticed_at: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The overlays, in order of precedence.
    overlays: Vec<OverlayState>,
    /// The number of sources that are running.
    running: usize,
    /// The EndpointSlices in use, by Service. Each list is sorted by name.
    slices: BTreeMap<ObjectName, Vec<Arc<EndpointSlice>>>,
    /// The objects that have changed since the last update; `None` until the first update, which contains all
    /// objects.
    dirty: Option<BTreeSet<ObjectId>>,
    /// The time at which the oldest change since the last update was noticed; `None` if nothing has changed.
    oldest_change: Option<Duration>,
    /// The names of the Nodes in use.
    node_names: NodeNames,
    /// The value of `nodes_current` in the last update.
    has_sent_current_nodes: Option<bool>,
}

/// The objects from one source.
#[derive(Debug, Default)]
struct OverlayState {
    objects: BTreeMap<Kind, BTreeMap<ObjectName, Object>>,
    phase: SyncPhase,
    /// True if a Node that is not in the overlay does not exist, as far as the source knows. `None` if this follows
    /// from the phase.
    has_current_nodes: Option<bool>,
}

impl Store {
    /// Adds an overlay for a source. Overlays take precedence over those added after them.
    pub fn overlay(&mut self) -> Overlay {
        let mut state = self.shared.lock();
        let index = state.overlays.len();
        state.overlays.push(OverlayState::default());
        state.running += 1;
        Overlay {
            shared: Arc::clone(&self.shared),
            index,
        }
    }

    /// Returns a receiver for the names of the Nodes in use.
    #[must_use]
    pub fn nodes(&self) -> watch::Receiver<NodeList> {
        self.shared.lock().node_names.subscribe()
    }

    /// Waits for changes and takes all of them. Returns `None` if no source is running any more.
    ///
    /// The first update is returned once every source has delivered its first complete list. It contains all
    /// objects, so any object that is missing from it has been deleted.
    pub async fn update(&mut self) -> Option<ClusterUpdate> {
        loop {
            {
                let mut state = self.shared.lock();
                let update = state.take_update();
                if update.is_some() || state.running == 0 {
                    return update;
                }
            }
            self.shared.changed.notified().await;
        }
    }

    /// Takes the changes made since the last update. Returns `None` if there are none.
    pub fn take_update(&mut self) -> Option<ClusterUpdate> {
        self.shared.lock().take_update()
    }
}

impl Overlay {
    /// Begins a batch of changes that were noticed at the given time.
    pub(super) fn edit(&self, at: Duration) -> OverlayEdit<'_> {
        OverlayEdit {
            state: self.shared.lock(),
            changed: &self.shared.changed,
            index: self.index,
            noticed_at: at,
        }
    }

    /// Returns the phase of the source.
    pub(super) fn phase(&self) -> SyncPhase {
        self.read(|overlay| overlay.phase)
    }

    /// Returns how many objects of each kind the overlay contains.
    pub(super) fn counts(&self) -> BTreeMap<Kind, usize> {
        self.read(|overlay| {
            let kinds = overlay.objects.iter();
            kinds.map(|(kind, all)| (*kind, all.len())).collect()
        })
    }

    /// Returns the object with the given ID.
    pub(super) fn get(&self, id: &ObjectId) -> Option<Object> {
        self.read(|overlay| overlay.get(id).cloned())
    }

    /// Returns all objects.
    pub(super) fn objects(&self) -> Vec<Object> {
        self.read(|overlay| {
            overlay
                .objects
                .values()
                .flat_map(BTreeMap::values)
                .cloned()
                .collect()
        })
    }

    fn read<T: Default>(&self, read: impl FnOnce(&OverlayState) -> T) -> T {
        let state = self.shared.lock();
        state.overlays.get(self.index).map(read).unwrap_or_default()
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        self.shared.lock().running -= 1;
        self.shared.changed.notify_one();
    }
}

impl OverlayEdit<'_> {
    /// Inserts, replaces or removes an object. Returns false if nothing changed because the overlay already
    /// had an equal object.
    pub(super) fn put(&mut self, id: &ObjectId, object: Option<Object>) -> bool {
        self.state.put(self.index, id, object, self.noticed_at)
    }

    /// Sets the phase of the source.
    pub(super) fn set_phase(&mut self, phase: SyncPhase) {
        let before = self.state.phase();
        if let Some(overlay) = self.state.overlays.get_mut(self.index) {
            overlay.phase = phase;
        }
        if self.state.phase() > before {
            self.state.record_change(self.noticed_at);
        }
    }

    /// Records whether a Node that is not in the overlay does not exist, as far as the source knows.
    pub(super) fn set_current_nodes(&mut self, are_current: bool) {
        if let Some(overlay) = self.state.overlays.get_mut(self.index) {
            overlay.has_current_nodes = Some(are_current);
        }
    }

    /// Returns the IDs of all objects of one kind.
    pub(super) fn ids(&self, kind: Kind) -> impl Iterator<Item = ObjectId> {
        let overlay = self.state.overlays.get(self.index);
        overlay
            .into_iter()
            .flat_map(move |overlay| overlay.ids(kind))
    }
}

impl Drop for OverlayEdit<'_> {
    fn drop(&mut self) {
        self.state.publish_nodes(self.noticed_at);
        if self.state.has_update() {
            self.changed.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OverlayState {
    fn get(&self, id: &ObjectId) -> Option<&Object> {
        self.objects.get(&id.kind)?.get(&id.name)
    }

    /// Returns the IDs of all objects of one kind, sorted by name.
    fn ids(&self, kind: Kind) -> impl Iterator<Item = ObjectId> {
        let names = self.objects.get(&kind).into_iter().flat_map(BTreeMap::keys);
        names.map(move |name| ObjectId {
            kind,
            name: name.clone(),
        })
    }

    fn nodes_are_current(&self) -> bool {
        self.has_current_nodes
            .unwrap_or(self.phase == SyncPhase::Complete)
    }

    /// Inserts, replaces or removes an object, and returns the previous one. The outer `Option` is `None` if
    /// nothing changed.
    fn put(&mut self, id: &ObjectId, object: Option<Object>) -> Option<Option<Object>> {
        let objects = self.objects.entry(id.kind).or_default();
        if objects.get(&id.name) == object.as_ref() {
            return None;
        }
        Some(match object {
            Some(object) => objects.insert(id.name.clone(), object),
            None => objects.remove(&id.name),
        })
    }
}

impl State {
    /// Inserts, replaces or removes an object in an overlay. Returns true if this changed the overlay.
    fn put(&mut self, index: usize, id: &ObjectId, object: Option<Object>, at: Duration) -> bool {
        let Some((overlay, later)) = self
            .overlays
            .get_mut(index..)
            .and_then(<[_]>::split_first_mut)
        else {
            return false;
        };
        let Some(before) = overlay.put(id, object.clone()) else {
            return false;
        };
        let hidden = || later.iter().find_map(|overlay| overlay.get(id)).cloned();
        let (before, now) = (before.or_else(hidden), object.or_else(hidden));
        let mut earlier = self.overlays.iter().take(index);
        if before != now && earlier.all(|overlay| overlay.get(id).is_none()) {
            self.record_replacement(id, before, now, at);
        }
        true
    }

    /// Records a change to the objects in use: an object was inserted, replaced or removed.
    fn record_replacement(
        &mut self,
        id: &ObjectId,
        before: Option<Object>,
        now: Option<Object>,
        at: Duration,
    ) {
        if id.kind == Kind::Node {
            self.node_names.set(&id.name.name, now.is_some());
        }
        match id.kind {
            Kind::Service | Kind::Node | Kind::ConfigMap | Kind::Pod | Kind::ServiceCidr => {
                self.mark_dirty(id.clone(), at);
            }
            Kind::EndpointSlice => {
                for (object, is_new) in [(before, false), (now, true)] {
                    if let Some(Object::EndpointSlice(slice)) = object {
                        self.put_slice(slice, is_new, at);
                    }
                }
            }
        }
    }

    /// Adds or removes one of a Service's EndpointSlices. EndpointSlices may arrive before their Service.
    fn put_slice(&mut self, slice: Arc<EndpointSlice>, is_new: bool, at: Duration) {
        let owner = ObjectId {
            kind: Kind::Service,
            name: slice.service.clone(),
        };
        let slices = self.slices.entry(owner.name.clone());
        // Most Services have only one EndpointSlice.
        let slices = slices.or_insert_with(|| Vec::with_capacity(1));
        match slices.binary_search_by(|known| known.name.cmp(&slice.name)) {
            Ok(index) => drop(slices.remove(index)),
            Err(index) if is_new => slices.insert(index, slice),
            Err(_) => {}
        }
        if slices.is_empty() {
            self.slices.remove(&owner.name);
        }
        if self.get(&owner).is_some() {
            self.mark_dirty(owner, at);
        }
    }

    /// Records that the next update must contain an object.
    fn mark_dirty(&mut self, id: ObjectId, at: Duration) {
        if let Some(dirty) = &mut self.dirty {
            dirty.insert(id);
        }
        self.record_change(at);
    }

    fn record_change(&mut self, at: Duration) {
        self.oldest_change = Some(self.oldest_change.map_or(at, |since| since.min(at)));
    }

    /// Returns the object from the first overlay that contains it.
    fn get(&self, id: &ObjectId) -> Option<&Object> {
        self.overlays.iter().find_map(|overlay| overlay.get(id))
    }

    fn phase(&self) -> SyncPhase {
        let phases = self.overlays.iter().map(|overlay| overlay.phase);
        phases.min().unwrap_or_default()
    }

    fn nodes_are_current(&self) -> bool {
        let mut overlays = self.overlays.iter();
        !self.overlays.is_empty() && overlays.all(OverlayState::nodes_are_current)
    }

    /// Publishes the names of the Nodes, if they have changed. If they have become current, or are not current any
    /// more, there is an update, even if no object has changed.
    fn publish_nodes(&mut self, at: Duration) {
        let is_current = self.nodes_are_current();
        self.node_names.publish(is_current);
        if self
            .has_sent_current_nodes
            .is_some_and(|sent| sent != is_current)
        {
            self.record_change(at);
        }
    }

    fn has_update(&self) -> bool {
        self.oldest_change.is_some() && self.phase() > SyncPhase::Listing
    }

    fn take_update(&mut self) -> Option<ClusterUpdate> {
        if !self.has_update() {
            return None;
        }
        let phase = self.phase();
        let mut update = ClusterUpdate {
            synced: true,
            complete: phase == SyncPhase::Complete,
            nodes_current: self.nodes_are_current(),
            stale: phase == SyncPhase::Stale,
            noticed_at: self.oldest_change.take()?,
            ..ClusterUpdate::default()
        };
        self.has_sent_current_nodes = Some(update.nodes_current);
        let dirty = self.dirty.replace(BTreeSet::new());
        for id in dirty.unwrap_or_else(|| self.all_ids()) {
            let now = self.get(&id).cloned();
            let ObjectId { kind, name } = id;
            match (kind, now) {
                (_, Some(Object::Service(service))) => {
                    let slices = self.slices.get(&name).cloned().unwrap_or_default();
                    let state = ServiceState { service, slices };
                    update.services.push((name, Some(state)));
                }
                (Kind::Service, _) => update.services.push((name, None)),
                (_, Some(Object::Node(node))) => update.nodes.push((name, Some(node))),
                (Kind::Node, _) => update.nodes.push((name, None)),
                (_, Some(Object::ConfigMap(map))) => update.config_maps.push((name, Some(map))),
                (Kind::ConfigMap, _) => update.config_maps.push((name, None)),
                (_, Some(Object::Pod(pod))) => update.pods.push((name, Some(pod))),
                (Kind::Pod, _) => update.pods.push((name, None)),
                (_, Some(Object::ServiceCidr(cidr))) => {
                    update.service_cidrs.push((name, Some(cidr)));
                }
                (Kind::ServiceCidr, _) => update.service_cidrs.push((name, None)),
                (Kind::EndpointSlice, _) => {}
            }
        }
        Some(update)
    }

    /// Returns the IDs of all objects whose kinds are included in updates.
    fn all_ids(&self) -> BTreeSet<ObjectId> {
        let kinds = [
            Kind::Service,
            Kind::Node,
            Kind::ConfigMap,
            Kind::Pod,
            Kind::ServiceCidr,
        ];
        let kinds = kinds.into_iter();
        let of_kind = |kind| {
            self.overlays
                .iter()
                .flat_map(move |overlay| overlay.ids(kind))
        };
        kinds.flat_map(of_kind).collect()
    }
}

#[cfg(test)]
mod tests;
