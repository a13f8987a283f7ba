mod memory;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use memory::Memory;
use proptest::prelude::*;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::Backend,
};

use super::{access::with_spare, *};
use crate::model::{
    Endpoint, EndpointPort, EndpointSlice, Family, Service, ServicePort, ServiceState,
};

struct NoGrace;

impl Grace for NoGrace {
    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const ROOMY: Sizes = Sizes {
    fronts: 64,
    slots: 256,
    backends: 256,
};

fn adopt(maps: Memory) -> Reconciler<Memory> {
    let sizes = maps.sizes;
    let settings = Settings {
        node_name: "node-a".to_owned(),
        algorithm: Algorithm::Random,
    };
    let mut reconciler = Reconciler::adopt(maps, sizes, &mut NoGrace, settings).expect("adopted");
    reconciler.maps.grace();
    reconciler
}

fn vip(last: u8) -> FrontKey {
    let ip = IpAddr::V4(Ipv4Addr::new(10, 96, 0, last));
    FrontKey::new(Address::from_ip(ip), Port::from_host(80), Protocol::TCP)
}

/// A Service on one VIP with endpoints 10.1.0.N.
fn state(name: &str, vip: u8, endpoints: &BTreeSet<u8>) -> ServiceState {
    let port: Arc<str> = "http".into();
    let service = Service {
        name: ObjectName::new("default", name),
        created: None,
        cluster_ips: vec![IpAddr::V4(Ipv4Addr::new(10, 96, 0, vip))],
        ports: vec![ServicePort {
            name: Arc::clone(&port),
            port: 80,
            protocol: Protocol::TCP,
        }],
        algorithm: None,
    };
    let endpoint = |last: &u8| Endpoint {
        address: IpAddr::V4(Ipv4Addr::new(10, 1, 0, *last)),
        ready: true,
        serving: true,
        terminating: false,
        node: None,
    };
    let slice = EndpointSlice {
        name: ObjectName::new("default", name),
        service: ObjectName::new("default", name),
        family: Family::V4,
        ports: vec![EndpointPort {
            name: port,
            port: 8080,
            protocol: Protocol::TCP,
        }],
        endpoints: endpoints.iter().map(endpoint).collect(),
    };
    ServiceState {
        service: Arc::new(service),
        slices: vec![Arc::new(slice)],
    }
}

fn update(services: Vec<(&str, Option<ServiceState>)>) -> Update {
    let named = |(name, state)| (ObjectName::new("default", name), state);
    Update {
        services: services.into_iter().map(named).collect(),
        nodes: Vec::new(),
        synced: true,
        since: Duration::ZERO,
    }
}

fn set(name: &'static str, vip: u8, endpoints: &[u8]) -> (&'static str, Option<ServiceState>) {
    (
        name,
        Some(state(name, vip, &endpoints.iter().copied().collect())),
    )
}

/// Writes, waits a grace period and frees, until nothing is left to do.
fn settle(reconciler: &mut Reconciler<Memory>) {
    for _ in 0..8 {
        let retired = reconciler.pass();
        reconciler.maps.grace();
        reconciler.free(&retired, false);
        if !reconciler.is_dirty() {
            break;
        }
    }
}

fn apply(reconciler: &mut Reconciler<Memory>, services: Vec<(&str, Option<ServiceState>)>) {
    reconciler.update(update(services));
    settle(reconciler);
}

/// The last octets of the backends that a VIP leads to.
fn backends(reconciler: &Reconciler<Memory>, last: u8) -> Option<Vec<u8>> {
    let octet = |backend: Backend| match backend.address.to_ip() {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(_) => panic!("an IPv6 backend"),
    };
    Some(
        reconciler
            .maps
            .read(&vip(last))?
            .into_iter()
            .map(octet)
            .collect(),
    )
}

fn problem(reconciler: &Reconciler<Memory>, name: &str) -> Option<Reason> {
    let ports = reconciler.problems.get(&ObjectName::new("default", name))?;
    ports.values().next().map(|problem| problem.reason)
}

#[test]
fn nothing_is_written_or_deleted_before_every_source_has_told_its_list() {
    let mut first = adopt(Memory::new(ROOMY));
    apply(&mut first, vec![set("web", 1, &[1])]);
    let mut second = adopt(first.maps);
    let before = second.maps.writes;

    second.update(Update {
        synced: false,
        ..update(vec![set("dns", 2, &[2])])
    });
    settle(&mut second);

    assert_eq!(second.maps.writes, before);
    assert_eq!(backends(&second, 1), Some(vec![1]));
}

#[test]
fn a_restart_finds_everything_in_its_place_and_writes_nothing() {
    let mut first = adopt(Memory::new(ROOMY));
    apply(
        &mut first,
        vec![
            set("web", 1, &[1, 2, 3]),
            set("dns", 2, &[]),
            set("db", 3, &[4]),
        ],
    );
    let mut second = adopt(first.maps);
    let before = second.maps.writes;

    apply(
        &mut second,
        vec![
            set("web", 1, &[1, 2, 3]),
            set("dns", 2, &[]),
            set("db", 3, &[4]),
        ],
    );

    assert_eq!(second.maps.writes, before);
    assert_eq!(second.drift, 0);
}

#[test]
fn a_service_that_went_while_no_daemon_ran_is_removed_at_the_start() {
    let mut first = adopt(Memory::new(ROOMY));
    apply(&mut first, vec![set("web", 1, &[1]), set("old", 2, &[2])]);
    let mut second = adopt(first.maps);

    apply(&mut second, vec![set("web", 1, &[1])]);

    assert_eq!(backends(&second, 2), None);
    assert_eq!(second.actual.usage().fronts, 1);
    assert_eq!(second.actual.usage().backends, 1);
}

#[test]
fn a_backend_keeps_its_index_while_it_serves() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let index = |reconciler: &Reconciler<Memory>, last: u8| {
        let ip = Address::from_ip(IpAddr::V4(Ipv4Addr::new(10, 1, 0, last)));
        let mut found = reconciler.maps.be.iter();
        found
            .find(|(_, backend)| backend.address == ip)
            .map(|(index, backend)| (*index, *backend))
    };
    apply(&mut reconciler, vec![set("web", 1, &[1, 2])]);
    let before = index(&reconciler, 1);

