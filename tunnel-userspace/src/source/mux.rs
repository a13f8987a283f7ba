//! Several sources at once, in an order of precedence: where two describe an object of one kind,
//! namespace and name, the word of the first counts, and the other's is there again as soon as the
//! first says nothing of it any more.

use std::collections::HashMap;

use tokio::sync::{mpsc, watch};

use super::{Store, layer::News};
use crate::{
    drain,
    model::{Kind, Object, ObjectId, Update},
};

/// How far a source may be ahead of the mux; it gathers what comes beyond.
const AHEAD: usize = 1;

/// What a source told.
#[derive(Debug)]
struct Told {
    layer: usize,
    news: News,
}

/// Where a source tells the mux what changed.
#[derive(Clone, Debug)]
pub struct Feed {
    layer: usize,
    sender: mpsc::Sender<Told>,
}

/// The right to tell the mux something now.
pub(super) struct Permit<'a> {
    layer: usize,
    permit: mpsc::Permit<'a, Told>,
}

impl Feed {
    /// Waits until there is no mux any more.
    pub(super) async fn closed(&self) {
        self.sender.closed().await;
    }

    /// Waits until the mux takes something; nothing if there is no mux any more.
    pub(super) async fn reserve(&self) -> Option<Permit<'_>> {
        let permit = self.sender.reserve().await.ok()?;
        Some(Permit {
            layer: self.layer,
            permit,
        })
    }
}

impl Permit<'_> {
    /// Tells what changed.
    pub(super) fn send(self, news: News) {
        let layer = self.layer;
        self.permit.send(Told { layer, news });
    }
}

/// The sources as one.
#[derive(Debug)]
pub struct Mux {
    told: mpsc::Receiver<Told>,
    merged: Merged,
}

impl Mux {
    /// A mux of so many sources, and the feed of each, the one whose word counts first.
    #[must_use]
    pub fn new(sources: usize) -> (Self, Vec<Feed>) {
        let (sender, told) = mpsc::channel(AHEAD);
        let feed = |layer| Feed {
            layer,
            sender: sender.clone(),
        };
        let feeds = (0..sources).map(feed).collect();
        let merged = Merged::new(sources);
        (Self { told, merged }, feeds)
    }

    /// Sends what changes until told to stop, until every source is gone, or until nobody listens.
    /// Nothing is sent before every source has told its first whole list: what is missing then
    /// counts as deleted. What changes while the receiver is busy is gathered into one update.
    pub async fn run(mut self, updates: mpsc::Sender<Update>, mut draining: watch::Receiver<bool>) {
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                permit = updates.reserve(), if self.merged.is_due() => {
                    let Ok(permit) = permit else { break };
                    if let Some(update) = self.merged.store.take_update() {
                        permit.send(update);
                    }
                }
                () = updates.closed() => break,
                told = self.told.recv() => {
                    let Some(Told { layer, news }) = told else { break };
                    self.merged.take(layer, news);
                }
            }
        }
    }
}

/// What the sources say together.
#[derive(Debug)]
struct Merged {
    store: Store,
    layers: Vec<Said>,
}

/// What one source says.
#[derive(Clone, Debug, Default)]
struct Said {
    /// Its objects; left empty where it is the only source.
    objects: HashMap<ObjectId, Object>,
    synced: bool,
    whole: bool,
    stale: bool,
}

impl Merged {
    fn new(sources: usize) -> Self {
        Self {
            store: Store::default(),
            layers: vec![Said::default(); sources],
        }
    }

    /// Whether there is something to send.
    fn is_due(&self) -> bool {
        self.store.is_changed() && self.layers.iter().all(|layer| layer.synced)
    }

    fn take(&mut self, index: usize, news: News) {
        let News {
            changes,
            synced,
            whole,
            stale,
            since,
        } = news;
        let is_only = self.layers.len() == 1;
        let is_slice = |(id, _): &&(ObjectId, _)| id.kind == Kind::EndpointSlice;
        self.store
            .make_room(changes.iter().filter(is_slice).count());
        for (id, object) in changes {
            if !is_only && let Some(layer) = self.layers.get_mut(index) {
                match object.clone() {
                    Some(object) => layer.objects.insert(id.clone(), object),
                    None => layer.objects.remove(&id),
                };
            }
            let counts = if is_only { object } else { self.counting(&id) };
            match counts {
                Some(object) => self.store.apply(object, since),
                None => self.store.remove(&id, since),
            }
        }
        if let Some(layer) = self.layers.get_mut(index) {
            (layer.synced, layer.whole, layer.stale) = (synced, whole, stale);
        }
        if self.layers.iter().all(|layer| layer.synced) {
            self.store.set_synced(since);
        }
        let is_whole = self.layers.iter().all(|layer| layer.whole);
        self.store.set_whole(is_whole, since);
        let is_stale = self.layers.iter().any(|layer| layer.stale);
        self.store.set_stale(is_stale, since);
    }

    /// The object by the first source that has a word on it.
    fn counting(&self, id: &ObjectId) -> Option<Object> {
        self.layers
            .iter()
            .find_map(|layer| layer.objects.get(id))
            .cloned()
    }
}

#[cfg(test)]
mod tests;
