use proptest::prelude::*;

use super::*;
use crate::model::Family;

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
    Object::EndpointSlice(Arc::new(EndpointSlice {
        name: name(text),
        service: name(owner),
        family: Family::V4,
        ports: Vec::new(),
        endpoints: Vec::new(),
        triggered: None,
    }))
}

fn node(text: &str) -> Object {
    Object::Node(Arc::new(Node {
        name: ObjectName::new("", text),
        created: None,
        labels: BTreeMap::new(),
        internal_ips: Vec::new(),
        other_ips: Vec::new(),
        eligible: true,
    }))
}

/// An update in a few words.
fn words(store: &mut Store) -> Vec<String> {
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

#[test]
fn an_update_tells_a_service_once_with_all_its_slices_as_they_stand() {
    let mut store = Store::default();
    for object in [
        slice("a-2", "a"),
        service("a", 1),
        slice("a-1", "a"),
        service("a", 2),
    ] {
        store.apply(object, T1);
    }
    store.apply(node("n"), T1);

    assert_eq!(words(&mut store), [r#"shop/a ["a-1", "a-2"]"#, "node n"]);
    assert!(!store.is_changed());
    assert_eq!(words(&mut store), [] as [&str; 0]);
}

#[test]
fn a_config_map_is_told_when_it_comes_changes_and_goes() {
    let config_map = |ports: &str| {
        Object::ConfigMap(Arc::new(ConfigMap {
            name: name("ports"),
            data: BTreeMap::from([("http-proxy-ports".to_owned(), ports.to_owned())]),
        }))
    };
    let mut store = Store::default();

    store.apply(config_map("9100"), T1);
    assert_eq!(words(&mut store), ["config map shop/ports"]);
    store.apply(config_map("9100"), T1);
    assert!(!store.is_changed());
    store.apply(config_map("9101"), T1);
    assert_eq!(words(&mut store), ["config map shop/ports"]);
    store.remove(&config_map("9101").id(), T2);
    assert_eq!(words(&mut store), ["config map shop/ports gone"]);
}

#[test]
fn an_object_that_says_nothing_new_is_not_told() {
    let mut store = Store::default();
    for _ in 0..2 {
        for object in [service("a", 1), slice("a-1", "a"), node("n")] {
            store.apply(object, T1);
        }
        store.take_update();
    }
    store.apply(service("a", 1), T2);
    store.apply(slice("a-1", "a"), T2);
    store.apply(node("n"), T2);

    assert!(!store.is_changed());
}

#[test]
fn a_slice_that_changes_its_owner_changes_both_services() {
    let mut store = Store::default();
    for object in [service("a", 1), service("b", 1), slice("s", "a")] {
        store.apply(object, T1);
    }
    store.take_update();

    store.apply(slice("s", "b"), T2);

    assert_eq!(words(&mut store), ["shop/a []", r#"shop/b ["s"]"#]);
}

#[test]
fn what_is_removed_is_told_as_gone_and_only_if_it_was_there() {
    let mut store = Store::default();
    for object in [service("a", 1), slice("s", "a"), node("n")] {
        store.apply(object, T1);
    }
    store.take_update();

    for id in [
        service("a", 1).id(),
        slice("s", "a").id(),
        node("n").id(),
        service("b", 1).id(),
    ] {
        store.remove(&id, T2);
    }

    assert_eq!(words(&mut store), ["shop/a gone", "node n gone"]);
    assert_eq!(store.counts().values().sum::<usize>(), 0);
}

#[test]
fn endpoints_without_their_service_wait_for_it() {
    let mut store = Store::default();
    store.apply(slice("s", "a"), T1);
    assert!(!store.is_changed());

    store.apply(service("a", 1), T2);

    assert_eq!(words(&mut store), [r#"shop/a ["s"]"#]);
}

#[test]
fn an_update_is_as_old_as_its_oldest_change() {
    for times in [[T1, T2], [T2, T1]] {
        let mut store = Store::default();
        for (name, at) in ["a", "b"].into_iter().zip(times) {
            store.apply(service(name, 1), at);
        }
        assert_eq!(store.take_update().map(|update| update.since), Some(T1));
    }
}

#[test]
fn being_synced_is_told_even_if_there_is_nothing_else() {
    let mut store = Store::default();
    store.set_synced(T1);

    let update = store.take_update().expect("an update");

    assert!(update.synced && update.services.is_empty());
    store.set_synced(T2);
    assert!(!store.is_changed());
}

#[test]
fn being_whole_again_is_told_even_if_there_is_nothing_else() {
    let mut store = Store::default();
    store.set_synced(T1);
    store.set_whole(false, T1);
    assert_eq!(store.take_update().map(|update| update.whole), Some(false));
    store.set_whole(false, T1);
    assert!(!store.is_changed());

    store.set_whole(true, T2);

    assert_eq!(store.take_update().map(|update| update.whole), Some(true));
    store.set_whole(true, T2);
    assert!(!store.is_changed());
}

proptest! {
    /// Whoever applies every update knows what the store knows, whenever they are taken.
    #[test]
    fn updates_add_up_to_the_whole_set(
        steps in proptest::collection::vec((0_u8..5, 0_u8..3, 0_u8..3), 0..60)
    ) {
        let mut store = Store::default();
        let mut known: BTreeMap<ObjectName, ServiceState> = BTreeMap::new();
        for (step, a, b) in steps {
            let (a, b) = (format!("s{a}"), format!("s{b}"));
            match step {
                0 => store.apply(service(&a, i64::from(b.ends_with('0'))), T1),
                1 => store.apply(slice(&a, &b), T1),
                2 => store.remove(&service(&a, 0).id(), T1),
                3 => store.remove(&slice(&a, &b).id(), T1),
                _ => tell(&mut store, &mut known),
            }
        }
        tell(&mut store, &mut known);

        let names: Vec<ObjectName> = (0..3).map(|i| name(&format!("s{i}"))).collect();
        for name in names {
            let told = known.get(&name).map(|state| (&state.service, &state.slices));
            let state = store.service(&name);
            prop_assert_eq!(told, state.as_ref().map(|state| (&state.service, &state.slices)));
        }
    }
}

fn tell(store: &mut Store, known: &mut BTreeMap<ObjectName, ServiceState>) {
    for (name, state) in store
        .take_update()
        .into_iter()
        .flat_map(|update| update.services)
    {
        match state {
            Some(state) => known.insert(name, state),
            None => known.remove(&name),
        };
    }
}
