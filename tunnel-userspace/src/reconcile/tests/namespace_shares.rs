//! The share of the maps that the Services of a namespace may use.

use super::*;

/// Sizes of which a namespace alone may use half: 32 frontends, 100 slots and 100 backends.
const SIZES: MapSizes = MapSizes {
    frontends: 64,
    slots: 200,
    backends: 200,
    ..ROOMY
};

fn half() -> PlanSettings {
    PlanSettings {
        namespace_share: 50,
        ..settings()
    }
}

/// Returns a Service in a namespace, with the given number of endpoints in the network 10.`net`.
fn service(namespace: &str, number: u8, net: u8, endpoints: u8) -> (ObjectName, ServiceState) {
    let name = ObjectName::new(namespace, format!("web-{number}"));
    let service = Service {
        cluster_ips: vec![Ipv4Addr::new(10, 96, net, number).into()],
        ports: vec![fixture::http(80)],
        ..Service::named(name.clone())
    };
    let endpoint = |last| fixture::endpoint(Ipv4Addr::new(10, net, number, last).into());
    let endpoints = (1..=endpoints).map(endpoint).collect();
    let ports = &[("http", 8080)];
    let slice = fixture::slice("web", &name, Family::V4, ports, endpoints);
    let state = ServiceState {
        service: Arc::new(service),
        slices: vec![Arc::new(slice)],
    };
    (name, state)
}

fn apply_all(
    reconciler: &mut Reconciler<Memory>,
    services: impl IntoIterator<Item = (ObjectName, ServiceState)>,
) {
    let services = services.into_iter();
    reconciler.update(ClusterUpdate {
        services: services.map(|(name, state)| (name, Some(state))).collect(),
        ..update(Vec::new())
    });
    settle(reconciler);
}

#[test]
fn a_namespace_with_very_many_problems_does_not_hide_those_of_others() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let first = service("b", 1, 2, 1);
    let conflicting = |namespace: &str, number: u16| {
        let name = ObjectName::new(namespace, format!("web-{number}"));
        let mut state = first.1.clone();
        let service = Arc::make_mut(&mut state.service);
        service.name = name.clone();
        (name, state)
    };
    let others = [conflicting("b", 2), conflicting("c", 1)];
    let many = (1..=1100).map(|number| conflicting("a", 1000 + number));
    apply_all(&mut reconciler, [first.clone()]);
    apply_all(&mut reconciler, many.chain(others.clone()));

    let warnings = reconciler.warnings(&BTreeSet::new());
    assert_eq!(warnings.len(), 1000);
    let has_warning = |name: &ObjectName| warnings.iter().any(|it| it.regarding.name == *name);
    let hidden: Vec<_> = others.iter().filter(|it| !has_warning(&it.0)).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
}

fn problem_in(reconciler: &Reconciler<Memory>, name: &ObjectName) -> Option<PortProblem> {
    let ports = reconciler.sync.problems.of_service(name)?;
    ports.values().next().cloned()
}

/// Returns how many backends a Service has in the maps.
fn programmed(reconciler: &Reconciler<Memory>, name: &ObjectName) -> usize {
    let services = services(reconciler, Some(&name.to_string()));
    services[0].ports[0].backends.len()
}

#[test]
fn a_namespace_gets_its_share_and_others_the_rest() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let tenant: Vec<_> = (0..8)
        .map(|number| service("tenant", number, 1, 20))
        .collect();
    apply_all(&mut reconciler, tenant.clone());

    let names: Vec<_> = tenant.iter().map(|(name, _)| name.clone()).collect();
    let counts = names.iter().map(|name| programmed(&reconciler, name));
    assert_eq!(counts.collect::<Vec<_>>(), [20, 20, 20, 20, 20, 0, 0, 0]);
    let refused = problem_in(&reconciler, &names[5]).expect("no room");
    assert_eq!(refused.reason, Reason::NamespaceShareExceeded);
    for part in [
        "namespace tenant uses 100 of at most 100",
        "service.namespaceShare: 50",
    ] {
        assert!(refused.text.contains(part), "{refused:?}");
    }
    let mut stats = ReconcileStats::default();
    reconciler.fill_stats(&mut stats, Duration::ZERO);
    assert_eq!(stats.namespaces_beyond_share["tenant"], 3);
    // Half of what is left.
    let (victim, state) = service("victim", 1, 2, 60);
    apply_all(&mut reconciler, [(victim.clone(), state)]);
    assert_eq!(programmed(&reconciler, &victim), 50);
    let (third, state) = service("third", 1, 3, 32);
    apply_all(&mut reconciler, [(third.clone(), state)]);
    assert_eq!(
        programmed(&reconciler, &third),
        32,
        "what every namespace may use"
    );
    assert_eq!(problem_in(&reconciler, &third), None);
}

