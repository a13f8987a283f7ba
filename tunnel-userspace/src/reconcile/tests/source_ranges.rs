//! The clients that may use a load balancer's address: after changes, after kills, and when maps are full.

use std::{collections::BTreeMap, net::IpAddr};

use proptest::prelude::*;
use tunnel_common::service::SourceRange;

use super::{
    super::Reconciler, BTreeSet, Change, ClusterUpdate, Family, Ipv4Addr, Ipv6Addr, MapSize,
    Memory, NoGrace, Node, ROOMY, Reason, adopt, apply, apply_nodes, family, fixture, http_at,
    kills::restart_after_kill, migrate::migrate, problem, serving, update, vip, with,
};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// Returns the load balancer address of the Service that has the given VIP.
fn load_balancer_ip(last: u8) -> IpAddr {
    match family(last) {
        Family::V4 => Ipv4Addr::new(203, 0, 113, last).into(),
        Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into(),
    }
}

/// Returns the network of the client with the given number. Clients with consecutive numbers have adjacent
/// networks.
fn network(of: Family, client: u8) -> (IpAddr, u8) {
    match of {
        Family::V4 => (Ipv4Addr::new(10, 2, client, 0).into(), 24),
        Family::V6 => {
            let first = Ipv6Addr::new(0xfd00, 0x10, 2, client.into(), 0, 0, 0, 0);
            (first.into(), 64)
        }
    }
}

/// Returns the VIP of the Service with the given number. All Services in a test have VIPs in the same address
/// family, so that they can share lists.
fn vip_in(of: Family, number: u8) -> u8 {
    2 * number + u8::from(of == Family::V6)
}

/// Returns a Service with one VIP and with a load balancer that only the given clients may use, or all
/// clients if none are given.
fn set(name: &'static str, last: u8, clients: &[u8]) -> Change<'static> {
    let ranges = clients.iter().map(|it| network(family(last), *it));
    with(super::set(name, last, &[1]), |service| {
        service.load_balancer_ips = vec![load_balancer_ip(last)];
        service.source_ranges = ranges.collect();
    })
}

/// Returns the clients that may use the load balancer address of the Service that has the given VIP, or
/// `None` if the maps have no such frontend.
fn allowed_clients(reconciler: &Reconciler<Memory>, last: u8) -> Option<Vec<u8>> {
    let maps = reconciler.maps();
    let frontend = maps.frontends[maps.frontend_keys.get(&http_at(load_balancer_ip(last)))?];
    let positions =
        frontend.source_ranges.base..frontend.source_ranges.base + frontend.source_ranges.len;
    let client = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets()[2],
        IpAddr::V6(ip) => ip.octets()[7],
    };
    let networks = |range: &SourceRange| client(range.first.to_ip())..=client(range.last.to_ip());
    let ranges = positions.map(|position| &maps.source_ranges[&position]);
    Some(ranges.flat_map(networks).collect())
}

type Step = (usize, Option<BTreeSet<u8>>);

fn history() -> impl Strategy<Value = Vec<Step>> {
    // Services share some lists, since there are only a few different ones. Adjacent ranges are merged.
    let clients = proptest::collection::btree_set(1..8_u8, 0..4);
    let step = (0..NAMES.len(), proptest::option::weighted(0.8, clients));
    proptest::collection::vec(step, 1..24)
}

fn update_of(of: Family, (name, clients): &Step) -> ClusterUpdate {
    let vip = vip_in(of, u8::try_from(*name).expect("few") + 1);
    let name = NAMES[*name];
    let change = clients.as_ref().map_or((name, None), |clients| {
        let clients: Vec<u8> = clients.iter().copied().collect();
        set(name, vip, &clients)
    });
    update(vec![change])
}

fn expected_clients(history: &[Step]) -> BTreeMap<u8, Option<Vec<u8>>> {
    let mut last = BTreeMap::from([(1, None), (2, None), (3, None)]);
    for (name, clients) in history {
        let clients = clients.as_ref().map(|all| all.iter().copied().collect());
        last.insert(u8::try_from(*name).expect("few") + 1, clients);
    }
    last
}

fn clients_by_service(
    of: Family,
    reconciler: &Reconciler<Memory>,
) -> BTreeMap<u8, Option<Vec<u8>>> {
    let admitted = |number| (number, allowed_clients(reconciler, vip_in(of, number)));
    (1..4).map(admitted).collect()
}

/// Returns how many entries the expected lists need if equal lists are stored only once.
fn needed_entries(history: &[Step]) -> usize {
    let lists: BTreeSet<_> = expected_clients(history).into_values().flatten().collect();
    let ranges = |list: &Vec<u8>| {
        let starts_range =
            |(position, client): (usize, &u8)| position == 0 || list[position - 1] + 1 != *client;
        list.iter()
            .enumerate()
            .filter(|it| starts_range(*it))
            .count()
    };
    lists.iter().map(ranges).sum()
}

fn used_entries(reconciler: &Reconciler<Memory>) -> usize {
    usize::try_from(reconciler.sync.tracked.actual.usage().source_ranges).expect("few")
}

