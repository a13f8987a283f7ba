//! Contract 6a: `loadBalancerSourceRanges`.

use serde_json::{Value, json};

use super::{Given, balanced, endpoint, slice};
use crate::reference::Source;

const AT: &str = "203.0.113.1:80";
const BACKEND: &str = "10.0.0.1:8080";

fn given(ranges: Value) -> Given {
    given_with(ranges, &[endpoint("10.0.0.1", "there")])
}

fn given_with(ranges: Value, endpoints: &[Value]) -> Given {
    let spec = json!({
        "loadBalancerSourceRanges": ranges,
        "externalIPs": ["198.51.100.1"],
        "ports": [{"port": 80, "nodePort": 30080}],
    });
    let ingress = json!([{"ip": "203.0.113.1"}, {"ip": "203.0.113.2"}]);
    Given::new(&[balanced(ingress, spec)], &[slice(endpoints)])
}

fn outside(address: &str) -> Source {
    Source::Outside(super::ip(address))
}

#[test]
fn source_outside_the_ranges_is_dropped_and_one_inside_is_served() {
    let given = given(json!(["192.0.2.0/24"]));
    assert_eq!(given.meets(&outside("192.0.2.7"), AT), BACKEND);
    assert_eq!(given.meets(&outside("192.0.3.7"), AT), "dropped");
}

#[test]
fn ranges_apply_to_load_balancer_ips_only() {
    let given = given(json!(["8.8.8.0/24"]));
    for at in ["10.96.0.1:80", "198.51.100.1:80", "192.168.0.1:30080"] {
        assert_eq!(given.all_meet(at), [BACKEND; 3], "{at}");
        assert!(given.front(at).source_ranges.is_empty(), "{at}");
    }
    for at in [AT, "203.0.113.2:80"] {
        assert_eq!(given.all_meet(at), ["dropped"; 3], "{at}");
    }
}

#[test]
fn ranges_are_trimmed_of_blanks() {
    let given = given(json!(["\t192.0.2.0/24 ", " ", ""]));
    assert_eq!(given.meets(&outside("192.0.2.7"), AT), BACKEND);
    assert_eq!(given.meets(&outside("192.0.3.7"), AT), "dropped");
}

#[test]
fn ranges_of_the_other_family_alone_are_no_restriction() {
    let given = given(json!(["2001:db8::/32", "nonsense"]));
    assert_eq!(given.all_meet(AT), [BACKEND; 3]);
    assert!(given.front(AT).source_ranges.is_empty());
}

#[test]
fn range_of_everything_is_no_restriction() {
    let given = given(json!(["8.8.8.0/24", "0.0.0.0/0"]));
    assert!(given.front(AT).source_ranges.is_empty());
    assert_eq!(given.all_meet(AT), [BACKEND; 3]);
}

#[test]
fn range_of_everything_of_the_other_family_lifts_nothing() {
    let given = given(json!(["8.8.8.0/24", "::/0"]));
    assert_eq!(given.all_meet(AT), ["dropped"; 3]);
}

#[test]
fn pods_are_not_exempt() {
    let without = given(json!(["192.0.2.0/24"]));
    assert_eq!(without.meets(&super::POD, AT), "dropped");
    let with = given(json!(["192.0.2.0/24", "10.244.0.0/16"]));
    assert_eq!(with.meets(&super::POD, AT), BACKEND);
}

#[test]
fn node_counts_by_its_own_address() {
    let without = given(json!(["192.0.2.0/24"]));
    assert_eq!(without.meets(&Source::NodeSocket, AT), "dropped");
    let with = given(json!(["192.168.0.1/32"]));
    assert_eq!(with.meets(&Source::NodeSocket, AT), BACKEND);
    // Not by another one that it has.
    let other = given(json!(["192.168.9.0/24"]));
    assert_eq!(other.meets(&Source::NodeSocket, AT), "dropped");
}

#[test]
fn node_without_a_primary_address_counts_by_the_first_one_that_it_has() {
    for (range, expected) in [("172.17.0.1/32", BACKEND), ("192.168.9.1/32", "dropped")] {
        let mut given = given(json!([range]));
        given.cluster.nodes.clear();
        assert_eq!(given.meets(&Source::NodeSocket, AT), expected, "{range}");
    }
}

#[test]
fn node_that_holds_the_address_counts_by_it_and_is_admitted_if_its_own_one_is() {
    for (range, expected) in [
        ("192.168.0.1/32", BACKEND),
        ("203.0.113.1/32", BACKEND),
        ("192.0.2.0/24", "dropped"),
    ] {
        let mut given = given(json!([range]));
        given.here.addresses.push((true, super::ip("203.0.113.1")));
        assert_eq!(given.meets(&Source::NodeSocket, AT), expected, "{range}");
    }
}

#[test]
fn load_balancer_addresses_are_admitted_as_sources_if_the_node_is_in_the_ranges() {
    let with = given(json!(["192.168.0.0/24"]));
    assert_eq!(with.meets(&outside("203.0.113.2"), AT), BACKEND);
    assert_eq!(with.meets(&outside("203.0.113.3"), AT), "dropped");
    let without = given(json!(["192.0.2.0/24"]));
    assert_eq!(without.meets(&outside("203.0.113.2"), AT), "dropped");
}

#[test]
fn without_endpoints_sources_outside_are_dropped_and_those_inside_refused() {
    let given = given_with(json!(["192.0.2.0/24"]), &[]);
    assert_eq!(given.meets(&outside("192.0.3.7"), AT), "dropped");
    assert_eq!(given.meets(&outside("192.0.2.7"), AT), "refused");
}

#[test]
fn ranges_belong_to_the_address_protocol_and_port_as_load_balancer_ips_are_shared() {
    let mut given = given(json!(["8.8.8.0/24"]));
    let spec = json!({"type": "LoadBalancer", "ports": [{"port": 81}]});
    let other = super::named("other", "10.96.0.2", spec);
    let other = super::with_ingress(other, json!([{"ip": "203.0.113.1"}]));
    given.cluster.services.push(super::object(other));
    assert_eq!(given.meets(&super::CLIENT, AT), "dropped");
    assert_eq!(given.meets(&super::CLIENT, "203.0.113.1:81"), "refused");
}
