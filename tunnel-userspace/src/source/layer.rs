use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::Duration,
};

use super::{Store, standing::Standing};
use crate::model::{Kind, Object, ObjectId};

/// The set of objects that one source stands for, and which of them the mux hasn't been told of.
#[derive(Clone, Debug, Default)]
pub(super) struct Layer {
    objects: BTreeMap<ObjectId, Object>,
    counts: BTreeMap<Kind, usize>,
    /// What changed since the mux was told; nothing before it was told of everything for the first time.
    dirty: Option<BTreeSet<ObjectId>>,
    standing: Standing,
}

/// What changed in a source, as it stands now.
#[derive(Debug)]
pub(super) struct News {
    /// The objects that changed, each once; nothing where one is gone.
    pub(super) changes: Vec<(ObjectId, Option<Object>)>,
    /// Whether the source has told its first whole list.
    pub(super) synced: bool,
    /// Whether it holds everything that it was told.
    pub(super) whole: bool,
    /// Whether it is what an earlier process knew.
    pub(super) stale: bool,
    /// When the oldest of the changes was noticed, on the monotonic clock.
    pub(super) since: Duration,
}

impl Layer {
    /// Takes an object as it stands now, noticed at that time. An object that says nothing new
    /// changes nothing.
    pub(super) fn apply(&mut self, object: Object, at: Duration) {
        let id = object.id();
        let changed = self.dirty.is_some().then(|| id.clone());
        match self.objects.entry(id) {
            Entry::Occupied(current) if *current.get() == object => return,
            Entry::Occupied(mut current) => {
                current.insert(object);
            }
            Entry::Vacant(place) => {
                let count = self.counts.entry(place.key().kind).or_default();
                *count = count.saturating_add(1);
                place.insert(object);
            }
        }
        self.changed(changed, at);
    }

    /// Forgets an object.
    pub(super) fn remove(&mut self, id: &ObjectId, at: Duration) {
        if self.objects.remove(id).is_some() {
            let count = self.counts.entry(id.kind).or_default();
            *count = count.saturating_sub(1);
            self.changed(Some(id.clone()), at);
        }
    }

    fn changed(&mut self, id: Option<ObjectId>, at: Duration) {
        if let Some(dirty) = &mut self.dirty {
            dirty.extend(id);
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
    pub(super) const fn is_changed(&self) -> bool {
        self.standing.is_changed()
    }

    /// Whether the first whole set is here.
    pub(super) const fn is_synced(&self) -> bool {
        self.standing.synced
    }

    /// What changed since the last time; nothing if nothing did.
    pub(super) fn take_news(&mut self) -> Option<News> {
        let since = self.standing.told()?;
        let changes = match self.dirty.replace(BTreeSet::new()) {
            Some(dirty) => {
                let now = |id| {
                    let object = self.objects.get(&id).cloned();
                    (id, object)
                };
                dirty.into_iter().map(now).collect()
            }
            None => {
                let all = self.objects.iter();
                all.map(|(id, object)| (id.clone(), Some(object.clone())))
                    .collect()
            }
        };
        Some(News {
            changes,
            synced: self.standing.synced,
            whole: self.standing.whole,
            stale: self.standing.stale,
            since,
        })
    }

    /// How many objects there are, by kind.
    pub(super) fn counts(&self) -> BTreeMap<Kind, usize> {
        self.counts.clone()
    }

    /// An object.
    pub(super) fn get(&self, id: &ObjectId) -> Option<&Object> {
        self.objects.get(id)
    }

    /// The objects of a kind, by name.
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &ObjectId> {
        self.objects.keys().filter(move |id| id.kind == kind)
    }

    /// Every object; a clone of one shares it.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// What would be told if this were the only source.
    pub(super) fn into_store(mut self) -> Store {
        let at = self.standing.told().unwrap_or_default();
        let mut store = Store::default();
        for object in self.objects.into_values() {
            store.apply(object, at);
        }
        if self.standing.synced {
            store.set_synced(at);
        }
        store.set_whole(self.standing.whole, at);
        store
    }
}

#[cfg(test)]
mod tests;
