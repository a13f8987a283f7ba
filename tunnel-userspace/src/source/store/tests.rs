mod overlays;

use proptest::prelude::*;

use super::*;
use crate::model::{ConfigMap, Family, Service, fixture};

const T1: Duration = Duration::from_secs(1);
const T2: Duration = Duration::from_secs(2);

fn name(text: &str) -> ObjectName {
    ObjectName::new("shop", text)
}

fn service(text: &str, created: i64) -> Object {
    Object::Service(Arc::new(Service {
        created: Some(created),
        ..Service::named(name(text))
    }))
}

fn slice(text: &str, owner: &str) -> Object {
    let (service, none) = (name(owner), Vec::new());
    let slice = fixture::slice(text, &service, Family::V4, &[], none);
    Object::EndpointSlice(Arc::new(slice))
}

fn node(text: &str) -> Object {
    Object::Node(Arc::new(fixture::node(text)))
}

/// Returns a store and the overlay of its only source, which has delivered its first complete list.
fn store() -> (Store, Overlay) {
    let mut store = Store::default();
    let overlay = store.overlay();
    overlay.edit(T1).set_phase(SyncPhase::Complete);
    (store, overlay)
}

fn apply(overlay: &Overlay, objects: impl IntoIterator<Item = Object>, at: Duration) {
    let mut edit = overlay.edit(at);
    for object in objects {
        edit.put(&object.id(), Some(object));
    }
}

#[tokio::test]
async fn an_update_follows_when_the_nodes_become_current_or_are_not_any_more() {
    let (mut store, overlay) = store();
    assert!(store.update().await.expect("an update").nodes_current);
    for are_current in [false, true] {
        overlay.edit(T2).set_current_nodes(are_current);

        let update = tokio::time::timeout(Duration::from_secs(5), store.update());
        let update = update.await.expect("in time").expect("an update");
        assert_eq!(update.nodes_current, are_current);
        assert!(update.complete);
    }
}

#[test]
fn the_published_nodes_are_current_once_every_source_has_listed_all_of_them() {
    let mut store = Store::default();
    let (first, second) = (store.overlay(), store.overlay());
    let nodes = store.nodes();
    let list = || {
        let list = nodes.borrow();
        let names: Vec<_> = list.names.iter().map(ToString::to_string).collect();
        (names.join(" "), list.is_current)
    };
    apply(&first, [node("a"), node("b"), service("web", 1)], T1);
    first.edit(T1).set_phase(SyncPhase::Complete);
    apply(&second, [node("b"), node("c")], T1);
    assert_eq!(list(), ("a b c".to_owned(), false));
    second.edit(T1).set_phase(SyncPhase::Stale);
    assert!(!list().1, "a snapshot is not current");
    second.edit(T1).set_phase(SyncPhase::Complete);
    assert!(list().1);

    // A Node that another source still has does not go.
    let put = |overlay: &Overlay, name| overlay.edit(T2).put(&node(name).id(), None);
    put(&first, "b");
    put(&first, "a");
    assert_eq!(list(), ("b c".to_owned(), true));
    put(&second, "b");
    assert_eq!(list(), ("c".to_owned(), true));

    first.edit(T2).set_phase(SyncPhase::Partial);
    assert!(!list().1, "a rejected object may be a Node");
    first.edit(T2).set_phase(SyncPhase::Complete);
    second.edit(T2).set_current_nodes(false);
    assert!(!list().1, "the source has failed");
}

/// Takes an update and describes each object in it.
fn describe_update(store: &mut Store) -> Vec<String> {
    let Some(update) = store.take_update() else {
        return Vec::new();
    };
    let services = update.services.iter().map(|(name, state)| match state {
        Some(state) => {
            let slices: Vec<&str> = state.slices.iter().map(|slice| &*slice.name.name).collect();
            format!("{name} {slices:?}")
        }
        None => format!("{name} gone"),
    });
    let nodes = update.nodes.iter().map(|(name, node)| match node {
        Some(_) => format!("node {name}"),
        None => format!("node {name} gone"),
    });
    let config_maps = update.config_maps.iter().map(|(name, config_map)| {
        let is_gone = if config_map.is_some() { "" } else { " gone" };
        format!("config map {name}{is_gone}")
    });
    services.chain(nodes).chain(config_maps).collect()
}

const NOTHING: [&str; 0] = [];

