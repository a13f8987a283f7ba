//! Services whose endpoints are replaced while the maps are full: they keep at least one backend after every
//! write, and get as many backends as fit.

use proptest::prelude::*;

use super::*;

/// The VIP of the Service whose endpoints change. All of its endpoints are ready.
const VIP: u8 = 2;

/// One step: the new endpoints of the Service, the endpoints of another Service, and the indices whose open
/// connections keep them from being reused.
type Step = (BTreeSet<u8>, BTreeSet<u8>, BTreeSet<u32>);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let endpoints = |least| proptest::collection::btree_set(10..30_u8, least..8);
    let open = proptest::collection::btree_set(0..80_u32, 0..80);
    proptest::collection::vec((endpoints(1), endpoints(0), open), 1..12)
}

fn algorithm() -> impl Strategy<Value = Algorithm> {
    prop_oneof![Just(Algorithm::Random), Just(Algorithm::Maglev)]
}

/// Returns a Service with the given endpoints.
fn service(
    name: &'static str,
    vip: u8,
    endpoints: &BTreeSet<u8>,
    algorithm: Algorithm,
) -> Change<'static> {
    let change = (name, Some(state(name, vip, endpoints)));
    with(change, |service| service.algorithm = Some(algorithm))
}

/// Replaces the Service's endpoint, and keeps connections to the removed backends open, until only `left`
/// indices are free.
fn use_up_indices(reconciler: &mut Reconciler<Memory>, left: usize) {
    for endpoint in (10..30).cycle() {
        if reconciler.sync.tracked.actual.free_backends.free_count() <= left {
            break;
        }
        connect_to_all(reconciler);
        apply(reconciler, vec![set("web", VIP, &[endpoint])]);
    }
    connect_to_all(reconciler);
}

#[test]
fn a_rolling_change_in_full_maps_keeps_as_many_backends_as_fit() {
    for size in [MapSize::Backends, MapSize::Slots] {
        let mut reconciler = serving(ROOMY.with(size, 2), [set("web", VIP, &[1, 2])]);
        reconciler.sync.tracked.maps.never_empty = BTreeSet::from([vip(VIP)]);

        apply(&mut reconciler, vec![set("web", VIP, &[3, 4, 5])]);

        assert_eq!(backends(&reconciler, VIP), Some(vec![3, 4]), "{size:?}");
        let [port] = &services(&reconciler, Some("web"))[0].ports[..] else {
            panic!("one port");
        };
        let text = port.problem.as_deref().expect("one endpoint is left out");
        assert!(text.contains("2 of 3 endpoints are programmed"), "{text}");
        assert_eq!(port.backends, ["10.1.0.3:8080", "10.1.0.4:8080"]);
        let left_out = &port.endpoints[2];
        assert_eq!(left_out.endpoint, "10.1.0.5:8080");
        assert!(
            left_out.status.starts_with("not programmed: "),
            "{left_out:?}"
        );
        assert!(left_out.sets.is_empty());
        apply(&mut reconciler, vec![set("web", VIP, &[4, 5])]);
        assert_eq!(backends(&reconciler, VIP), Some(vec![4, 5]), "{size:?}");
        assert_eq!(problem(&reconciler, "web"), None);
    }
}

#[test]
fn old_backends_stay_until_a_new_one_can_be_programmed() {
    let sizes = ROOMY.with(MapSize::Backends, 2);
    let mut reconciler = serving(sizes, [set("web", VIP, &[1, 2])]);
    reconciler.sync.tracked.maps.never_empty = BTreeSet::from([vip(VIP)]);
    // Open connections to removed backends use up all spare indices.
    let open = reconciler.maps().open_connections.clone();
    use_up_indices(&mut reconciler, 0);
    let last = backends(&reconciler, VIP).expect("a frontend");
    assert_eq!(reconciler.sync.tracked.actual.free_backends.free_count(), 0);

    apply(&mut reconciler, vec![set("web", VIP, &[3, 4])]);

    assert_eq!(backends(&reconciler, VIP).as_ref(), Some(&last));
    assert_eq!(problem(&reconciler, "web"), Some(Reason::BackendsFull));
    let [port] = &services(&reconciler, Some("web"))[0].ports[..] else {
        panic!("one port");
    };
    let text = port.problem.as_deref().expect("a problem");
    assert!(text.contains("0 of 2 endpoints are programmed"), "{text}");
    let kept = port.endpoints.last().expect("an endpoint");
    assert_eq!((&*kept.condition, kept.programmed), ("removed", true));
    let entry = reconciler.maps().backends.iter();
    let mut removed = entry.filter(|(_, backend)| !backend.state.is_serving());
    let (index, _) = removed.next().expect("a removed backend");
    set_open_connections(&open, *index, 0);
    reconciler.sync.poll_draining();
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, VIP), Some(vec![3]));
}

#[test]
fn a_maglev_table_without_room_becomes_a_plain_set_until_there_is_room() {
    let maglev = |name, vip, endpoints: &[u8]| {
        service(
            name,
            vip,
            &endpoints.iter().copied().collect(),
            Algorithm::Maglev,
        )
    };
    let sizes = ROOMY.with(MapSize::Slots, 300);
    let mut reconciler = serving(sizes, [maglev("a", 2, &[1, 2]), maglev("b", 4, &[1, 2])]);
    assert_eq!(backends(&reconciler, 2).map(|it| it.len()), Some(251));
    assert_eq!(backends(&reconciler, 4), Some(vec![1, 2]));
    assert_eq!(problem(&reconciler, "b"), Some(Reason::SlotsReduced));
    let warnings = reconciler.warnings(&BTreeSet::new());
    assert!(warnings.iter().all(|it| it.reason == Reason::SlotsReduced));

    apply(&mut reconciler, vec![("a", None)]);

    assert_eq!(backends(&reconciler, 4).map(|it| it.len()), Some(251));
    assert_eq!(problem(&reconciler, "b"), None);
}

