mod held_addresses;
mod memory;
mod migrate;

use tunnel_common::table::MapSize;

use self::memory::Memory;
use super::*;
use crate::model::fixture;

/// A changed Node: its name and its new state, or `None` if it was deleted.
type NodeChange = (ObjectName, Option<Arc<Node>>);

const NOW: Duration = Duration::from_secs(10_000);

fn prefix(text: &str, length: u8) -> Prefix {
    Prefix::new(Address::from_ip(fixture::ip(text)), length).expect("a range")
}

fn settings() -> SteeringSettings {
    SteeringSettings {
        rules: Some(SteeringRules {
            own_node: "cloud".to_owned(),
            edge_selector: "edge".parse().expect("a selector"),
            config_map: ObjectName::new("kube-system", "ports"),
            families: [true, true],
            node_ranges: None,
            api_servers: BTreeSet::new(),
        }),
        prefixes: vec![prefix("198.19.0.0", 16), prefix("fd00:c01e::", 64)],
        ingress_port: 10_270,
    }
}

fn sizes(steering: u32) -> MapSizes {
    MapSizes::uniform(1).with(MapSize::Steering, steering)
}

/// Returns a reconciler for steering that has nothing to do.
pub(in crate::reconcile) fn idle_steering() -> SteeringReconciler<impl SteeringMaps> {
    adopt(Memory::default(), 8, NOW)
}

fn adopt(maps: Memory, capacity: u32, now: Duration) -> SteeringReconciler<Memory> {
    let sizes = sizes(capacity);
    let maps = Memory {
        capacity: to_usize(sizes.steer_entries()),
        ..maps
    };
    SteeringReconciler::adopt(maps, sizes, settings(), now).expect("taken over")
}

fn node(name: &str, addresses: &[&str]) -> NodeChange {
    fixture::node_update(Node {
        labels: BTreeMap::from([("edge".to_owned(), String::new())]),
        internal_ips: fixture::ips(addresses),
        ..fixture::node(name)
    })
}

/// Returns the address of the node with the given one-letter name. The address of node `a` ends in 1.
fn address_of(name: &str) -> String {
    let letter = name.bytes().next().expect("a letter");
    format!("10.0.0.{}", letter - b'a' + 1)
}

/// Returns edge nodes with the given one-letter names.
fn nodes<const N: usize>(names: [&str; N]) -> Vec<NodeChange> {
    names.map(|name| node(name, &[&address_of(name)])).into()
}

/// Returns the changes that remove one node and add another.
fn replace_node(old: &str, new: &str) -> Vec<NodeChange> {
    let mut both = nodes([new]);
    both.insert(0, removed(old));
    both
}

/// Returns the two targets of a node, at the steering addresses that end in `first` and `first` + 1.
fn targets_of(first: u8, name: &str) -> [String; 2] {
    let address = address_of(name);
    let ports = [(first, 10_250), (first + 1, 10_255)];
    ports.map(|(last, port)| format!("198.19.0.{last} {name} ({address}:{port})"))
}

/// Returns a reconciler that steers connections to the given nodes.
fn steering_with<const N: usize>(capacity: u32, names: [&str; N]) -> SteeringReconciler<Memory> {
    let mut steering = adopt(Memory::default(), capacity, NOW);
    apply(&mut steering, nodes(names), NOW);
    steering
}

fn removed(name: &str) -> NodeChange {
    (ObjectName::new("", name), None)
}

fn update(nodes: Vec<NodeChange>) -> ClusterUpdate {
    ClusterUpdate {
        nodes,
        synced: true,
        complete: true,
        nodes_current: true,
        ..ClusterUpdate::default()
    }
}

fn apply(steering: &mut SteeringReconciler<Memory>, nodes: Vec<NodeChange>, now: Duration) {
    steering.update(&update(nodes));
    steering.sync(now);
}

/// Applies changes to Nodes while an object is missing from the sources.
fn apply_incomplete(steering: &mut SteeringReconciler<Memory>, nodes: Vec<NodeChange>) {
    steering.update(&ClusterUpdate {
        complete: false,
        nodes_current: false,
        ..update(nodes)
    });
    steering.sync(NOW);
}