    apply(&mut reconciler, vec![set("web", 1, &[1, 3])]);

    assert_eq!(index(&reconciler, 1), before);
    assert!(index(&reconciler, 2).is_some_and(|(_, backend)| !backend.state.is_serving()));
}

#[test]
fn an_address_moves_from_one_service_to_another_without_a_gap() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    apply(&mut reconciler, vec![set("old", 1, &[1])]);
    reconciler.update(update(vec![("old", None), set("new", 1, &[2])]));
    let writes = reconciler.maps.writes;

    for limit in writes.. {
        let mut killed = reconciler.maps.clone();
        killed.limit = limit;
        let mut copy = adopt(killed);
        copy.update(update(vec![("old", None), set("new", 1, &[2])]));
        let retired = copy.pass();
        let found = backends(&copy, 1).expect("an owner at every moment");
        assert!(found == [1] || found == [2]);
        if found == [2] && !copy.is_dirty() {
            drop(retired);
            break;
        }
    }
}

#[test]
fn of_two_services_with_one_address_the_loser_is_named_and_comes_when_the_winner_goes() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    apply(&mut reconciler, vec![set("a", 1, &[1]), set("b", 1, &[2])]);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(problem(&reconciler, "b"), Some(Reason::FrontClaimed));

    apply(&mut reconciler, vec![("a", None)]);

    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
    assert_eq!(problem(&reconciler, "b"), None);
}