#[test]
fn equal_sets_of_both_traffic_policies_share_one_table() {
    let (name, state) = service("web", VIP, &BTreeSet::from([1, 2]), Algorithm::Maglev);
    let mut state = state.expect("a Service");
    let service = Arc::make_mut(&mut state.service);
    service.external_policy = TrafficPolicy::Local;
    service.external_ips.push(fixture::ip("192.0.2.9"));
    for slice in &mut state.slices {
        for endpoint in &mut Arc::make_mut(slice).endpoints {
            endpoint.node = Some("node-a".into());
        }
    }
    let change = || vec![(name, Some(state.clone()))];
    let mut reconciler = serving(ROOMY.with(MapSize::Slots, 300), []);
    apply(&mut reconciler, change());

    assert_eq!(reconciler.sync.tracked.actual.usage().slots, 251);
    assert_eq!(problem(&reconciler, "web"), None);
    // The next process finds the same table by its slots.
    let mut second = adopt(reconciler.sync.tracked.maps);
    let writes = second.maps().writes;
    apply(&mut second, change());
    assert_eq!(second.maps().writes, writes);
    assert_eq!(audit(&mut second), 0);
}

#[test]
fn frequent_changes_to_some_services_do_not_keep_others_waiting() {
    const NAMES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let endpoints = |round: u8| -> BTreeSet<u8> { (0..20).map(|last| 20 * round + last).collect() };
    let frequent = |round| {
        let services = (10..).step_by(2).zip(NAMES);
        let change = services.map(|(vip, name)| (name, Some(state(name, vip, &endpoints(round)))));
        change.collect::<Vec<_>>()
    };
    // The maps are full, and the spare entries suffice for four of the changes.
    let mut reconciler = adopt(Memory::new(MapSizes {
        slots: 512,
        ..ROOMY.with(MapSize::Backends, 260)
    }));
    let waiting = |round| ("z", Some(state("z", VIP, &endpoints(round))));
    apply(&mut reconciler, [frequent(0), vec![waiting(0)]].concat());
    let first = backends(&reconciler, VIP);
    assert_eq!(first.as_ref().map(Vec::len), Some(20));

    reconciler.update(update(vec![waiting(1)]));
    let served = (1..12).find(|round| {
        reconciler.update(update(frequent(*round)));
        let retired = reconciler.write_changes();
        free_retired(&mut reconciler, &retired);
        backends(&reconciler, VIP) != first
    });

    assert!(served.is_some_and(|rounds| rounds <= 5), "{served:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_service_never_loses_all_backends_and_gets_all_that_fit(
        steps in steps(),
        slots in 1..12_u32,
        capacity in 1..12_u32,
        frees in proptest::collection::vec(any::<bool>(), 12),
        algorithm in algorithm(),
        spare in prop_oneof![0..4_usize, Just(usize::MAX)],
    ) {
        let sizes = ROOMY.with(MapSize::Slots, slots).with(MapSize::Backends, capacity);
        let mut reconciler = serving(sizes, [set("web", VIP, &[1])]);
        prop_assert_eq!(backends(&reconciler, VIP), Some(vec![1]));
        reconciler.sync.tracked.maps.never_empty = BTreeSet::from([vip(VIP)]);
        use_up_indices(&mut reconciler, spare);
        let open = reconciler.maps().open_connections.clone();
        let mut retired = RetiredEntries::default();
        for ((endpoints, others, kept), frees) in steps.iter().zip(frees) {
            // An index in use has open connections, but a free one cannot get any.
            let in_use = |index: &&u32| {
                let backend = reconciler.maps().backends.get(*index);
                backend.is_some_and(|backend| backend.state.is_serving())
            };
            for index in kept.iter().filter(in_use) {
                set_open_connections(&open, *index, 1);
            }
            reconciler.update(update(vec![
                service("web", VIP, endpoints, algorithm),
                service("other", 4, others, Algorithm::Random),
            ]));
            retired.0.extend(reconciler.write_changes().0);
            if frees {
                free_retired(&mut reconciler, &std::mem::take(&mut retired));
            }
        }
        free_retired(&mut reconciler, &retired);
        settle(&mut reconciler);

        let (wanted, _, _) = steps.last().expect("a step");
        let found = backends(&reconciler, VIP).expect("a frontend");
        let found: BTreeSet<u8> = found.into_iter().collect();
        let actual = &reconciler.sync.tracked.actual;
        let usage = actual.usage();
        let is_full = usage.backends >= capacity || usage.slots >= slots
            || actual.free_backends.free_count() == 0;
        prop_assert!(found == *wanted || is_full && !found.is_empty(), "{found:?} of {wanted:?}");
        // Endpoints that have left are kept only if no other one could be programmed.
        prop_assert!(found.is_subset(wanted) || found.is_disjoint(wanted));
        let port = &services(&reconciler, Some("web"))[0].ports[0];
        prop_assert_eq!(port.reason.is_some(), found != *wanted
            || algorithm == Algorithm::Maglev && wanted.len() > 1);
        prop_assert_eq!(reconciler.maps().wrong_memberships(), Vec::<u32>::new());
        prop_assert_eq!(audit(&mut reconciler), 0);
        // All indices are free again once the connections are closed.
        open.0.lock().unwrap().clear();
        reconciler.sync.poll_draining();
        apply(&mut reconciler, vec![("other", None)]);
        settle(&mut reconciler);
        let found = backends(&reconciler, VIP).expect("a frontend");
        let room = usize::try_from(capacity.min(slots)).expect("small");
        prop_assert_eq!(found.len(), wanted.len().min(room));
    }
}
