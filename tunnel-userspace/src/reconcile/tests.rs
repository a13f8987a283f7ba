mod change_cost;
mod draining_backends;
mod external_ips;
mod first_sync;
mod fragmentation;
mod full_maps;
mod heartbeat;
mod kills;
mod listeners;
mod memory_maps;
mod migrate;
mod namespace_shares;
mod node_addresses;
mod node_pools;
mod port_counters;
mod restarts;
mod rolling_changes;
mod source_ranges;
mod steering_warnings;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use memory_maps::{Memory, OpenConnections};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    reason::Reason,
    service::{Backend, FrontendKey},
    table::MapSize,
};

use super::*;
use crate::{
    model::{
        Algorithm, ClusterUpdate, Endpoint, EndpointPort, ExternalIps, Family, Node, NodeAddresses,
        ObjectName, Service, ServiceState, TopologyKeys, TrafficPolicy, fixture,
    },
    plan::NodePortAddresses,
};

struct NoGrace;

impl GracePeriod for NoGrace {
    fn wait(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A changed Service: its name and its new state, or `None` if it was deleted.
type Change<'a> = (&'a str, Option<ServiceState>);

/// Sizes with room for everything that most tests write.
const ROOMY: MapSizes = MapSizes {
    frontends: 64,
    slots: 256,
    backends: 256,
    ..MapSizes::uniform(64)
};

fn adopt(maps: Memory) -> Reconciler<Memory> {
    adopt_with(maps, settings())
}

fn settings() -> PlanSettings {
    PlanSettings {
        node_name: "node-a".to_owned(),
        algorithm: Algorithm::Random,
        node_port_addresses: vec![NodePortAddresses::All],
        external_ips: ExternalIps::Any,
        topology_keys: TopologyKeys::Ignore,
        namespace_share: 100,
        translates_packets: true,
        node_addresses: NodeAddresses::Serve,
        local_listeners: [0].into(),
    }
}

fn adopt_with(maps: Memory, settings: PlanSettings) -> Reconciler<Memory> {
    let sizes = maps.sizes;
    let mut reconciler = Reconciler::adopt(maps, sizes, &NoGrace, settings).expect("adopted");
    reconciler.sync.tracked.maps.end_grace_period();
    reconciler
}

/// Returns the address family of a VIP and its endpoints: IPv4 for even numbers and IPv6 for odd ones.
const fn family(vip: u8) -> Family {
    if vip.is_multiple_of(2) {
        Family::V4
    } else {
        Family::V6
    }
}

/// Returns the cluster IP that ends in the given number.
fn cluster_ip(vip: u8) -> IpAddr {
    match family(vip) {
        Family::V4 => Ipv4Addr::new(10, 96, 0, vip).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, vip.into()).into(),
    }
}

/// Returns the cluster IP that ends in the given number, in the other address family.
fn other_ip(vip: u8) -> IpAddr {
    match family(vip) {
        Family::V4 => Ipv6Addr::new(0xfd00, 0x10, 0x97, 0, 0, 0, 0, vip.into()).into(),
        Family::V6 => Ipv4Addr::new(10, 97, 0, vip).into(),
    }
}

/// Returns an address that ends in `last` for an endpoint of the given VIP.
fn pod_ip(vip: u8, last: u8) -> IpAddr {
    match family(vip) {
        Family::V4 => Ipv4Addr::new(10, 1, 0, last).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 1, 0, 0, 0, 0, last.into()).into(),
    }
}

/// Returns the key of the frontend at an address. All Services use the same port.
fn http_at(ip: IpAddr) -> FrontendKey {
    FrontendKey::new(Address::from_ip(ip), Port::from_host(80), Protocol::TCP)
}

fn vip(last: u8) -> FrontendKey {
    http_at(cluster_ip(last))
}

/// Returns true if an endpoint of a VIP is ready. Endpoint 7 is ready only for even VIPs, so that it joins
/// and leaves sets while it is serving.
const fn is_ready(vip: u8, last: u8) -> bool {
    last != 7 || vip.is_multiple_of(2)
}

/// Returns a Service with one VIP and with endpoints whose addresses end in the given numbers.
fn state(name: &str, vip: u8, endpoints: &BTreeSet<u8>) -> ServiceState {
    let service = Service {
        cluster_ips: vec![cluster_ip(vip)],
        ports: vec![fixture::http(80)],
        ..Service::named(ObjectName::new("default", name))
    };
    let endpoint = |last: &u8| Endpoint {
        ready: is_ready(vip, *last),
        ..fixture::endpoint(pod_ip(vip, *last))
    };
    let endpoints = endpoints.iter().map(endpoint).collect();
    let ports = &[("http", 8080)];
    let slice = fixture::slice(name, &service.name, family(vip), ports, endpoints);
    ServiceState {
        service: Arc::new(service),
        slices: vec![Arc::new(slice)],
    }
}

fn update(services: Vec<Change<'_>>) -> ClusterUpdate {
    let named = |(name, state)| (ObjectName::new("default", name), state);
    ClusterUpdate {
        services: services.into_iter().map(named).collect(),
        synced: true,
        complete: true,
        ..ClusterUpdate::default()
    }
}

