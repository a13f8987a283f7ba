//! Reconciling while one or more of the maps are full.

use super::*;

#[test]
fn a_service_with_too_many_frontends_still_updates_its_backends() {
    let services = [set("a", 1, &[1, 2]), set("b", 2, &[3])];
    let mut reconciler = serving(ROOMY.with(MapSize::Frontends, 2), services);

    let more = with(set("a", 1, &[2]), |service| {
        service.external_ips.push(fixture::ip("2001:db8::7"));
    });
    apply(&mut reconciler, vec![more]);

    assert_eq!(problem(&reconciler, "a"), Some(Reason::FrontendsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
    assert!(!reconciler.is_dirty());
    let serving = reconciler.maps().backends.values();
    assert_eq!(serving.filter(|it| it.state.is_serving()).count(), 2);
}

#[test]
fn a_service_without_room_is_a_problem_until_there_is_room() {
    let full = ROOMY.with(MapSize::Frontends, 2).with(MapSize::Slots, 4);
    for (sizes, reason) in [
        (ROOMY.with(MapSize::Frontends, 2), Reason::FrontendsFull),
        (ROOMY.with(MapSize::Slots, 4), Reason::SlotsFull),
        (ROOMY.with(MapSize::Backends, 4), Reason::BackendsFull),
        (full.with(MapSize::Backends, 4), Reason::FrontendsFull),
    ] {
        let mut reconciler = serving(sizes, [set("a", 1, &[1, 2]), set("b", 2, &[3, 4])]);
        apply(&mut reconciler, vec![set("c", 3, &[5])]);
        assert_eq!(problem(&reconciler, "c"), Some(reason));
        assert_eq!(backends(&reconciler, 3), None);
        assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));
        // A change that needs no additional entries is still written.
        apply(&mut reconciler, vec![set("a", 1, &[6, 8])]);
        assert_eq!(backends(&reconciler, 1), Some(vec![6, 8]), "{reason:?}");
        assert_eq!(problem(&reconciler, "a"), None);

        apply(&mut reconciler, vec![("a", None)]);

        assert_eq!(backends(&reconciler, 3), Some(vec![5]), "{reason:?}");
        assert_eq!(problem(&reconciler, "c"), None);
        assert_eq!(backends(&reconciler, 2), Some(vec![3, 4]));
    }
}

#[test]
fn full_maps_cause_a_warning_on_the_service_and_on_the_node() {
    let uid: Option<Arc<str>> = Some(Arc::from("1-2-3"));
    let b = with(set("b", 2, &[2]), |service| service.uid = uid.clone());
    let mut reconciler = serving(ROOMY.with(MapSize::Frontends, 1), [set("a", 1, &[1]), b]);

    let warnings = reconciler.warnings(&BTreeSet::new()).into_iter();
    let found = warnings.map(|it| (it.regarding.to_string(), it.uid, it.reason));

    let wanted = [
        ("Node node-a".to_owned(), None, Reason::FrontendsFull),
        ("Service default/b".to_owned(), uid, Reason::FrontendsFull),
    ];
    assert_eq!(found.collect::<Vec<_>>(), wanted);
    apply(&mut reconciler, vec![("a", None)]);
    assert!(reconciler.warnings(&BTreeSet::new()).is_empty());
}

#[test]
fn a_service_that_outgrows_the_maps_gets_as_many_backends_as_fit() {
    let sizes = ROOMY.with(MapSize::Backends, 3);
    let mut reconciler = serving(sizes, [set("web", 1, &[1, 2, 3])]);

    apply(&mut reconciler, vec![set("web", 1, &[2, 3, 4, 5])]);

    assert_eq!(problem(&reconciler, "web"), Some(Reason::BackendsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2, 3, 4]));
}

#[test]
fn the_probe_fits_into_full_maps() {
    for sizes in [
        ROOMY.with(MapSize::Frontends, 2),
        ROOMY.with(MapSize::Slots, 4),
        ROOMY.with(MapSize::Backends, 4),
    ] {
        let mut reconciler = serving(sizes, [set("a", 1, &[1, 2]), set("b", 2, &[3, 4])]);
        let address = |text: &str| Address::from_ip(fixture::ip(text));
        let probe = ProbeFrontend {
            frontend: FrontendKey::new(address("192.0.0.8"), Port::from_host(9), Protocol::UDP),
            target: crate::plan::BackendTarget {
                address: address("127.0.0.1"),
                port: Port::from_host(9),
            },
        };

        let dialled = reconciler.sync.dial_probe(&probe, || "dialled");

        assert_eq!(dialled, Some("dialled"), "{sizes:?}");
        let known = &reconciler.maps().frontend_keys;
        assert!(!known.contains_key(&probe.frontend), "the frontend is left");
    }
}

#[test]
fn a_service_whose_cluster_ip_changes_keeps_its_place_in_full_maps() {
    let sizes = ROOMY.with(MapSize::Frontends, 2);
    let mut reconciler = serving(sizes, [set("web", 1, &[1]), set("www", 2, &[2])]);
    apply(&mut reconciler, vec![set("db", 3, &[3])]);
    assert_eq!(problem(&reconciler, "db"), Some(Reason::FrontendsFull));

    apply(&mut reconciler, vec![set("web", 5, &[1])]);

    assert_eq!(problem(&reconciler, "web"), None);
    assert_eq!(backends(&reconciler, 5), Some(vec![1]));
    assert_eq!(backends(&reconciler, 1), None);
    assert_eq!(problem(&reconciler, "db"), Some(Reason::FrontendsFull));
    assert_eq!(audit(&mut reconciler), 0);
}

