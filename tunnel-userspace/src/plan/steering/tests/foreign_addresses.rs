//! Addresses that belong to something other than an edge node.

use super::*;
use crate::model::{Family, LinkNetwork, LinkNetworks, Service, ServiceState};

/// Returns the state with one edge node that has an address, and with addresses of other things.
fn state(address: &str) -> State {
    let mut state = State::of(&[
        node("cloud-1", false, &["10.0.0.1"]),
        node("edge-7", true, &["10.1.2.3", address]),
    ]);
    let service = |namespace: &str, name: &str| Service::named(ObjectName::new(namespace, name));
    let kubernetes = Service {
        cluster_ips: fixture::ips(&["10.96.0.1"]),
        ..service("default", "kubernetes")
    };
    let endpoint = fixture::endpoint(fixture::ip("10.0.0.5"));
    let ports = [("https", 6443)];
    let slice = fixture::slice(
        "kubernetes",
        &kubernetes.name,
        Family::V4,
        &ports,
        vec![endpoint],
    );
    let web = Service {
        external_ips: fixture::ips(&["10.8.0.1"]),
        load_balancer_ips: fixture::ips(&["10.8.0.2"]),
        unserved_ips: fixture::ips(&["10.8.0.3"]),
        ..service("shop", "web")
    };
    for (service, slices) in [(kubernetes, vec![Arc::new(slice)]), (web, Vec::new())] {
        let name = service.name.clone();
        let service = Arc::new(service);
        state
            .known
            .set_service(&name, Some(&ServiceState { service, slices }));
    }
    state
        .known
        .set_own(Arc::new(fixture::ips(&["10.0.0.7"]).into_iter().collect()));
    let mut networks = LinkNetworks::default();
    for (address, length, link) in [
        ("10.244.0.0", 24, "cni0"),
        ("10.244.0.10", 32, "cni0"),
        ("10.0.0.0", 24, "eth0"),
    ] {
        networks.insert(LinkNetwork {
            address: fixture::ip(address),
            length,
            link: link.to_owned(),
            leads_to_pods: link == "cni0",
        });
    }
    state.known.set_networks(Arc::new(networks));
    state
}

fn with_ranges(ranges: &[&str]) -> SteeringRules {
    let ranges = ranges.iter().map(|range| range.parse().expect("a range"));
    SteeringRules {
        node_ranges: Some(ranges.collect()),
        ..rules()
    }
}

/// Asserts that only the first address of the edge node is steered, and that the problem names the second.
fn expect_refused(state: &State, rules: &SteeringRules, text: &str) {
    let plan = state.plan(None, rules);

    assert_eq!(targets(&plan), kubelet("edge-7", "10.1.2.3"), "{text}");
    let problem = format!("node_rejected: Node edge-7: status.addresses {text}");
    assert_eq!(problems(&plan), [problem]);
}

#[test]
fn an_address_that_belongs_to_something_else_is_refused_and_named() {
    let wide = with_ranges(&["0.0.0.0/0", "::/0"]);
    for (address, owner) in [
        ("10.0.0.5", "the address of an API server"),
        ("10.0.0.6", "the address of an API server"),
        ("10.0.0.7", "an address of this node"),
        ("10.96.0.1", "the cluster IP of Service default/kubernetes"),
    ] {
        let text = format!("{address} is {owner}, so it is not steered");
        // Not even the first Node that had the address may keep it.
        let state = state(address).held(address, "edge-7");
        expect_refused(&state, &rules(), &text);
        expect_refused(&state, &wide, &text);
    }
}

#[test]
fn without_configured_ranges_addresses_of_pods_are_refused() {
    let pod = "10.244.0.9 is in 10.244.0.0/24, a network of this node's pods (link cni0), so it is not steered";
    expect_refused(&state("10.244.0.9"), &rules(), pod);
}

#[test]
fn a_holder_keeps_an_address_in_a_network_of_pods_unless_it_is_the_address_of_a_pod() {
    for (address, is_steered) in [("10.244.0.9", true), ("10.244.0.10", false)] {
        let plan = state(address).held(address, "edge-7").plan(None, &rules());

        let owner = plan.owners.get(&fixture::ip(address));
        assert_eq!(owner.is_some(), is_steered, "{address}");
    }
}

#[test]
fn a_service_takes_no_address_from_an_edge_node_unless_it_is_its_cluster_ip() {
    let published = "an external IP or load balancer address of Service shop/web";
    for address in ["10.8.0.1", "10.8.0.2", "10.8.0.3"] {
        expect_unconfirmed(&state(address), address, published);
        expect_unconfirmed(&state(address).held(address, "edge-7"), address, published);
    }
}

/// Asserts that an address is steered and named, with a warning only if no ranges are configured.
fn expect_unconfirmed(state: &State, address: &str, doubt: &str) {
    let plan = state.plan(None, &rules());

    assert_eq!(plan.targets.len(), 4, "{address}");
    let text = format!(
        "address_unconfirmed: Node edge-7: status.addresses {address} is {doubt}; it is steered because \
         tunnel.steering.nodeCIDRs is not set"
    );
    assert_eq!(problems(&plan), [text]);
    let confirmed = state.plan(None, &with_ranges(&["0.0.0.0/0"]));
    assert_eq!(confirmed.targets.len(), 4, "{address}");
    assert_eq!(problems(&confirmed), Vec::<String>::new());
}

#[test]
fn an_address_outside_the_configured_ranges_is_refused_even_if_the_node_had_it_first() {
    let rules = with_ranges(&["10.1.0.0/16", "fd00:20::/64"]);
    for address in ["10.2.0.1", "1.2.3.4", "fd00:21::7"] {
        let text = format!("{address} is outside tunnel.steering.nodeCIDRs, so it is not steered");
        expect_refused(&state(address).held(address, "edge-7"), &rules, &text);
    }
    let inside = state("fd00:20::7").plan(None, &rules);
    assert_eq!(inside.targets.len(), 4);
    assert_eq!(problems(&inside), Vec::<String>::new());
}

#[test]
fn without_configured_ranges_unlikely_addresses_are_steered_and_named() {
    for (address, doubt) in [
        ("1.2.3.4", "a public address"),
        (
            "10.0.0.50",
            "in 10.0.0.0/24, which this node reaches over link eth0",
        ),
    ] {
        expect_unconfirmed(&state(address), address, doubt);
    }
}

#[test]
fn a_change_of_a_service_returns_the_addresses_that_it_gained_or_lost() {
    let mut known = state("10.1.2.4").known;
    let web = ObjectName::new("shop", "web");

    let mut changed = known.set_service(&web, None);

    changed.sort();
    assert_eq!(changed, fixture::ips(&["10.8.0.1", "10.8.0.2", "10.8.0.3"]));
    let changed = known.set_service(&ObjectName::new("default", "kubernetes"), None);
    assert_eq!(changed, fixture::ips(&["10.96.0.1", "10.0.0.5"]));
}