/// Returns each steering address in the maps, followed by its target as published to the ingress.
fn published_targets(steering: &SteeringReconciler<Memory>) -> Vec<String> {
    let targets = steering.targets.borrow();
    let word = |(key, index): (&SteeringKey, &u32)| {
        let record = steering.maps.records[index];
        assert_eq!(record.key, *key);
        assert_eq!(record.removed_at, 0);
        let target = targets.get(index).expect("a published target");
        format!("{} {target}", record.steering_address.to_ip())
    };
    steering.maps.keys.iter().map(word).collect()
}

#[test]
fn each_address_and_port_gets_a_published_steering_address_of_its_family() {
    let mut steering = adopt(Memory::default(), 16, NOW);
    steering.maps.published = Some(steering.targets());

    let edge = node("edge-7", &["10.1.2.3", "fd00::3"]);
    apply(&mut steering, vec![edge], NOW);

    assert_eq!(
        published_targets(&steering),
        [
            "198.19.0.1 edge-7 (10.1.2.3:10250)",
            "198.19.0.2 edge-7 (10.1.2.3:10255)",
            "fd00:c01e::3 edge-7 ([fd00::3]:10250)",
            "fd00:c01e::4 edge-7 ([fd00::3]:10255)",
        ]
    );
}

#[test]
fn nothing_is_steered_before_every_source_has_delivered_its_first_list() {
    let mut steering = adopt(Memory::default(), 16, NOW);

    steering.update(&ClusterUpdate {
        nodes: vec![node("edge-7", &["10.1.2.3"])],
        ..ClusterUpdate::default()
    });
    steering.sync(NOW);

    assert_eq!(published_targets(&steering), Vec::<String>::new());
}

#[test]
fn a_removed_node_is_not_steered_and_its_indices_are_quarantined() {
    let mut steering = steering_with(16, ["a"]);

    apply(&mut steering, replace_node("a", "b"), NOW);

    assert_eq!(published_targets(&steering), targets_of(3, "b"));
    assert!(!steering.targets.borrow().contains_key(&0));
    assert_ne!(steering.maps.records[&0].removed_at, 0);
}

#[test]
fn an_index_is_reused_only_after_its_quarantine_also_after_a_restart() {
    // The maps have room for two keys and for two indices in quarantine.
    let mut steering = steering_with(2, ["a"]);
    apply(&mut steering, replace_node("a", "b"), NOW);
    apply(
        &mut steering,
        vec![removed("b")],
        NOW + Duration::from_secs(1),
    );
    let almost = NOW + QUARANTINE - Duration::from_secs(1);
    let mut steering = adopt(steering.maps, 2, almost);

    apply(&mut steering, nodes(["c"]), almost);

    assert_eq!(published_targets(&steering), Vec::<String>::new());
    // Unallocated keys are retried.
    assert!(steering.is_incomplete());
    assert_eq!(steering.reason_counts[&Reason::SteeringFull], 1);

    steering.sync(NOW + QUARANTINE);

    assert_eq!(published_targets(&steering), targets_of(1, "c"));
    assert!(!steering.is_incomplete());
}

#[test]
fn a_returning_node_gets_its_last_indices_during_their_quarantine() {
    let mut steering = adopt(Memory::default(), 2, NOW);
    for _ in 0..10 {
        apply(&mut steering, nodes(["a"]), NOW);
        assert_eq!(published_targets(&steering), targets_of(1, "a"));
        apply(&mut steering, vec![removed("a")], NOW);
    }
}

#[test]
fn the_addresses_of_a_small_prefix_are_reused() {
    let mut steering = adopt(Memory::default(), 16, NOW);
    // The prefix has six addresses, far fewer than the maps have indices.
    steering.settings.prefixes = vec![prefix("198.19.0.0", 29)];
    let mut last = "first".to_owned();
    for number in 1..100_u8 {
        let now = NOW + QUARANTINE * u32::from(number);
        let name = format!("node-{number}");
        let address = format!("10.0.0.{number}");
        let both = vec![removed(&last), node(&name, &[&address])];
        apply(&mut steering, both, now);

        assert_eq!(
            published_targets(&steering).len(),
            2,
            "{number}: {:?}",
            steering.view()
        );
        last = name;
    }
}

