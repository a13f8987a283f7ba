//! External IPs that must be owned.

use super::*;
use crate::model::Node;

const PAIR: [&str; 2] = ["198.51.100.1", "2001:db8::1"];

fn adopt_owned() -> Reconciler<Memory> {
    let settings = Settings {
        external_ips: ExternalIps::Owned,
        ..settings()
    };
    adopt_with(Memory::new(ROOMY), settings)
}

fn ips() -> Vec<IpAddr> {
    PAIR.map(|text| text.parse().expect("an address")).into()
}

/// A Service of both families with external IPs.
fn wanting(name: &'static str, last: u8, external: Vec<IpAddr>) -> (&'static str, ServiceState) {
    let mut state = state(name, last, &BTreeSet::from([last]));
    let service = Arc::make_mut(&mut state.service);
    service.cluster_ips.push(other_ip(last));
    service.external_ips = external;
    (name, state)
}

/// A Service of another proxy, whose load balancer has addresses.
fn unserved(ips: Vec<IpAddr>) -> ServiceState {
    let service = Service {
        unserved_ips: ips,
        ..Service::named(ObjectName::new("default", "balancer"))
    };
    ServiceState {
        service: Arc::new(service),
        slices: Vec::new(),
    }
}

fn node(name: &str, other_ips: Vec<IpAddr>) -> (ObjectName, Option<Arc<Node>>) {
    fixture::told(Node {
        other_ips,
        ..fixture::node(name)
    })
}

/// Of the external IPs, those that are translated.
fn served(reconciler: &Reconciler<Memory>) -> Vec<&'static str> {
    let is_served = |text: &&str| {
        let ip = text.parse().expect("an address");
        let key = FrontKey::new(Address::from_ip(ip), Port::from_host(80), Protocol::TCP);
        reconciler.maps().svc.contains_key(&key)
    };
    PAIR.into_iter().filter(is_served).collect()
}

fn problems(reconciler: &Reconciler<Memory>, name: &str) -> Vec<String> {
    let ports = reconciler
        .sync
        .faults
        .problems
        .get(&ObjectName::new("default", name));
    let problems = ports.into_iter().flat_map(BTreeMap::values);
    problems
        .map(|problem| format!("{}: {}", problem.reason.label(), problem.text))
        .collect()
}

#[test]
fn an_external_ip_is_served_as_soon_as_a_node_has_it_and_no_longer_than_that() {
    let mut reconciler = adopt_owned();
    let (name, state) = wanting("web", 1, ips());
    let (other, second) = wanting("other", 2, Vec::new());
    apply(
        &mut reconciler,
        vec![(name, Some(state)), (other, Some(second))],
    );
    assert!(served(&reconciler).is_empty());
    let left_out = |ip| {
        format!(
            "external_ip_not_owned: not programmed: no Node and no load balancer of a Service has \
             this external IP (service.externalIPs): {ip}"
        )
    };
    assert_eq!(problems(&reconciler, "web"), PAIR.map(left_out));
    let about =
        |concern: &crate::model::Concern| (concern.about.name.name.to_string(), concern.reason);
    assert_eq!(
        reconciler
            .concerns(&BTreeSet::new())
            .iter()
            .map(about)
            .collect::<Vec<_>>(),
        PAIR.map(|_| ("web".to_owned(), Reason::ExternalIpNotOwned))
    );

    // Another node than this one.
    let mut update = update(Vec::new());
    update.nodes = vec![node("node-b", ips())];
    reconciler.update(update.clone());
    assert_eq!(
        reconciler.sync.dirty,
        BTreeSet::from([ObjectName::new("default", "web")])
    );
    settle(&mut reconciler);
    assert_eq!(served(&reconciler), PAIR);
    assert!(problems(&reconciler, "web").is_empty());

    update.nodes = vec![node("node-b", Vec::new())];
    reconciler.update(update);
    settle(&mut reconciler);
    assert!(served(&reconciler).is_empty());
    assert_eq!(problems(&reconciler, "web"), PAIR.map(left_out));
}

#[test]
fn the_load_balancer_of_a_service_that_is_not_served_owns_its_addresses_and_nothing_else() {
    let mut reconciler = adopt_owned();
    let (name, state) = wanting("web", 1, ips());
    // It comes first in the update by chance, or not: what is wanted is known of both.
    for balancer_first in [true, false] {
        let mut services = vec![
            ("balancer", Some(unserved(ips()))),
            (name, Some(state.clone())),
        ];
        if !balancer_first {
            services.reverse();
        }
        apply(&mut reconciler, services);
        assert_eq!(served(&reconciler), PAIR);
        let shown = reconciler.services(None);
        assert_eq!(shown.len(), 1, "{shown:?}");

        apply(&mut reconciler, vec![("balancer", None), (name, None)]);
        assert!(served(&reconciler).is_empty() && reconciler.maps().svc.is_empty());
    }
}