#[test]
fn what_is_programmed_stays_and_may_change_when_the_share_shrinks() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let (tenant, state) = service("tenant", 1, 1, 40);
    apply_all(&mut reconciler, [(tenant.clone(), state)]);
    for (net, (other, endpoints)) in (10..).zip([("second", 80), ("third", 40), ("fourth", 32)]) {
        let (other, state) = service(other, 1, net, endpoints);
        apply_all(&mut reconciler, [(other.clone(), state)]);
        assert_eq!(problem_in(&reconciler, &other), None);
    }
    assert_eq!(programmed(&reconciler, &tenant), 40);

    // The namespace may now use 32 backends, but a change to as many as before goes through.
    let (_, state) = service("tenant", 1, 4, 40);
    let state = ServiceState {
        service: service("tenant", 1, 1, 0).1.service,
        ..state
    };
    apply_all(&mut reconciler, [(tenant.clone(), state)]);

    assert_eq!(programmed(&reconciler, &tenant), 40);
    assert_eq!(problem_in(&reconciler, &tenant), None);
    // The same applies to a port that gets another name.
    let (_, mut state) = service("tenant", 1, 4, 40);
    let renamed = Arc::make_mut(&mut state.service);
    renamed.cluster_ips = service("tenant", 1, 1, 0).1.service.cluster_ips.clone();
    renamed.ports[0].name = "web".into();
    Arc::make_mut(&mut state.slices[0]).ports[0].name = "web".into();
    apply_all(&mut reconciler, [(tenant.clone(), state)]);
    assert_eq!(programmed(&reconciler, &tenant), 40);
    assert_eq!(problem_in(&reconciler, &tenant), None);
    // One more is refused.
    let (_, state) = service("tenant", 2, 1, 1);
    let (more, _) = service("tenant", 2, 1, 1);
    apply_all(&mut reconciler, [(more.clone(), state)]);
    assert_eq!(programmed(&reconciler, &more), 0);
}

#[test]
fn removed_backends_with_open_connections_count_against_their_namespace() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let open = reconciler.maps().open_connections.clone();
    let (tenant, _) = service("tenant", 1, 1, 0);
    for net in 1..20 {
        let (_, state) = service("tenant", 1, net, 90);
        let state = ServiceState {
            service: service("tenant", 1, 1, 0).1.service,
            ..state
        };
        apply_all(&mut reconciler, [(tenant.clone(), state)]);
        connect_to_all(&reconciler);
    }

    // The namespace may use half of the 200 entries and half of the 89 spare ones.
    let taken = reconciler.sync.tracked.actual.draining.len() + programmed(&reconciler, &tenant);
    assert!((100..=144).contains(&taken), "{taken}");
    let text = problem_in(&reconciler, &tenant).expect("a problem").text;
    assert!(text.contains("open connections still use"), "{text}");
    let (victim, state) = service("victim", 1, 30, 32);
    apply_all(&mut reconciler, [(victim.clone(), state)]);
    assert_eq!(programmed(&reconciler, &victim), 32);
    open.0.lock().unwrap().clear();
    reconciler.sync.poll_draining();
    settle(&mut reconciler);
    assert_eq!(programmed(&reconciler, &tenant), 84, "half of what is left");
}

#[test]
fn tables_leave_room_for_plain_sets_of_the_same_namespace() {
    let sizes = MapSizes {
        slots: 2000,
        ..SIZES
    };
    let mut reconciler = adopt_with(Memory::new(sizes), half());
    let maglev = || {
        let (name, mut state) = many_ports("tenant", 10, 1, 2);
        let service = Arc::make_mut(&mut state.service);
        service.algorithm = Some(Algorithm::Maglev);
        (name, state)
    };

    apply_all(&mut reconciler, [maglev()]);

    let ports = &services(&reconciler, Some("tenant/web-1"))[0].ports;
    let reduced = ports
        .iter()
        .filter(|it| it.reason.as_deref() == Some("slots_reduced"));
    // One table of 251 slots fits into a quarter of the 2,000 slots.
    assert_eq!(reduced.count(), 9);
    assert!(ports.iter().all(|port| port.backends.len() == 2));
}

#[test]
fn a_restart_counts_what_it_finds_in_the_maps() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let tenant: Vec<_> = (0..5)
        .map(|number| service("tenant", number, 1, 20))
        .collect();
    apply_all(&mut reconciler, tenant.clone());
    let mut second = adopt_with(reconciler.sync.tracked.maps, half());
    let (more, state) = service("tenant", 0, 1, 25);
    apply_all(
        &mut second,
        tenant.into_iter().skip(1).chain([(more.clone(), state)]),
    );

    assert_eq!(programmed(&second, &more), 20);
    let problem = problem_in(&second, &more).expect("a problem");
    assert_eq!(problem.reason, Reason::NamespaceShareExceeded);
}

/// Returns a Service in a namespace, with the given number of ports, whose endpoints have the addresses that
/// [`service`] returns for `net`.
fn many_ports(namespace: &str, ports: u16, net: u8, endpoints: u8) -> (ObjectName, ServiceState) {
    let (name, mut state) = service(namespace, 1, net, endpoints);
    let service = Arc::make_mut(&mut state.service);
    service.cluster_ips = vec![Ipv4Addr::new(10, 96, 1, 1).into()];
    service.ports = (0..ports)
        .map(|number| {
            let mut port = fixture::http(80 + number);
            port.name = format!("http-{number}").into();
            port
        })
        .collect();
    let slice = Arc::make_mut(&mut state.slices[0]);
    slice.ports = service
        .ports
        .iter()
        .map(|port| EndpointPort {
            name: Arc::clone(&port.name),
            port: 8080,
            protocol: Protocol::TCP,
        })
        .collect();
    (name, state)
}