#[test]
fn a_service_that_finds_no_room_is_named_and_comes_when_there_is_room() {
    for (sizes, reason) in [
        (Sizes { fronts: 2, ..ROOMY }, Reason::FrontsFull),
        (Sizes { slots: 4, ..ROOMY }, Reason::SlotsFull),
        (
            Sizes {
                backends: 4,
                ..ROOMY
            },
            Reason::BackendsFull,
        ),
    ] {
        let mut reconciler = adopt(Memory::new(sizes));
        apply(
            &mut reconciler,
            vec![set("a", 1, &[1, 2]), set("b", 2, &[3, 4])],
        );
        apply(&mut reconciler, vec![set("c", 3, &[5])]);
        assert_eq!(problem(&reconciler, "c"), Some(reason));
        assert_eq!(backends(&reconciler, 3), None);
        assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));

        apply(&mut reconciler, vec![("a", None)]);

        assert_eq!(backends(&reconciler, 3), Some(vec![5]), "{reason:?}");
        assert_eq!(problem(&reconciler, "c"), None);
        assert_eq!(backends(&reconciler, 2), Some(vec![3, 4]));
    }
}

#[test]
fn a_service_that_outgrows_the_maps_loses_what_left_and_keeps_the_rest() {
    let mut reconciler = adopt(Memory::new(Sizes {
        backends: 3,
        ..ROOMY
    }));
    apply(&mut reconciler, vec![set("web", 1, &[1, 2, 3])]);

    apply(&mut reconciler, vec![set("web", 1, &[2, 3, 4, 5])]);

    assert_eq!(problem(&reconciler, "web"), Some(Reason::BackendsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2, 3]));
}

#[test]
fn full_maps_still_take_a_change_that_needs_no_more_room() {
    let mut reconciler = adopt(Memory::new(Sizes {
        fronts: 2,
        slots: 4,
        backends: 4,
    }));
    apply(
        &mut reconciler,
        vec![set("a", 1, &[1, 2]), set("b", 2, &[3, 4])],
    );

    apply(&mut reconciler, vec![set("a", 1, &[5, 6])]);

    assert_eq!(backends(&reconciler, 1), Some(vec![5, 6]));
    assert_eq!(problem(&reconciler, "a"), None);
}

#[test]
fn a_write_that_fails_is_tried_again() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    reconciler.maps.limit = 2;
    apply(&mut reconciler, vec![set("web", 1, &[1, 2])]);
    assert_eq!(problem(&reconciler, "web"), Some(Reason::WriteFailed));
    assert!(reconciler.is_dirty());

    reconciler.maps.limit = usize::MAX;
    settle(&mut reconciler);

    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));
    assert_eq!(problem(&reconciler, "web"), None);
}

#[test]
fn what_a_foreign_hand_changed_is_found_and_written_anew() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    apply(
        &mut reconciler,
        vec![set("web", 1, &[1]), set("dns", 2, &[2])],
    );
    reconciler.maps.svc.remove(&vip(1));
    let dns = reconciler.maps.svc[&vip(2)];
    reconciler.maps.svc.insert(vip(9), dns);

    let differences = reconciler.audit(&mut NoGrace).expect("read");
    reconciler.maps.grace();
    settle(&mut reconciler);

    assert!(differences >= 2);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(backends(&reconciler, 2), Some(vec![2]));
    assert_eq!(backends(&reconciler, 9), None);
    assert_eq!(reconciler.audit(&mut NoGrace).expect("read"), 0);
}

/// What a history does: sets the endpoints of a Service on a VIP, or removes the Service.
type Step = (usize, u8, Option<BTreeSet<u8>>);

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn history() -> impl Strategy<Value = Vec<Step>> {
    let endpoints =
        proptest::option::weighted(0.8, proptest::collection::btree_set(1..12_u8, 0..6));
    proptest::collection::vec((0..NAMES.len(), 1..4_u8, endpoints), 1..24)
}

fn take(reconciler: &mut Reconciler<Memory>, (name, vip, endpoints): &Step) {
    let name = NAMES[*name];
    let state = endpoints
        .as_ref()
        .map(|endpoints| state(name, *vip, endpoints));
    reconciler.update(update(vec![(name, state)]));
}

