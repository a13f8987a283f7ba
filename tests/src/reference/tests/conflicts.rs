//! Two Services that claim one address.

use serde_json::{Value, json};

use super::{Given, named, with_ingress, with_metadata};

/// Who of the two has an address, however they are listed.
#[track_caller]
fn winner(one: &Value, other: &Value, at: &str) -> String {
    let winners = [[one, other], [other, one]].map(|services| {
        let front = Given::new(&services.map(Clone::clone), &[]).front(at);
        front.owner.service
    });
    assert_eq!(winners[0], winners[1]);
    winners[0].clone()
}

fn created(service: Value, seconds: u8) -> Value {
    let time = format!("2026-01-01T00:00:{seconds:02}Z");
    with_metadata(service, json!({"creationTimestamp": time}))
}

/// A Service with an external IP.
fn external(name: &str, cluster_ip: &str) -> Value {
    named(name, cluster_ip, json!({"externalIPs": ["203.0.113.1"]}))
}

#[test]
fn cluster_ip_goes_before_a_load_balancer_ip() {
    let older = named("older", "10.96.0.1", json!({"type": "LoadBalancer"}));
    let older = created(with_ingress(older, json!([{"ip": "10.96.0.2"}])), 1);
    let younger = created(named("younger", "10.96.0.2", json!({})), 2);
    assert_eq!(winner(&older, &younger, "10.96.0.2:80"), "younger");
}

#[test]
fn load_balancer_ip_goes_before_an_external_ip() {
    let older = created(external("older", "10.96.0.1"), 1);
    let younger = named("younger", "10.96.0.2", json!({"type": "LoadBalancer"}));
    let younger = created(with_ingress(younger, json!([{"ip": "203.0.113.1"}])), 2);
    assert_eq!(winner(&older, &younger, "203.0.113.1:80"), "younger");
}

#[test]
fn external_ip_goes_before_a_node_port() {
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let older = named(
        "older",
        "10.96.0.1",
        json!({"type": "NodePort", "ports": ports}),
    );
    let spec = json!({"externalIPs": ["192.168.0.1"], "ports": [{"port": 30080}]});
    let younger = created(named("younger", "10.96.0.2", spec), 2);
    assert_eq!(
        winner(&created(older, 1), &younger, "192.168.0.1:30080"),
        "younger"
    );
}

#[test]
fn older_service_goes_first() {
    let older = created(external("z", "10.96.0.1"), 1);
    let younger = created(external("a", "10.96.0.2"), 2);
    assert_eq!(winner(&older, &younger, "203.0.113.1:80"), "z");
}

#[test]
fn service_that_does_not_say_when_it_was_made_is_the_youngest() {
    let dated = created(external("z", "10.96.0.1"), 59);
    let undated = external("a", "10.96.0.2");
    assert_eq!(winner(&dated, &undated, "203.0.113.1:80"), "z");
}

#[test]
fn equally_old_services_go_by_namespace_then_name() {
    let [a, b] = [("b", "10.96.0.1"), ("c", "10.96.0.2")]
        .map(|(name, cluster_ip)| created(external(name, cluster_ip), 1));
    assert_eq!(winner(&a, &b, "203.0.113.1:80"), "b");
    let first_namespace = with_metadata(b, json!({"namespace": "a"}));
    assert_eq!(winner(&a, &first_namespace, "203.0.113.1:80"), "c");
}

#[test]
fn loser_keeps_its_other_addresses_and_has_the_disputed_one_when_the_winner_leaves() {
    let winner = created(external("winner", "10.96.0.1"), 1);
    let loser = created(external("loser", "10.96.0.2"), 2);
    let mut given = Given::new(&[winner, loser], &[]);
    assert_eq!(given.front("10.96.0.2:80").owner.service, "loser");
    given.cluster.services.remove(0);
    assert_eq!(given.front("203.0.113.1:80").owner.service, "loser");
}

#[test]
fn address_that_a_service_has_twice_is_of_the_first_kind() {
    let spec = json!({"type": "LoadBalancer", "externalIPs": ["203.0.113.1"]});
    let service = with_ingress(
        named("a", "10.96.0.1", spec),
        json!([{"ip": "203.0.113.1"}]),
    );
    let front = Given::new(&[service], &[]).front("203.0.113.1:80");
    assert_eq!(front.kind, crate::reference::Kind::LoadBalancerIp);
}
