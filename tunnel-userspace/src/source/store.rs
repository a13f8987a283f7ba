//! The objects of all sources. Each source writes its own overlay; for an object in several overlays,
//! the version of the first one is used. Changes wake the owner of the maps, which takes all of them at
//! once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::model::{EndpointSlice, Kind, Object, ObjectId, ObjectName, ServiceState, Update};

/// The progress of a source's synchronisation, in rising order. The store has the lowest phase of its
/// sources.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Phase {
    /// The first complete list is missing.
    #[default]
    Listing,
    /// The source was not reached since the start; the objects are those of an earlier process.
    Stale,
    /// The first complete list is present, but some of its objects or files can't be used.
    Partial,
    /// All objects of the source are present.
    Whole,
}

/// The handle by which the owner of the maps reads the store.
#[derive(Debug, Default)]
pub struct Store {
    shared: Arc<Shared>,
}

/// The handle by which one source writes to the store.
#[derive(Debug)]
pub struct Overlay {
    shared: Arc<Shared>,
    index: usize,
}

/// A change of an overlay. The owner of the maps sees it atomically, once this is dropped.
pub(super) struct Edit<'a> {
    state: MutexGuard<'a, State>,
    changed: &'a Notify,
    index: usize,
    /// The time when the following changes were noticed.
    pub(super) at: Duration,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The overlays, in their order of precedence.
    overlays: Vec<Said>,
    /// The sources that still run.
    running: usize,
    /// The slices in use, by the Service that owns them, each list in the order of names.
    slices: BTreeMap<ObjectName, Vec<Arc<EndpointSlice>>>,
    /// The changed objects since the last update; `None` before the first one, which holds everything.
    dirty: Option<BTreeSet<ObjectId>>,
    /// The time when the oldest change since the last update was noticed.
    since: Option<Duration>,
}

/// The objects of one source.
#[derive(Debug, Default)]
struct Said {
    objects: BTreeMap<Kind, BTreeMap<ObjectName, Object>>,
    phase: Phase,
}

impl Store {
    /// Adds the overlay of a further source. Overlays that were added before have precedence.
    pub fn overlay(&mut self) -> Overlay {
        let mut state = self.shared.lock();
        let index = state.overlays.len();
        state.overlays.push(Said::default());
        state.running += 1;
        Overlay {
            shared: Arc::clone(&self.shared),
            index,
        }
    }

    /// Waits for changes, and takes all of them. Returns `None` once no source runs any more. The first
    /// update comes after every source's first complete list and holds every object: one that is missing
    /// from it counts as deleted.
    pub async fn update(&mut self) -> Option<Update> {
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

    /// Takes the changes since the last update, if any.
    pub fn take_update(&mut self) -> Option<Update> {
        self.shared.lock().take_update()
    }
}

impl Overlay {
    /// Begins a change that was noticed at that time.
    pub(super) fn edit(&self, at: Duration) -> Edit<'_> {
        Edit {
            state: self.shared.lock(),
            changed: &self.shared.changed,
            index: self.index,
            at,
        }
    }

    /// Returns the phase of the source.
    pub(super) fn phase(&self) -> Phase {
        self.read(|said| said.phase)
    }

    /// Returns the number of objects, by kind.
    pub(super) fn counts(&self) -> BTreeMap<Kind, usize> {
        self.read(|said| {
            let kinds = said.objects.iter();
            kinds.map(|(kind, all)| (*kind, all.len())).collect()
        })
    }

    /// Returns an object.
    pub(super) fn get(&self, id: &ObjectId) -> Option<Object> {
        self.read(|said| said.get(id).cloned())
    }

    /// Returns every object.
    pub(super) fn objects(&self) -> Vec<Object> {
        self.read(|said| {
            said.objects
                .values()
                .flat_map(BTreeMap::values)
                .cloned()
                .collect()
        })
    }