/// What each VIP should lead to after a history, by the rule that the first name wins.
fn wanted(history: &[Step]) -> BTreeMap<u8, Vec<u8>> {
    let mut last: BTreeMap<usize, (u8, Option<BTreeSet<u8>>)> = BTreeMap::new();
    for (name, vip, endpoints) in history {
        last.insert(*name, (*vip, endpoints.clone()));
    }
    let mut wanted = BTreeMap::new();
    for (vip, endpoints) in last.into_values().rev() {
        if let Some(endpoints) = endpoints {
            wanted.insert(vip, endpoints.into_iter().collect());
        }
    }
    wanted
}

fn found(reconciler: &Reconciler<Memory>) -> BTreeMap<u8, Vec<u8>> {
    (1..4)
        .filter_map(|vip| Some((vip, backends(reconciler, vip)?)))
        .collect()
}

/// What the next start makes of a process that was killed after so many writes of a history.
/// `Memory` checks at each write that no front leads to another's backend.
fn killed_after(history: &[Step], cut: usize) -> Reconciler<Memory> {
    let mut first = adopt(Memory::new(ROOMY));
    first.maps.limit = cut;
    for step in history {
        take(&mut first, step);
        let retired = first.pass();
        if first.maps.writes < cut {
            first.maps.grace();
            first.free(&retired, false);
        }
    }
    let mut maps = first.maps;
    maps.limit = usize::MAX;
    let mut second = adopt(maps);
    for step in history {
        take(&mut second, step);
    }
    settle(&mut second);
    second
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_maps_hold_what_is_wanted_after_any_history_with_any_delay_of_freeing(
        history in history(),
        frees in proptest::collection::vec(any::<bool>(), 24),
    ) {
        let mut reconciler = adopt(Memory::new(ROOMY));
        let mut held = Retired::default();
        for (step, frees) in history.iter().zip(frees) {
            take(&mut reconciler, step);
            held.merge(reconciler.pass());
            if frees {
                reconciler.maps.grace();
                reconciler.free(&std::mem::take(&mut held), false);
            }
        }
        reconciler.maps.grace();
        reconciler.free(&held, false);
        settle(&mut reconciler);
        prop_assert_eq!(found(&reconciler), wanted(&history));
        prop_assert_eq!(reconciler.audit(&mut NoGrace).expect("read"), 0);
    }

    #[test]
    fn a_kill_between_any_two_writes_harms_nobody_and_the_next_start_mends_it(
        history in history(),
        cut in 0..200_usize,
    ) {
        let second = killed_after(&history, cut);
        prop_assert_eq!(found(&second), wanted(&history));
        let usage = second.actual.usage();
        let backends: usize = second.plans.values().flat_map(BTreeMap::values)
            .filter(|plan| plan.fronts.iter().any(|key| second.claims.owner(key)
                .is_some_and(|name| second.plans[&name.service].get(name) == Some(*plan))))
            .map(|plan| plan.serving.len()).sum();
        prop_assert!(usize::try_from(usage.backends).expect("small") <= backends);
    }

    #[test]
    fn a_size_comes_back_from_the_entries_it_was_made_with(size in 1..100_000_000_u32) {
        prop_assert_eq!(without_spare(with_spare(size)), size);
    }
}

#[test]
fn a_kill_at_each_write_of_a_long_history_is_mended() {
    let set = |endpoints: &[u8]| Some(endpoints.iter().copied().collect::<BTreeSet<u8>>());
    let history: Vec<Step> = vec![
        (3, 1, set(&[1, 2])),
        (1, 1, set(&[1, 2, 3])),
        (0, 1, set(&[])),
        (0, 1, None),
        (0, 1, set(&[1, 2])),
        (3, 2, set(&[1, 2, 3, 6, 7])),
        (3, 2, set(&[4, 5, 8, 9])),
        (0, 1, set(&[])),
        (3, 1, None),
        (0, 2, set(&[1])),
    ];
    for cut in 0..120 {
        let second = killed_after(&history, cut);
        assert_eq!(found(&second), wanted(&history), "after {cut} writes");
    }
}