#[test]
fn a_returning_node_gets_new_indices_if_its_last_ones_are_reused() {
    let mut steering = adopt(Memory::default(), 16, NOW);
    steering.settings.prefixes = vec![prefix("198.19.0.0", 29)];
    apply(&mut steering, nodes(["a", "b", "c"]), NOW);
    apply(&mut steering, ["a", "b", "c"].map(removed).into(), NOW);

    let both = vec![node("a", &["10.0.0.1"]), node("z", &["10.0.0.0"])];
    apply(&mut steering, both, NOW + QUARANTINE);

    let indices: BTreeSet<u32> = steering.maps.keys.values().copied().collect();
    assert_eq!((indices.len(), published_targets(&steering).len()), (4, 4));
}

#[test]
fn a_node_that_became_a_cloud_node_is_not_steered_although_objects_are_missing() {
    let steering = steering_with(16, ["a", "b"]);
    let mut steering = adopt(steering.maps, 16, NOW);
    let (name, a) = node("a", &["10.0.0.1"]);
    let mut a = Node::clone(&a.expect("a Node"));
    a.labels.clear();

    apply_incomplete(&mut steering, vec![(name, Some(Arc::new(a)))]);

    let left = steering.maps.keys.keys().map(|key| key.address.to_ip());
    assert!(left.eq(fixture::ips(&["10.0.0.2", "10.0.0.2"])));
}

#[test]
fn unused_indices_are_allocated_first_then_the_longest_removed() {
    let mut steering = adopt(Memory::default(), 2, NOW);
    let later = NOW + Duration::from_secs(1);
    apply(&mut steering, nodes(["b"]), NOW);
    // Index 1 is removed before index 0.
    steering.mark_removed(1, NOW).expect("written");
    steering.mark_removed(0, later).expect("written");

    let (end, prefixes) = (steering.probe_index(), &steering.settings.prefixes);
    let free = FreeIndices::new(
        &steering.records,
        &mut QuarantinedNodes::default(),
        end,
        prefixes,
        later + QUARANTINE,
    );

    let order = free.indices.into_iter().map(|(_, index)| index);
    assert!(order.eq([2, 3, 1, 0]));
}

#[test]
fn full_steering_maps_keep_their_entries_and_report_the_others() {
    let mut steering = steering_with(2, ["b"]);

    apply(&mut steering, nodes(["a"]), NOW);

    assert_eq!(published_targets(&steering), targets_of(1, "b"));
    let why = "not steered: bpf.maps.steering or a steering prefix is used up";
    let problem = format!("a (10.0.0.1:10250) and 1 more: {why}");
    assert_eq!(steering.view().problems, [problem]);
}

#[test]
fn a_changed_cookie_of_the_hosts_namespace_is_written_again() {
    let mut steering = steering_with(2, ["b"]);
    let address = Address::from_ip(fixture::ip("192.0.0.8"));
    let key = SteeringKey::new(address, Port::from_host(9));
    steering.write_probe_key(&key, 7).expect("written");
    steering.maps.host_namespace = 3;
    assert!(
        !steering
            .repair_host_namespace()
            .expect("nothing is known yet")
    );

    steering.remove_probe_key(&key).expect("removed");
    assert!(!steering.repair_host_namespace().expect("equal"));
    steering.maps.host_namespace = 4;
    assert!(steering.repair_host_namespace().expect("written"));

    assert_eq!(steering.maps.host_namespace, 3);
}

#[test]
fn the_probe_fits_into_full_maps_and_is_removed() {
    let mut steering = steering_with(2, ["b"]);
    let before = (steering.maps.keys.clone(), published_targets(&steering));
    let address = Address::from_ip(fixture::ip("192.0.0.8"));
    let key = SteeringKey::new(address, Port::from_host(9));

    steering.write_probe_key(&key, 7).expect("written");
    assert_eq!(steering.maps.keys.len(), 3);
    // If the process is killed now, the next process removes the probe's key at startup.
    let killed = adopt(steering.maps.clone(), 2, NOW);
    assert!(!killed.maps.keys.contains_key(&key));
    steering.remove_probe_key(&key).expect("removed");

    assert_eq!(
        (steering.maps.keys.clone(), published_targets(&steering)),
        before
    );
}