fn set(name: &'static str, vip: u8, endpoints: &[u8]) -> Change<'static> {
    let endpoints = endpoints.iter().copied().collect();
    (name, Some(state(name, vip, &endpoints)))
}

/// Modifies the Service object in a change.
fn with<'a>((name, state): Change<'a>, change: impl FnOnce(&mut Service)) -> Change<'a> {
    let mut state = state.expect("a Service");
    change(Arc::make_mut(&mut state.service));
    (name, Some(state))
}

/// Ends the grace period and frees retired entries.
fn free_retired(reconciler: &mut Reconciler<Memory>, retired: &RetiredEntries) {
    reconciler.sync.tracked.maps.end_grace_period();
    reconciler.sync.free(retired, false);
}

/// Syncs, ends the grace period and frees retired entries, until nothing is dirty.
fn settle(reconciler: &mut Reconciler<Memory>) {
    for _ in 0..8 {
        let retired = reconciler.write_changes();
        free_retired(reconciler, &retired);
        if !reconciler.is_dirty() {
            break;
        }
    }
}

/// Returns a reconciler that has written the given Services to new maps.
fn serving<const N: usize>(sizes: MapSizes, services: [Change<'_>; N]) -> Reconciler<Memory> {
    let mut reconciler = adopt(Memory::new(sizes));
    apply(&mut reconciler, services.into());
    reconciler
}

fn apply(reconciler: &mut Reconciler<Memory>, services: Vec<Change<'_>>) {
    reconciler.update(update(services));
    settle(reconciler);
}

/// Applies changes to Nodes without writing to the maps.
fn apply_nodes(reconciler: &mut Reconciler<Memory>, nodes: Vec<(ObjectName, Option<Arc<Node>>)>) {
    reconciler.update(ClusterUpdate {
        nodes,
        ..update(Vec::new())
    });
}

/// Audits the maps and writes the differences. Returns the number of differences.
fn audit(reconciler: &mut Reconciler<Memory>) -> u64 {
    let differences = reconciler.audit(&NoGrace).expect("read");
    reconciler.sync.tracked.maps.end_grace_period();
    settle(reconciler);
    differences
}

/// Returns the last address octet of each of a VIP's backends.
fn backends(reconciler: &Reconciler<Memory>, last: u8) -> Option<Vec<u8>> {
    let octet = |backend: Backend| match backend.address.to_ip() {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(ip) => ip.octets()[15],
    };
    let found = reconciler.maps().backends_of(&vip(last))?;
    Some(found.into_iter().map(octet).collect())
}

/// Returns the map entry for an endpoint of VIP 1, along with its index. If there are several entries,
/// returns the one with the highest index.
fn backend_entry(reconciler: &Reconciler<Memory>, last: u8) -> (u32, Backend) {
    let ip = Address::from_ip(pod_ip(1, last));
    let mut all = reconciler.maps().backends.iter();
    let found = all.rfind(|(_, backend)| backend.address == ip);
    let (index, backend) = found.expect("was written");
    (*index, *backend)
}

/// Returns the published Services that have the given name, or all of them if `name` is `None`.
fn services(reconciler: &Reconciler<Memory>, name: Option<&str>) -> Vec<ServiceView> {
    let published = reconciler.published();
    ServiceView::collect(published.service_parts(reconciler.maps(), name))
}

/// Sets the number of open connections to a backend.
fn set_open_connections(conns: &OpenConnections, index: u32, count: u64) {
    conns.0.lock().unwrap().insert(index, count);
}

/// Opens a connection to every serving backend.
fn connect_to_all(reconciler: &Reconciler<Memory>) {
    let maps = reconciler.maps();
    let serving = maps.backends.iter().filter(|(_, it)| it.state.is_serving());
    for (index, _) in serving {
        set_open_connections(&maps.open_connections, *index, 1);
    }
}

fn problem(reconciler: &Reconciler<Memory>, name: &str) -> Option<Reason> {
    let all = &reconciler.sync.problems;
    let ports = all.of_service(&ObjectName::new("default", name))?;
    ports.values().next().map(|problem| problem.reason)
}

#[test]
fn nothing_is_written_before_every_source_has_delivered_its_first_list() {
    let first = serving(ROOMY, [set("web", 1, &[1])]);
    let mut second = adopt(first.sync.tracked.maps);
    let before = second.maps().writes;

    second.update(ClusterUpdate {
        synced: false,
        ..update(vec![set("dns", 2, &[2])])
    });
    settle(&mut second);

    assert_eq!(second.maps().writes, before);
    assert_eq!(backends(&second, 1), Some(vec![1]));
}

#[test]
fn a_restart_with_unchanged_services_writes_nothing() {
    let all = || {
        [
            set("web", 1, &[1, 2, 3]),
            set("dns", 2, &[]),
            set("db", 3, &[4]),
        ]
    };
    let first = serving(ROOMY, all());
    let mut second = adopt(first.sync.tracked.maps);
    let before = second.maps().writes;

    apply(&mut second, all().into());

    assert_eq!(second.maps().writes, before);
    assert_eq!(second.sync.drift, 0);
}

#[test]
fn a_backend_keeps_its_index_while_it_serves() {
    let mut reconciler = serving(ROOMY, [set("web", 1, &[1, 2])]);
    let before = backend_entry(&reconciler, 1);

    apply(&mut reconciler, vec![set("web", 1, &[1, 3])]);

    assert_eq!(backend_entry(&reconciler, 1), before);
    assert!(!backend_entry(&reconciler, 2).1.state.is_serving());
}

#[test]
fn an_address_that_moves_to_another_service_is_always_served() {
    let reconciler = serving(ROOMY, [set("old", 1, &[1])]);
    for limit in reconciler.maps().writes.. {
        let mut killed = reconciler.sync.tracked.maps.clone();
        killed.max_writes = limit;
        let mut copy = adopt(killed);
        copy.update(update(vec![("old", None), set("new", 1, &[2])]));
        copy.write_changes();
        let found = backends(&copy, 1).expect("the address is always served");
        assert!(found == [1] || found == [2]);
        if found == [2] && !copy.is_dirty() {
            break;
        }
    }
}

#[test]
fn an_address_of_two_services_is_a_problem_until_its_owner_is_deleted() {
    let mut reconciler = serving(ROOMY, [set("a", 1, &[1]), set("b", 1, &[2])]);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(problem(&reconciler, "b"), Some(Reason::FrontendConflict));

    apply(&mut reconciler, vec![("a", None)]);

    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
    assert_eq!(problem(&reconciler, "b"), None);
}

#[test]
fn a_write_that_fails_is_tried_again() {
    let mut reconciler = serving(ROOMY, []);
    reconciler.sync.tracked.maps.max_writes = 2;
    apply(&mut reconciler, vec![set("web", 1, &[1, 2])]);
    assert_eq!(problem(&reconciler, "web"), Some(Reason::WriteFailed));
    assert!(reconciler.is_dirty());

    reconciler.sync.tracked.maps.max_writes = usize::MAX;
    settle(&mut reconciler);

    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));
    assert_eq!(problem(&reconciler, "web"), None);
}