/// Deletes all Services and returns the length of the longest list that then fits.
fn longest_free_list(mut reconciler: Reconciler<Memory>) -> u32 {
    apply(&mut reconciler, NAMES.map(|name| (name, None)).into());
    let entries = reconciler.maps().sizes.source_range_entries();
    let sources = &mut reconciler.sync.tracked.actual.source_ranges;
    let has = |len: &u32| sources.allocate(*len as usize).is_some();
    (0..=entries).rev().find(has).unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_allowed_clients_are_right_after_any_history_and_any_kill(
        history in history(),
        cut in 0..200_usize,
        grown in 0..64_u32,
        is_v6: bool,
    ) {
        let of = if is_v6 { Family::V6 } else { Family::V4 };
        let apply = |reconciler: &mut Reconciler<Memory>, step: &Step| reconciler.update(update_of(of, step));
        let mut second = restart_after_kill(&history, cut, apply);
        prop_assert_eq!(clients_by_service(of, &second), expected_clients(&history));
        prop_assert_eq!(used_entries(&second), needed_entries(&history));
        prop_assert_eq!(second.audit(&NoGrace).expect("read"), 0);

        // A migration keeps the contents.
        let used_sources = second.sync.tracked.actual.usage().source_ranges;
        let sizes = ROOMY.with(MapSize::SourceRanges, used_sources + grown);
        let third = adopt(migrate(&second.sync.tracked.maps, sizes).expect("it fits"));
        prop_assert_eq!(third.sync.drift, 0);
        prop_assert_eq!(clients_by_service(of, &third), expected_clients(&history));
        prop_assert_eq!(used_entries(&third), needed_entries(&history));
        prop_assert_eq!(longest_free_list(second), ROOMY.source_range_entries());
    }
}

#[test]
fn an_address_can_become_restricted_and_unrestricted_again() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    // None of the ranges contains this node's addresses, so that nothing else in a record changes.
    let node = Node {
        internal_ips: fixture::ips(&["192.0.2.1", "2001:db8:1::1"]),
        ..fixture::node("node-a")
    };
    apply_nodes(&mut reconciler, vec![fixture::node_update(node)]);
    for of in [&[][..], &[1, 3], &[3], &[]] {
        apply(&mut reconciler, vec![set("a", 1, of), set("b", 2, of)]);
        for vip in [1, 2] {
            assert_eq!(allowed_clients(&reconciler, vip).as_deref(), Some(of));
        }
    }
}

#[test]
fn ranges_without_room_are_a_problem_and_the_old_ones_stay() {
    for of in [Family::V4, Family::V6] {
        let [a, b, c] = [1, 2, 3].map(|number| vip_in(of, number));
        let services = [set("a", a, &[1, 3]), set("b", b, &[5])];
        let mut reconciler = serving(ROOMY.with(MapSize::SourceRanges, 3), services);
        apply(&mut reconciler, vec![set("c", c, &[1, 5])]);
        assert_eq!(problem(&reconciler, "c"), Some(Reason::SourceRangesFull));
        // The restricted address is not served, but the cluster IP is.
        assert_eq!(allowed_clients(&reconciler, c), None, "{of:?}");
        assert!(reconciler.maps().backends_of(&vip(c)).is_some(), "{of:?}");

        // A list that already exists needs no additional entries.
        apply(&mut reconciler, vec![set("c", c, &[5])]);
        assert_eq!(problem(&reconciler, "c"), None);
        assert_eq!(allowed_clients(&reconciler, c), Some(vec![5]));

        // If there is no room for a new list, the old one stays in use.
        apply(&mut reconciler, vec![set("b", b, &[1, 3, 5])]);
        assert_eq!(problem(&reconciler, "b"), Some(Reason::SourceRangesFull));
        assert_eq!(allowed_clients(&reconciler, b), Some(vec![5]));

        apply(&mut reconciler, vec![("a", None), ("c", None)]);
        assert_eq!(problem(&reconciler, "b"), None);
        assert_eq!(allowed_clients(&reconciler, b), Some(vec![1, 3, 5]));

        // A list can be replaced even if the map is full.
        apply(&mut reconciler, vec![set("b", b, &[2, 4, 6])]);
        assert_eq!(allowed_clients(&reconciler, b), Some(vec![2, 4, 6]));
    }
}

#[test]
fn several_services_may_have_more_ranges_than_one_frontend_may() {
    // The ranges are not adjacent, so that they are not merged.
    let many = |name, vip: u8, first: u32| {
        let addresses = (0..40_000).map(|number| Ipv4Addr::from_bits(first + 2 * number));
        let ranges = addresses.map(|ip| (ip.into(), 32)).collect();
        with(set(name, vip, &[]), |service| {
            service.source_ranges = ranges
        })
    };
    let mut maps = Memory::new(ROOMY.with(MapSize::SourceRanges, 80_000));
    maps.checks_every_write = false;
    let mut reconciler = adopt(maps);

    let services = vec![many("a", 2, 0x0a00_0000), many("b", 4, 0x0b00_0000)];
    apply(&mut reconciler, services);

    assert_eq!(problem(&reconciler, "b"), None);
    assert_eq!(used_entries(&reconciler), 80_000);
}