#[test]
fn a_restart_keeps_every_index_and_writes_nothing() {
    let steering = steering_with(16, ["a", "b"]);
    let before = published_targets(&steering);
    let maps = Memory {
        writes_left: Some(0),
        ..steering.maps
    };
    let mut again = adopt(maps, 16, NOW);

    apply(&mut again, nodes(["a", "b"]), NOW);

    assert_eq!(published_targets(&again), before);
    assert!(!again.is_incomplete());
}

#[test]
fn keys_of_an_earlier_process_stay_while_objects_are_missing() {
    let steering = steering_with(16, ["a", "b"]);
    let mut again = adopt(steering.maps, 16, NOW);

    apply_incomplete(&mut again, nodes(["b"]));
    assert_eq!(again.maps.keys.len(), 4);
    // A key that this process planned is removed at once.
    apply_incomplete(&mut again, vec![removed("b")]);
    assert_eq!(again.maps.keys.len(), 2);
    apply(&mut again, Vec::new(), NOW);

    assert_eq!(again.maps.keys.len(), 0);
}

#[test]
fn a_changed_prefix_gives_every_key_a_new_index() {
    let steering = steering_with(16, ["a"]);
    let mut again = adopt(steering.maps, 16, NOW);
    again.settings.prefixes = vec![prefix("198.18.0.0", 16)];

    apply(&mut again, nodes(["a"]), NOW);

    assert_eq!(
        published_targets(&again),
        [
            "198.18.0.3 a (10.0.0.1:10250)",
            "198.18.0.4 a (10.0.0.1:10255)"
        ]
    );
    assert_eq!(again.maps.unsafe_writes, 0);
}

#[test]
fn ports_of_the_config_map_are_steered_until_it_is_deleted() {
    let mut steering = steering_with(16, ["a"]);
    let name = ObjectName::new("kube-system", "ports");
    let config_map = ConfigMap {
        name: name.clone(),
        data: BTreeMap::from([("http-proxy-ports".to_owned(), "9100".to_owned())]),
    };

    for (config_map, steered) in [(Some(Arc::new(config_map)), 3), (None, 2)] {
        steering.update(&ClusterUpdate {
            config_maps: vec![(name.clone(), config_map)],
            ..update(Vec::new())
        });
        steering.sync(NOW);
        assert_eq!(steering.maps.keys.len(), steered);
    }
}

#[test]
fn a_kill_between_any_two_writes_leaves_every_key_with_its_own_record() {
    let first = steering_with(8, ["a", "b"]);
    let change = || [replace_node("a", "c"), nodes(["b"])].concat();
    for writes in 0..16 {
        let maps = Memory {
            writes_left: Some(writes),
            ..first.maps.clone()
        };
        let mut killed = adopt(maps, 8, NOW);
        apply(&mut killed, change(), NOW);
        assert_eq!(killed.maps.unsafe_writes, 0, "after {writes} writes");
        let records = &killed.maps.records;
        let is_own = |(key, index): (&SteeringKey, &u32)| records[index].key == *key;
        assert!(killed.maps.keys.iter().all(is_own), "after {writes} writes");
        let maps = Memory {
            writes_left: None,
            ..killed.maps
        };
        let mut again = adopt(maps, 8, NOW);
        apply(&mut again, change(), NOW);

        for (index, record) in &again.maps.records {
            let is_in_use = again.maps.keys.values().any(|used| used == index);
            assert_eq!(
                record.removed_at == 0,
                is_in_use,
                "after {writes} writes: {index}"
            );
        }
        let target = |word: &str| word.split_once(' ').map(|(_, target)| target.to_owned());
        let targets = |words: &[String]| words.iter().map(|word| target(word)).collect::<Vec<_>>();
        let wanted = targets(&["b", "c"].map(|name| targets_of(1, name)).concat());
        assert_eq!(
            targets(&published_targets(&again)),
            wanted,
            "after {writes} writes"
        );
    }
}

#[test]
fn a_write_that_fails_is_tried_again() {
    let maps = Memory {
        writes_left: Some(1),
        ..Memory::default()
    };
    let mut steering = adopt(maps, 8, NOW);
    apply(&mut steering, nodes(["a"]), NOW);
    assert!(steering.is_incomplete());

    steering.maps.writes_left = None;
    steering.sync(NOW);

    assert_eq!(published_targets(&steering).len(), 2);
    assert!(!steering.is_incomplete());
    assert_eq!(steering.reason_counts[&Reason::WriteFailed], 1);
}