#[test]
fn a_service_that_loses_its_only_address_in_full_maps_leaves_nothing_behind() {
    let sizes = ROOMY.with(MapSize::Frontends, 2);
    let mut reconciler = serving(sizes, [set("a", 1, &[1]), set("b", 2, &[2])]);

    // The address of "a" moves to another Service, so its entry isn't free for the new address of "a".
    apply(&mut reconciler, vec![set("a", 5, &[1]), set("c", 1, &[3])]);

    assert_eq!(backends(&reconciler, 1), Some(vec![3]));
    assert_eq!(problem(&reconciler, "a"), Some(Reason::FrontendsFull));
    assert_eq!(backends(&reconciler, 5), None);
    assert_eq!(audit(&mut reconciler), 0);
    apply(&mut reconciler, vec![("b", None)]);
    assert_eq!(backends(&reconciler, 5), Some(vec![1]));
    assert_eq!(problem(&reconciler, "a"), None);
}

#[test]
fn health_checks_count_only_endpoints_that_are_programmed() {
    let balanced = |name, vip, endpoints: &[u8]| {
        let (name, mut state) = with(set(name, vip, endpoints), |service| {
            service.external_policy = TrafficPolicy::Local;
            service.health_check_port = Some(31_000);
            service.load_balancer_ips = vec![cluster_ip(vip + 100)];
        });
        let slices = &mut state.as_mut().expect("a Service").slices;
        for endpoint in &mut Arc::make_mut(&mut slices[0]).endpoints {
            endpoint.node = Some("node-a".into());
        }
        (name, state)
    };
    let local = |reconciler: &Reconciler<Memory>| {
        let health = reconciler.health().expect("synced");
        let check = &health.services[&ObjectName::new("default", "web")];
        check.ready_endpoints[&Family::V6]
    };
    for (sizes, others, programmed) in [
        // Neither frontend, only the cluster IP, no backend, or one of two.
        (ROOMY.with(MapSize::Frontends, 1), 1, 0),
        (ROOMY.with(MapSize::Frontends, 2), 1, 0),
        (ROOMY.with(MapSize::Backends, 3), 3, 0),
        (ROOMY.with(MapSize::Backends, 4), 3, 1),
        (ROOMY.with(MapSize::Slots, 4), 3, 1),
    ] {
        let endpoints: Vec<u8> = (1..=others).collect();
        let mut reconciler = serving(sizes, [set("db", 2, &endpoints)]);
        apply(&mut reconciler, vec![balanced("web", 1, &[1, 2])]);
        assert!(problem(&reconciler, "web").is_some(), "{sizes:?}");
        assert_eq!(local(&reconciler), programmed, "{sizes:?}");
    }
    // A port that needs no entries that are lacking counts as usual.
    let mut reconciler = serving(ROOMY, [balanced("web", 1, &[1, 2])]);
    assert_eq!(local(&reconciler), 2);
    apply(&mut reconciler, vec![balanced("web", 1, &[2])]);
    assert_eq!(local(&reconciler), 1);
}

#[test]
fn the_problem_names_the_limit_that_leaves_no_room_for_a_table() {
    // A table of 251 slots does not fit into the map, the share of the namespace, or that of a Service.
    for (slots, share, used, text) in [
        (
            400,
            100,
            200,
            "so all endpoints get equal shares: bpf.maps.slots is used up; 2 of 2",
        ),
        (
            600,
            90,
            200,
            "namespace default uses 400 of at most 540 entries of bpf.maps.slots (service.namespaceShare: 90)",
        ),
        (
            600,
            50,
            2,
            "a Service with Maglev tables or weights may use at most 150 entries of bpf.maps.slots, \
             50 % of the limit of namespace default (service.namespaceShare)",
        ),
    ] {
        let sizes = ROOMY.with(MapSize::Slots, slots);
        let settings = PlanSettings {
            namespace_share: share,
            ..settings()
        };
        let maps = Memory::new(sizes.with(MapSize::Backends, 1024));
        let mut reconciler = adopt_with(maps, settings);
        let endpoints: Vec<u8> = (8..8 + used).collect();
        let others = [set("a", 1, &endpoints), set("b", 2, &endpoints)];
        let count = usize::from(slots == 600) + 1;
        apply(&mut reconciler, others.into_iter().take(count).collect());
        let table = with(set("web", 3, &[1, 2]), |service| {
            service.algorithm = Some(Algorithm::Maglev);
        });
        apply(&mut reconciler, vec![table]);

        let web = ObjectName::new("default", "web");
        let problems = reconciler.sync.problems.of_service(&web);
        let found = problems.and_then(|ports| ports.values().next());
        let found = found.expect("a problem");
        assert_eq!(found.reason, Reason::SlotsReduced);
        assert!(found.text.contains(text), "{found:?}");
        assert_eq!(backends(&reconciler, 3), Some(vec![1, 2]));
    }
}
