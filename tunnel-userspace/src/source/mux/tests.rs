use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::timeout;

use super::*;
use crate::{
    model::{ConfigMap, ObjectName},
    source::layer::Layer,
};

const AT: Duration = Duration::from_secs(1);
/// Long enough for what must not happen.
const MOMENT: Duration = Duration::from_secs(1);

fn object(name: &str, value: &str) -> Object {
    Object::ConfigMap(Arc::new(ConfigMap {
        name: ObjectName::new("shop", name),
        data: BTreeMap::from([("value".to_owned(), value.to_owned())]),
    }))
}

/// Two sources and what the mux makes of them.
struct Case {
    layers: [(Layer, Feed); 2],
    updates: mpsc::Receiver<Update>,
    known: BTreeMap<String, String>,
    _draining: watch::Sender<bool>,
    _running: tokio::task::JoinSet<()>,
}

impl Case {
    fn new() -> Self {
        let (mux, mut feeds) = Mux::new(2);
        let second = (Layer::default(), feeds.remove(1));
        let first = (Layer::default(), feeds.remove(0));
        let (sender, updates) = mpsc::channel(1);
        let (draining, stop) = watch::channel(false);
        let mut running = tokio::task::JoinSet::new();
        running.spawn(mux.run(sender, stop));
        Self {
            layers: [first, second],
            updates,
            known: BTreeMap::new(),
            _draining: draining,
            _running: running,
        }
    }

    fn layer(&mut self, index: usize) -> &mut Layer {
        &mut self.layers[index].0
    }

    async fn tell(&mut self, index: usize) {
        let (layer, feed) = &mut self.layers[index];
        let news = layer.take_news().expect("news");
        feed.reserve().await.expect("a mux").send(news);
    }

    async fn synced(&mut self, index: usize) {
        let layer = self.layer(index);
        layer.set_synced(AT);
        layer.set_whole(true, AT);
        self.tell(index).await;
    }

    /// The next update, taken.
    async fn take(&mut self) -> Option<Update> {
        let update = timeout(MOMENT, self.updates.recv()).await.ok()??;
        for (name, config_map) in &update.config_maps {
            match config_map {
                Some(object) => {
                    let value = object.data["value"].clone();
                    self.known.insert(name.name.to_string(), value)
                }
                None => self.known.remove(&*name.name),
            };
        }
        Some(update)
    }

    fn known(&self) -> Vec<(&str, &str)> {
        self.known
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect()
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_told_before_every_source_has_told_its_first_list() {
    let mut case = Case::new();
    case.layer(0).apply(object("a", "first"), AT);
    case.synced(0).await;
    case.layer(1).apply(object("b", "second"), AT);
    case.tell(1).await;
    assert!(case.take().await.is_none());

    case.synced(1).await;

    let update = case.take().await.expect("an update");
    assert!(update.synced && update.whole);
    assert_eq!(case.known(), [("a", "first"), ("b", "second")]);
}

#[tokio::test(start_paused = true)]
async fn the_first_source_counts_and_what_it_hid_comes_back_when_it_says_nothing_any_more() {
    let mut case = Case::new();
    case.layer(0).apply(object("a", "first"), AT);
    case.layer(1).apply(object("a", "second"), AT);
    case.synced(1).await;
    case.synced(0).await;
    case.take().await.expect("an update");
    assert_eq!(case.known(), [("a", "first")]);

    // What the second says meanwhile is hidden, and remembered.
    case.layer(1).apply(object("a", "third"), AT);
    case.tell(1).await;
    assert!(case.take().await.is_none());
    case.layer(0).remove(&object("a", "").id(), AT);
    case.tell(0).await;
    case.take().await.expect("an update");
    assert_eq!(case.known(), [("a", "third")]);

    case.layer(1).remove(&object("a", "").id(), AT);
    case.tell(1).await;
    case.take().await.expect("an update");
    assert!(case.known().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_one_source_may_be_missing_is_missing_from_the_whole() {
    let mut case = Case::new();
    case.synced(0).await;
    case.layer(1).set_synced(AT);
    case.tell(1).await;
    let update = case.take().await.expect("an update");
    assert!(!update.whole);

    case.layer(1).set_whole(true, AT);
    case.tell(1).await;

    assert!(case.take().await.expect("an update").whole);
}

#[tokio::test]
async fn that_a_source_is_heard_of_is_told_even_where_nothing_else_is_new() {
    let mut case = Case::new();
    case.synced(0).await;
    let layer = case.layer(1);
    layer.set_stale(true, AT);
    layer.set_synced(AT);
    case.tell(1).await;
    assert!(case.take().await.expect("an update").stale);

    case.layer(1).set_stale(false, AT);
    case.tell(1).await;

    let update = case.take().await.expect("an update");
    assert!(!update.stale && !update.whole);
}