#[test]
fn an_update_has_each_changed_service_once_with_all_its_slices() {
    let (mut store, overlay) = store();
    let objects = [
        slice("a-2", "a"),
        service("a", 1),
        slice("a-1", "a"),
        service("a", 2),
        node("n"),
    ];
    apply(&overlay, objects, T1);

    assert_eq!(
        describe_update(&mut store),
        [r#"shop/a ["a-1", "a-2"]"#, "node n"]
    );
    assert!(store.take_update().is_none());
}

#[test]
fn an_update_has_a_config_map_that_is_created_changed_or_deleted() {
    let config_map = |ports: &str| {
        Object::ConfigMap(Arc::new(ConfigMap {
            name: name("ports"),
            data: BTreeMap::from([("http-proxy-ports".to_owned(), ports.to_owned())]),
        }))
    };
    let (mut store, overlay) = store();

    apply(&overlay, [config_map("9100")], T1);
    assert_eq!(describe_update(&mut store), ["config map shop/ports"]);
    apply(&overlay, [config_map("9100")], T1);
    assert_eq!(describe_update(&mut store), NOTHING);
    apply(&overlay, [config_map("9101")], T1);
    assert_eq!(describe_update(&mut store), ["config map shop/ports"]);
    overlay.edit(T2).put(&config_map("9101").id(), None);
    assert_eq!(describe_update(&mut store), ["config map shop/ports gone"]);
}

#[test]
fn an_equal_object_causes_no_update() {
    let (mut store, overlay) = store();
    let objects = || [service("a", 1), slice("a-1", "a"), node("n")];
    apply(&overlay, objects(), T1);
    store.take_update();

    let mut edit = overlay.edit(T2);
    assert!(
        objects()
            .into_iter()
            .all(|object| !edit.put(&object.id(), Some(object)))
    );
    drop(edit);

    assert!(store.take_update().is_none());
}

#[test]
fn only_objects_that_existed_are_published_as_deleted() {
    let (mut store, overlay) = store();
    apply(&overlay, [service("a", 1), slice("s", "a"), node("n")], T1);
    store.take_update();

    let mut edit = overlay.edit(T2);
    for object in [service("a", 1), slice("s", "a"), node("n"), service("b", 1)] {
        edit.put(&object.id(), None);
    }
    drop(edit);

    assert_eq!(describe_update(&mut store), ["shop/a gone", "node n gone"]);
    assert_eq!(overlay.counts().values().sum::<usize>(), 0);
}

#[test]
fn endpoints_without_their_service_are_kept_until_it_arrives() {
    let (mut store, overlay) = store();
    store.take_update();
    apply(&overlay, [slice("s", "a")], T1);
    assert!(store.take_update().is_none());

    apply(&overlay, [service("a", 1)], T2);

    assert_eq!(describe_update(&mut store), [r#"shop/a ["s"]"#]);
}

#[test]
fn an_update_is_as_old_as_its_oldest_change() {
    for times in [[T1, T2], [T2, T1]] {
        let (mut store, overlay) = store();
        store.take_update();
        for (name, at) in ["a", "b"].into_iter().zip(times) {
            apply(&overlay, [service(name, 1)], at);
        }
        assert_eq!(
            store.take_update().map(|update| update.noticed_at),
            Some(T1)
        );
    }
}

#[test]
fn each_higher_phase_causes_one_update_even_without_objects() {
    let mut store = Store::default();
    let overlay = store.overlay();
    let mut update_after = |phase| {
        overlay.edit(T1).set_phase(phase);
        store.take_update().map(|update| {
            assert!(update.synced && update.services.is_empty());
            (update.stale, update.complete)
        })
    };

    assert_eq!(update_after(SyncPhase::Listing), None);
    assert_eq!(update_after(SyncPhase::Stale), Some((true, false)));
    assert_eq!(update_after(SyncPhase::Stale), None);
    assert_eq!(update_after(SyncPhase::Partial), Some((false, false)));
    assert_eq!(update_after(SyncPhase::Complete), Some((false, true)));
    assert_eq!(update_after(SyncPhase::Complete), None);
    // After a drop to a lower phase, a Node may be missing from the overlay.
    assert_eq!(update_after(SyncPhase::Partial), Some((false, false)));
    assert_eq!(update_after(SyncPhase::Partial), None);
    assert_eq!(update_after(SyncPhase::Complete), Some((false, true)));
}
