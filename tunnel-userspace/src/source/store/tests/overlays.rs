//! Tests with several sources that contain the same objects.

use tokio::{sync::mpsc, task::JoinSet, time::timeout};

use super::*;

/// The maximum time to wait for an update.
const TIMEOUT: Duration = Duration::from_secs(1);

fn config_map(value: &str) -> Object {
    Object::ConfigMap(Arc::new(ConfigMap {
        name: name("a"),
        data: BTreeMap::from([("value".to_owned(), value.to_owned())]),
    }))
}

/// A store with two sources that have each delivered a first complete list, and the current value in its only
/// ConfigMap.
struct TwoSources {
    store: Store,
    first: Overlay,
    second: Overlay,
    value: Option<String>,
}

impl TwoSources {
    fn new() -> Self {
        let mut store = Store::default();
        let (first, second) = (store.overlay(), store.overlay());
        for overlay in [&first, &second] {
            overlay.edit(T1).set_phase(SyncPhase::Complete);
        }
        Self {
            store,
            first,
            second,
            value: None,
        }
    }

    /// Takes the next update, if there is one, and returns the current value.
    fn value(&mut self) -> Option<&str> {
        for (_, object) in self
            .store
            .take_update()
            .into_iter()
            .flat_map(|update| update.config_maps)
        {
            self.value = object.map(|object| object.data["value"].clone());
        }
        self.value.as_deref()
    }
}

#[tokio::test(start_paused = true)]
async fn no_update_comes_before_the_first_list_of_every_source() {
    let mut store = Store::default();
    let (first, second) = (store.overlay(), store.overlay());
    apply(&first, [service("a", 1)], T1);
    first.edit(T1).set_phase(SyncPhase::Complete);
    apply(&second, [service("b", 1)], T1);
    let early = timeout(TIMEOUT, store.update()).await;
    early.expect_err("an update before the second list");

    second.edit(T2).set_phase(SyncPhase::Complete);

    let update = timeout(TIMEOUT, store.update())
        .await
        .expect("in time")
        .expect("an update");
    assert!(update.synced && update.complete);
    assert_eq!((update.services.len(), update.noticed_at), (2, T1));
}

#[tokio::test]
async fn the_reader_is_woken_by_each_change_and_by_the_end_of_the_last_source() {
    let (mut store, overlay) = store();
    store.take_update();
    let (sender, mut updates) = mpsc::unbounded_channel();
    let mut owner = JoinSet::new();
    owner.spawn(async move {
        while let Some(update) = store.update().await {
            sender
                .send(update.services.len())
                .expect("the receiver is open");
        }
    });
    for name in ["a", "b"] {
        tokio::task::yield_now().await;
        apply(&overlay, [service(name, 1)], T1);
        let services = timeout(TIMEOUT, updates.recv()).await.expect("in time");
        assert_eq!(services, Some(1));
    }

    drop(overlay);

    assert_eq!(
        timeout(TIMEOUT, updates.recv()).await.expect("in time"),
        None
    );
}

#[test]
fn the_first_source_has_precedence_until_it_removes_the_object() {
    let mut case = TwoSources::new();
    apply(&case.second, [config_map("second")], T1);
    assert_eq!(case.value(), Some("second"));
    apply(&case.first, [config_map("first")], T1);
    assert_eq!(case.value(), Some("first"));

    // Changes from the second source are stored, but stay hidden.
    apply(&case.second, [config_map("third")], T1);
    assert!(case.store.take_update().is_none());
    case.first.edit(T1).put(&config_map("").id(), None);
    assert_eq!(case.value(), Some("third"));

    case.second.edit(T1).put(&config_map("").id(), None);
    assert_eq!(case.value(), None);
}

#[test]
fn an_update_is_incomplete_if_one_source_is() {
    let mut case = TwoSources::new();
    for (phase, stale) in [(SyncPhase::Partial, false), (SyncPhase::Stale, true)] {
        case.second.edit(T1).set_phase(phase);
        apply(&case.first, [config_map(&format!("{phase:?}"))], T1);

        let update = case.store.take_update().expect("an update");

        assert_eq!((update.complete, update.stale), (false, stale), "{phase:?}");
    }
}

/// A random step: either a source changes an object, or an update is taken.
#[derive(Clone, Copy, Debug)]
enum Step {
    Service(u8, u8),
    Slice(u8, u8),
    NoService(u8),
    NoSlice(u8),
    Update,
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = (0_u8..5, 0_u8..3, 0_u8..3).prop_map(|(step, a, b)| match step {
        0 => Step::Service(a, b),
        1 => Step::Slice(a, b),
        2 => Step::NoService(a),
        3 => Step::NoSlice(a),
        _ => Step::Update,
    });
    proptest::collection::vec((0_usize..2, step), 0..80)
}

/// The reference model: the objects from both sources.
type Model = [BTreeMap<ObjectId, Object>; 2];

/// Returns each Service in use, together with its EndpointSlices in use.
fn expected([first, second]: &Model) -> BTreeMap<ObjectName, (Object, Vec<Object>)> {
    let mut merged = second.clone();
    merged.extend(first.clone());
    let of = |service: &ObjectName| {
        let is_owned = |object: &&Object| matches!(object, Object::EndpointSlice(slice) if slice.service == *service);
        merged.values().filter(is_owned).cloned().collect()
    };
    let services = merged.iter().filter(|(id, _)| id.kind == Kind::Service);
    services
        .map(|(id, object)| (id.name.clone(), (object.clone(), of(&id.name))))
        .collect()
}

proptest! {
    /// Asserts that the updates, taken together, give the same objects as merging the sources.
    #[test]
    fn all_updates_together_result_in_the_objects_of_the_sources(steps in steps()) {
        let mut store = Store::default();
        let overlays = [store.overlay(), store.overlay()];
        for overlay in &overlays {
            overlay.edit(T1).set_phase(SyncPhase::Complete);
        }
        let mut model = Model::default();
        let mut known = BTreeMap::new();
        for (source, step) in steps.into_iter().chain([(0, Step::Update)]) {
            let text = |number: u8| format!("s{number}");
            let object = match step {
                Step::Service(a, b) => Ok(service(&text(a), i64::from(b))),
                Step::Slice(a, b) => Ok(slice(&text(a), &text(b))),
                Step::NoService(a) => Err(service(&text(a), 0).id()),
                Step::NoSlice(a) => Err(slice(&text(a), "").id()),
                Step::Update => {
                    apply_update(&mut store, &mut known);
                    prop_assert_eq!(&known, &expected(&model));
                    continue;
                }
            };
            let mut edit = overlays[source].edit(T1);
            match object {
                Ok(object) => {
                    model[source].insert(object.id(), object.clone());
                    edit.put(&object.id(), Some(object));
                }
                Err(id) => {
                    model[source].remove(&id);
                    edit.put(&id, None);
                }
            }
        }
    }
}

fn apply_update(store: &mut Store, known: &mut BTreeMap<ObjectName, (Object, Vec<Object>)>) {
    for (name, state) in store
        .take_update()
        .into_iter()
        .flat_map(|update| update.services)
    {
        match state {
            Some(ServiceState { service, slices }) => {
                let slices = slices.into_iter().map(Object::EndpointSlice).collect();
                known.insert(name, (Object::Service(service), slices));
            }
            None => drop(known.remove(&name)),
        }
    }
}
