//! Slots whose free entries are split into many short ranges.

use super::*;

/// Sizes of which a namespace alone may use half: 1,024 slots of an array with 2,368 entries.
const SIZES: MapSizes = MapSizes {
    frontends: 4096,
    slots: 2048,
    backends: 4096,
    ..ROOMY
};

fn service(namespace: &str, number: u16, endpoints: u8) -> (ObjectName, ServiceState) {
    let name = ObjectName::new(namespace, format!("web-{number:04}"));
    let [high, low] = number.to_be_bytes();
    let net = match namespace {
        "tenant" => 1,
        "victim" => 2,
        _ => 3,
    };
    let service = Service {
        cluster_ips: vec![Ipv4Addr::new(10, 90 + net, high, low).into()],
        ports: vec![fixture::http(80)],
        ..Service::named(name.clone())
    };
    let endpoint = |last| fixture::endpoint(Ipv4Addr::new(10, net, 0, last).into());
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
    services: impl IntoIterator<Item = (ObjectName, Option<ServiceState>)>,
) {
    reconciler.update(ClusterUpdate {
        services: services.into_iter().collect(),
        ..update(Vec::new())
    });
    settle(reconciler);
}

fn programmed(reconciler: &Reconciler<Memory>, name: &ObjectName) -> usize {
    let services = services(reconciler, Some(&name.to_string()));
    services[0].ports[0].backends.len()
}

fn problem_in(reconciler: &Reconciler<Memory>, name: &ObjectName) -> Option<PortProblem> {
    let ports = reconciler.sync.problems.of_service(name)?;
    ports.values().next().cloned()
}

/// Returns maps in which a namespace has created and deleted Services, so that no range of free slots has more
/// than 31 entries. The namespace has never exceeded its share.
fn fragmented() -> Reconciler<Memory> {
    let settings = PlanSettings {
        namespace_share: 50,
        ..settings()
    };
    let mut maps = Memory::new(SIZES);
    maps.checks_every_write = false;
    let mut reconciler = adopt_with(maps, settings);
    let mut number = 0;
    // In each phase, Services of two sizes alternate. Those of the second size are deleted, and leave ranges
    // that are too short for the Services of the next phase.
    for (kept, deleted, count) in [(1, 7, 256), (8, 30, 44), (32, 31, 17)] {
        let first = number;
        let mut phase = Vec::new();
        for endpoints in [kept, deleted].into_iter().cycle().take(count) {
            let (name, state) = service("tenant", number, endpoints);
            phase.push((name, Some(state)));
            number += 1;
        }
        apply_all(&mut reconciler, phase);
        assert_eq!(*reconciler.sync.problems.ports(), BTreeMap::new());
        let deleted = (first + 1..number).step_by(2);
        let deleted = deleted.map(|number| (service("tenant", number, 0).0, None));
        apply_all(&mut reconciler, deleted);
    }
    let actual = &reconciler.sync.tracked.actual;
    assert!(actual.usage().slots < 600);
    let [longest, _] = actual.sets.largest_free();
    assert!(longest < 32, "{longest}");
    reconciler
}

#[test]
fn a_plain_set_and_a_table_find_room_between_the_sets_of_another_namespace() {
    let mut reconciler = fragmented();
    let maps = &mut reconciler.sync.tracked.maps;
    maps.never_empty = maps.frontend_keys.keys().copied().collect();

    let (plain, state) = service("victim", 1, 32);
    apply_all(&mut reconciler, [(plain.clone(), Some(state))]);
    assert_eq!(problem_in(&reconciler, &plain), None);
    assert_eq!(programmed(&reconciler, &plain), 32);
    let (table, mut state) = service("other", 1, 2);
    Arc::make_mut(&mut state.service).algorithm = Some(Algorithm::Maglev);
    apply_all(&mut reconciler, [(table.clone(), Some(state))]);
    assert_eq!(problem_in(&reconciler, &table), None);
    assert_eq!(programmed(&reconciler, &table), 2);

    assert_eq!(audit(&mut reconciler), 0);
    assert_eq!(reconciler.maps().wrong_memberships(), Vec::<u32>::new());
    let mut second = adopt_with(reconciler.sync.tracked.maps, settings());
    assert_eq!(second.sync.drift, 0);
    assert_eq!(second.audit(&NoGrace).expect("read"), 0);
}

#[test]
fn a_set_for_which_no_other_set_can_be_moved_is_truncated_with_a_reason() {
    let mut maps = Memory::new(SIZES);
    maps.checks_every_write = false;
    let mut reconciler = adopt(maps);
    let mut number = 0;
    // Sets of 32 slots remain, with gaps of 6 or 7 between them.
    for (gap, pairs) in [(6, 53), (7, 9)] {
        let first = number;
        let mut phase = Vec::new();
        for endpoints in [32, gap].into_iter().cycle().take(2 * pairs) {
            let (name, state) = service("tenant", number, endpoints);
            phase.push((name, Some(state)));
            number += 1;
        }
        apply_all(&mut reconciler, phase);
        let deleted = (first + 1..number).step_by(2);
        let deleted = deleted.map(|number| (service("tenant", number, 0).0, None));
        apply_all(&mut reconciler, deleted);
    }

    let (victim, state) = service("victim", 1, 40);
    apply_all(&mut reconciler, [(victim.clone(), Some(state))]);

    let problem = problem_in(&reconciler, &victim).expect("a problem");
    assert_eq!(problem.reason, Reason::SlotsFragmented);
    let longest = programmed(&reconciler, &victim);
    assert!((6..32).contains(&longest), "{longest}");
    let text = format!(
        "the longest range of free entries of bpf.maps.slots has {longest} entries; {longest} of 40 endpoints"
    );
    assert!(problem.text.contains(&text), "{problem:?}");
    // Room for one set of 32 slots is room to move all others.
    apply_all(&mut reconciler, [(service("tenant", 2, 0).0, None)]);
    assert_eq!(problem_in(&reconciler, &victim), None);
    assert_eq!(programmed(&reconciler, &victim), 40);
}