/// Returns how many backends the only Service of a namespace has in the maps, and how many removed backends
/// open connections keep there.
fn occupied(reconciler: &Reconciler<Memory>, name: &ObjectName) -> usize {
    let services = services(reconciler, Some(&name.to_string()));
    let ports = services[0].ports.iter();
    let serving: usize = ports.map(|port| port.backends.len()).sum();
    serving + reconciler.sync.tracked.actual.draining.len()
}

#[test]
fn backends_that_many_ports_replace_at_once_count_against_their_namespace() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let mut name = None;
    for net in 1..20 {
        let (tenant, state) = many_ports("tenant", 5, net, 20);
        apply_all(&mut reconciler, [(tenant.clone(), state)]);
        connect_to_all(&reconciler);
        // The namespace may use half of the 200 entries and half of the 89 spare ones.
        let occupied = occupied(&reconciler, &tenant);
        assert!((100..=144).contains(&occupied), "{occupied} in round {net}");
        if net % 5 == 0 {
            reconciler = adopt_with(reconciler.sync.tracked.maps, half());
        }
        name = Some(tenant);
    }

    let (victim, state) = service("victim", 1, 30, 32);
    apply_all(&mut reconciler, [(victim.clone(), state)]);
    assert_eq!(programmed(&reconciler, &victim), 32);
    assert_eq!(problem_in(&reconciler, &victim), None);
    let tenant = name.expect("a Service");
    let text = problem_in(&reconciler, &tenant).expect("a problem").text;
    assert!(
        text.contains("namespace tenant uses 144 of at most"),
        "{text}"
    );
}

#[test]
fn removed_backends_count_before_their_grace_period_has_ended() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let mut retired = RetiredEntries::default();
    let mut tenant = None;
    for net in 1..20 {
        let (name, state) = many_ports("tenant", 5, net, 20);
        reconciler.update(ClusterUpdate {
            services: [(name.clone(), Some(state))].into(),
            ..update(Vec::new())
        });
        retired.0.extend(reconciler.write_changes().0);
        connect_to_all(&reconciler);
        tenant = Some(name);
    }
    free_retired(&mut reconciler, &retired);
    settle(&mut reconciler);

    let occupied = occupied(&reconciler, &tenant.expect("a Service"));
    assert!((100..=144).contains(&occupied), "{occupied}");
}

#[test]
fn many_ports_replace_all_their_backends_at_once() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let (tenant, state) = many_ports("tenant", 5, 1, 20);
    apply_all(&mut reconciler, [(tenant.clone(), state)]);
    let (_, state) = many_ports("tenant", 5, 2, 20);
    let before = reconciler.sync.problems.reason_counts.clone();

    apply_all(&mut reconciler, [(tenant, state)]);

    let ports = &services(&reconciler, Some("tenant/web-1"))[0].ports;
    for port in ports {
        assert_eq!(port.backends.len(), 20);
        assert!(port.backends.iter().all(|it| it.starts_with("10.2.")));
    }
    // No port was refused on the way.
    assert_eq!(reconciler.sync.problems.reason_counts, before);
}

#[test]
fn ports_that_get_other_names_are_served_at_every_moment() {
    let mut reconciler = adopt_with(Memory::new(SIZES), half());
    let (tenant, state) = many_ports("tenant", 5, 1, 20);
    apply_all(&mut reconciler, [(tenant.clone(), state)]);
    let maps = &mut reconciler.sync.tracked.maps;
    maps.never_empty = maps.frontend_keys.keys().copied().collect();
    let frontends = maps.never_empty.clone();
    let (_, mut state) = many_ports("tenant", 5, 2, 20);
    let renamed = |name: &Arc<str>| Arc::from(format!("new-{name}"));
    for port in &mut Arc::make_mut(&mut state.service).ports {
        port.name = renamed(&port.name);
    }
    for port in &mut Arc::make_mut(&mut state.slices[0]).ports {
        port.name = renamed(&port.name);
    }
    reconciler.update(ClusterUpdate {
        services: [(tenant.clone(), Some(state))].into(),
        ..update(Vec::new())
    });
    for _ in 0..8 {
        let retired = reconciler.write_changes();
        let known = &reconciler.maps().frontend_keys;
        assert!(frontends.iter().all(|key| known.contains_key(key)));
        free_retired(&mut reconciler, &retired);
    }

    assert_eq!(problem_in(&reconciler, &tenant), None);
    let ports = &services(&reconciler, Some("tenant/web-1"))[0].ports;
    let counts = ports.iter().map(|port| port.backends.len());
    assert_eq!(counts.collect::<Vec<_>>(), [20; 5]);
}
