//! What all sources say, kept once. Each source writes its own overlay; of an object that several
//! overlays have, the version of the first one counts. The owner of the maps is woken for what
//! changes, and takes all of it at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::model::{EndpointSlice, Kind, Object, ObjectId, ObjectName, ServiceState, Update};

/// How far a source is synchronised, in rising order. The store is as far as the last of them.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Phase {
    /// The first whole list hasn't come.
    #[default]
    Listing,
    /// The source wasn't heard of since the start; the objects are those of an earlier process.
    Stale,
    /// The first whole list is here, and a part of what the source says can't be used.
    Partial,
    /// All that the source says is here.
    Whole,
}

/// The end of the store that belongs to the owner of the maps.
#[derive(Debug, Default)]
pub struct Store {
    shared: Arc<Shared>,
}

/// The end of the store that belongs to one source.
#[derive(Debug)]
pub struct Overlay {
    shared: Arc<Shared>,
    index: usize,
}

/// A change of an overlay. It is visible to the owner of the maps as a whole, once this is dropped.
pub(super) struct Edit<'a> {
    state: MutexGuard<'a, State>,
    changed: &'a Notify,
    index: usize,
    /// When the changes that follow were noticed.
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
    /// The slices that count, by the Service that owns them, each list in the order of names.
    slices: BTreeMap<ObjectName, Vec<Arc<EndpointSlice>>>,
    /// What changed since the last update; nothing before the first one, which holds everything.
    dirty: Option<BTreeSet<ObjectId>>,
    /// When the oldest change since the last update was noticed.
    since: Option<Duration>,
}

/// What one source says.
#[derive(Debug, Default)]
struct Said {
    objects: BTreeMap<Kind, BTreeMap<ObjectName, Object>>,
    phase: Phase,
}

impl Store {
    /// Adds the overlay of a further source. Those that were added before it count before it.
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

    /// Waits for changes, and takes all of them. Gives nothing once no source runs any more. The
    /// first update comes after every source's first whole list, and holds everything: an object
    /// that is missing from it counts as deleted.
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

    /// Takes what changed since the last update, if anything did.
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

    /// How far the source is synchronised.
    pub(super) fn phase(&self) -> Phase {
        self.read(|said| said.phase)
    }

    /// How many objects there are, by kind.
    pub(super) fn counts(&self) -> BTreeMap<Kind, usize> {
        self.read(|said| {
            let kinds = said.objects.iter();
            kinds.map(|(kind, all)| (*kind, all.len())).collect()
        })
    }

    /// An object.
    pub(super) fn get(&self, id: &ObjectId) -> Option<Object> {
        self.read(|said| said.get(id).cloned())
    }

    /// Every object.
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
    /// Inserts, updates or removes an object; equal objects are ignored. Says whether the overlay
    /// changed.
    pub(super) fn put(&mut self, id: &ObjectId, object: Option<Object>) -> bool {
        self.state.put(self.index, id, object, self.at)
    }

    /// Sets how far the source is synchronised.
    pub(super) fn set_phase(&mut self, phase: Phase) {
        let before = self.state.phase();
        if let Some(said) = self.state.overlays.get_mut(self.index) {
            said.phase = phase;
        }
        if self.state.phase() > before {
            self.state.changed(self.at);
        }
    }

    /// The objects of a kind.
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

    /// The objects of a kind, by name.
    fn ids(&self, kind: Kind) -> impl Iterator<Item = ObjectId> {
        let names = self.objects.get(&kind).into_iter().flat_map(BTreeMap::keys);
        names.map(move |name| ObjectId {
            kind,
            name: name.clone(),
        })
    }

    /// Puts an object, or nothing, in the place of another one. Gives the one that was there; nothing
    /// if that changes nothing.
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
    /// Puts an object, or nothing, in an overlay. Says whether that changed the overlay.
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

    /// Takes note that another version of an object counts.
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
            // Nothing is programmed from it.
            Kind::ServiceCidr => {}
        }
    }

    /// Adds or removes a slice of a Service. Endpoints of a Service that isn't there are of no use until
    /// it comes.
    fn endpoints_changed(&mut self, slice: Arc<EndpointSlice>, is_now: bool, at: Duration) {
        let owner = ObjectId {
            kind: Kind::Service,
            name: slice.service.clone(),
        };
        let slices = self.slices.entry(owner.name.clone());
        // Most Services have one.
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

    /// Takes note that the next update is to hold an object.
    fn touch(&mut self, id: ObjectId, at: Duration) {
        if let Some(dirty) = &mut self.dirty {
            dirty.insert(id);
        }
        self.changed(at);
    }

    fn changed(&mut self, at: Duration) {
        self.since = Some(self.since.map_or(at, |since| since.min(at)));
    }

    /// The version of an object that counts.
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

    /// Every object that updates hold.
    fn everything(&self) -> BTreeSet<ObjectId> {
        let kinds = [Kind::Service, Kind::Node, Kind::ConfigMap].into_iter();
        let of_kind = |kind| self.overlays.iter().flat_map(move |said| said.ids(kind));
        kinds.flat_map(of_kind).collect()
    }
}

#[cfg(test)]
mod tests;
