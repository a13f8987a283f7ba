//! External IPs that need an owner.

use super::*;

const PAIR: [&str; 2] = ["198.51.100.1", "2001:db8::1"];

fn adopt_owned() -> Reconciler<Memory> {
    let settings = PlanSettings {
        external_ips: ExternalIps::Owned,
        ..settings()
    };
    adopt_with(Memory::new(ROOMY), settings)
}

/// Returns a dual-stack Service with the given external IPs.
fn with_external_ips(name: &'static str, last: u8, external: Vec<IpAddr>) -> Change<'static> {
    with(set(name, last, &[last]), |service| {
        service.cluster_ips.push(other_ip(last));
        service.external_ips = external;
    })
}

/// Returns a Service that Culvert doesn't serve and whose load balancer has the given addresses.
fn unserved_load_balancer(ips: Vec<IpAddr>) -> Change<'static> {
    let service = Service {
        unserved_ips: ips,
        ..Service::named(ObjectName::new("default", "balancer"))
    };
    let state = ServiceState {
        service: Arc::new(service),
        slices: Vec::new(),
    };
    ("balancer", Some(state))
}

fn node(name: &str, other_ips: Vec<IpAddr>) -> (ObjectName, Option<Arc<Node>>) {
    fixture::node_update(Node {
        other_ips,
        ..fixture::node(name)
    })
}

/// Returns the external IPs in `PAIR` that are translated.
fn served(reconciler: &Reconciler<Memory>) -> Vec<&'static str> {
    let frontends = &reconciler.maps().frontend_keys;
    let is_served = |text: &&str| frontends.contains_key(&http_at(fixture::ip(text)));
    PAIR.into_iter().filter(is_served).collect()
}

fn problems(reconciler: &Reconciler<Memory>, name: &str) -> Vec<String> {
    let all = &reconciler.sync.problems;
    let ports = all.of_service(&ObjectName::new("default", name));
    let problems = ports.into_iter().flat_map(BTreeMap::values);
    problems
        .map(|problem| format!("{}: {}", problem.reason.label(), problem.text))
        .collect()
}

#[test]
fn an_external_ip_is_served_exactly_while_a_node_has_it() {
    let mut reconciler = adopt_owned();
    let ips = || fixture::ips(&PAIR);
    let services = vec![
        with_external_ips("web", 1, ips()),
        with_external_ips("other", 2, Vec::new()),
    ];
    apply(&mut reconciler, services);
    assert!(served(&reconciler).is_empty());
    let left_out = |ip| {
        format!(
            "external_ip_not_owned: not programmed at an external IP that no Node and no load balancer of a \
             Service has (service.externalIPs): {ip}"
        )
    };
    assert_eq!(problems(&reconciler, "web"), PAIR.map(left_out));
    let warnings = reconciler.warnings(&BTreeSet::new());
    let reasons = warnings
        .iter()
        .map(|it| (&*it.regarding.name.name, it.reason));
    let wanted = PAIR.map(|_| ("web", Reason::ExternalIpNotOwned));
    assert_eq!(reasons.collect::<Vec<_>>(), wanted);

    // Another node gets the addresses.
    apply_nodes(&mut reconciler, vec![node("node-b", ips())]);
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(served(&reconciler), PAIR);
    assert!(problems(&reconciler, "web").is_empty());

    apply_nodes(&mut reconciler, vec![node("node-b", Vec::new())]);
    settle(&mut reconciler);
    assert!(served(&reconciler).is_empty());
    assert_eq!(problems(&reconciler, "web"), PAIR.map(left_out));
}

#[test]
fn an_unserved_load_balancer_owns_its_addresses_but_is_not_published() {
    let mut reconciler = adopt_owned();
    let web = || with_external_ips("web", 1, fixture::ips(&PAIR));
    let balancer = || unserved_load_balancer(fixture::ips(&PAIR));
    // The result doesn't depend on which of the two Services comes first in the update.
    for both in [vec![balancer(), web()], vec![web(), balancer()]] {
        apply(&mut reconciler, both);
        assert_eq!(served(&reconciler), PAIR);
        let published = services(&reconciler, None);
        assert_eq!(published.len(), 1, "{published:?}");

        apply(&mut reconciler, vec![("balancer", None), ("web", None)]);
        assert!(served(&reconciler).is_empty() && reconciler.maps().frontend_keys.is_empty());
    }
}