#[test]
fn an_audit_repairs_changes_by_other_programs() {
    let mut reconciler = serving(ROOMY, [set("web", 1, &[1]), set("dns", 2, &[2])]);
    reconciler.sync.tracked.maps.frontend_keys.remove(&vip(1));
    let dns = reconciler.maps().frontend_keys[&vip(2)];
    reconciler
        .sync
        .tracked
        .maps
        .frontend_keys
        .insert(vip(9), dns);

    assert!(audit(&mut reconciler) >= 2);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(backends(&reconciler, 2), Some(vec![2]));
    assert_eq!(backends(&reconciler, 9), None);
    assert_eq!(audit(&mut reconciler), 0);
}

#[test]
fn a_change_waits_for_free_entries_and_is_then_written() {
    let mut reconciler = adopt(Memory::new(MapSizes {
        frontends: 1,
        slots: 2,
        backends: 2,
        ..ROOMY
    }));
    let mut retired = RetiredEntries::default();
    // Nothing is freed between these changes, so they use up the spare entries.
    for round in 0..200_u8 {
        reconciler.update(update(vec![set("web", 1, &[1 + round % 9])]));
        retired.0.extend(reconciler.write_changes().0);
    }
    reconciler.update(update(vec![set("web", 1, &[11])]));
    retired.0.extend(reconciler.write_changes().0);
    assert_ne!(backends(&reconciler, 1), Some(vec![11]));
    assert_eq!(problem(&reconciler, "web"), None);

    free_retired(&mut reconciler, &retired);
    settle(&mut reconciler);

    assert_eq!(backends(&reconciler, 1), Some(vec![11]));
}

#[test]
fn a_key_with_the_record_of_another_frontend_is_removed_at_the_start() {
    let first = serving(ROOMY, [set("web", 1, &[1])]);
    let mut maps = first.sync.tracked.maps;
    let web = maps.frontend_keys[&vip(1)];
    maps.frontend_keys.insert(vip(9), web);

    let second = adopt(maps);

    assert_eq!(second.maps().frontend_keys.get(&vip(9)), None);
    assert_eq!(backends(&second, 1), Some(vec![1]));
    assert_eq!(second.sync.drift, 1);
}

#[test]
fn the_status_is_stale_until_a_fresh_update_is_applied() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let is_stale = |reconciler: &mut Reconciler<Memory>| {
        let mut stats = ReconcileStats::default();
        reconciler.fill_stats(&mut stats, Duration::ZERO);
        stats.stale
    };
    reconciler.update(ClusterUpdate {
        stale: true,
        ..update(vec![set("web", 1, &[1])])
    });
    settle(&mut reconciler);
    assert!(is_stale(&mut reconciler));

    apply(&mut reconciler, vec![set("web", 1, &[2])]);

    assert!(!is_stale(&mut reconciler));
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
}