    fn read<T: Default>(&self, read: impl FnOnce(&Said) -> T) -> T {
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

impl Edit<'_> {
    /// Inserts, updates or removes an object; equal objects are ignored. Returns true if the overlay
    /// changed.
    pub(super) fn put(&mut self, id: &ObjectId, object: Option<Object>) -> bool {
        self.state.put(self.index, id, object, self.at)
    }

    /// Sets the phase of the source.
    pub(super) fn set_phase(&mut self, phase: Phase) {
        let before = self.state.phase();
        if let Some(said) = self.state.overlays.get_mut(self.index) {
            said.phase = phase;
        }
        if self.state.phase() > before {
            self.state.changed(self.at);
        }
    }

    /// Returns the IDs of a kind.
    pub(super) fn ids(&self, kind: Kind) -> impl Iterator<Item = ObjectId> {
        let said = self.state.overlays.get(self.index);
        said.into_iter().flat_map(move |said| said.ids(kind))
    }
}

impl Drop for Edit<'_> {
    fn drop(&mut self) {
        if self.state.is_due() {
            self.changed.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Said {
    fn get(&self, id: &ObjectId) -> Option<&Object> {
        self.objects.get(&id.kind)?.get(&id.name)
    }

    /// Returns the IDs of a kind, by name.
    fn ids(&self, kind: Kind) -> impl Iterator<Item = ObjectId> {
        let names = self.objects.get(&kind).into_iter().flat_map(BTreeMap::keys);
        names.map(move |name| ObjectId {
            kind,
            name: name.clone(),
        })
    }

    /// Inserts, replaces or removes an object. Returns the previous one; `None` if nothing changes.
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
    /// Inserts, replaces or removes an object in an overlay. Returns true if that changed the overlay.
    fn put(&mut self, index: usize, id: &ObjectId, object: Option<Object>, at: Duration) -> bool {
        let Some((said, later)) = self
            .overlays
            .get_mut(index..)
            .and_then(<[_]>::split_first_mut)
        else {
            return false;
        };
        let Some(before) = said.put(id, object.clone()) else {
            return false;
        };
        let hidden = || later.iter().find_map(|said| said.get(id)).cloned();
        let (before, now) = (before.or_else(hidden), object.or_else(hidden));
        let mut earlier = self.overlays.iter().take(index);
        if before != now && earlier.all(|said| said.get(id).is_none()) {
            self.replaced(id, before, now, at);
        }
        true
    }

    /// Records that another version of an object is in use.
    fn replaced(
        &mut self,
        id: &ObjectId,
        before: Option<Object>,
        now: Option<Object>,
        at: Duration,
    ) {
        match id.kind {
            Kind::Service | Kind::Node | Kind::ConfigMap => self.touch(id.clone(), at),
            Kind::EndpointSlice => {
                for (object, is_now) in [(before, false), (now, true)] {
                    if let Some(Object::EndpointSlice(slice)) = object {
                        self.endpoints_changed(slice, is_now, at);
                    }
                }
            }
            // The maps do not depend on it.
            Kind::ServiceCidr => {}
        }
    }

    /// Adds or removes a slice of a Service. The endpoints of a missing Service are kept for its
    /// arrival.
    fn endpoints_changed(&mut self, slice: Arc<EndpointSlice>, is_now: bool, at: Duration) {
        let owner = ObjectId {
            kind: Kind::Service,
            name: slice.service.clone(),
        };
        let slices = self.slices.entry(owner.name.clone());
        // Most Services have one slice.
        let slices = slices.or_insert_with(|| Vec::with_capacity(1));
        match slices.binary_search_by(|known| known.name.cmp(&slice.name)) {
            Ok(place) => drop(slices.remove(place)),
            Err(place) if is_now => slices.insert(place, slice),
            Err(_) => {}
        }
        if slices.is_empty() {
            self.slices.remove(&owner.name);
        }
        if self.get(&owner).is_some() {
            self.touch(owner, at);
        }
    }

    /// Records that the next update must hold an object.
    fn touch(&mut self, id: ObjectId, at: Duration) {
        if let Some(dirty) = &mut self.dirty {
            dirty.insert(id);
        }
        self.changed(at);
    }

    fn changed(&mut self, at: Duration) {
        self.since = Some(self.since.map_or(at, |since| since.min(at)));
    }

    /// Returns the version of an object that is in use.
    fn get(&self, id: &ObjectId) -> Option<&Object> {
        self.overlays.iter().find_map(|said| said.get(id))
    }

    fn phase(&self) -> Phase {
        let phases = self.overlays.iter().map(|said| said.phase);
        phases.min().unwrap_or_default()
    }

    fn is_due(&self) -> bool {
        self.since.is_some() && self.phase() > Phase::Listing
    }

    fn take_update(&mut self) -> Option<Update> {
        if !self.is_due() {
            return None;
        }
        let phase = self.phase();
        let mut update = Update {
            synced: true,
            whole: phase == Phase::Whole,
            stale: phase == Phase::Stale,
            since: self.since.take()?,
            ..Update::default()
        };
        let dirty = self.dirty.replace(BTreeSet::new());
        for id in dirty.unwrap_or_else(|| self.everything()) {
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
                (Kind::EndpointSlice | Kind::ServiceCidr, _) => {}
            }
        }
        Some(update)
    }

    /// Returns the ID of every object that updates hold.
    fn everything(&self) -> BTreeSet<ObjectId> {
        let kinds = [Kind::Service, Kind::Node, Kind::ConfigMap].into_iter();
        let of_kind = |kind| self.overlays.iter().flat_map(move |said| said.ids(kind));
        kinds.flat_map(of_kind).collect()
    }
}

#[cfg(test)]
mod tests;
