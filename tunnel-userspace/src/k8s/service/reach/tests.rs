use serde_json::{Value, json};

use super::*;
use crate::{
    k8s::tests::{a_service, http, ignored, ip, service, with},
    model::Service,
};

fn spec(fields: &Value) -> Value {
    let mut spec = http();
    let all = spec.as_object_mut().expect("fields");
    all.extend(fields.as_object().expect("fields").clone());
    spec
}

/// The Service that is read, and what of it is left out.
fn read(fields: &Value, status: Value) -> (Service, Vec<String>) {
    let manifest = with(service(spec(fields)), "/status", status);
    let service = a_service(manifest.clone());
    (Service::clone(&service), ignored(manifest))
}

fn good(fields: &Value) -> Service {
    let (service, ignored) = read(fields, json!({}));
    assert!(ignored.is_empty(), "{ignored:?}");
    service
}

#[test]
fn external_ips_are_read_sloppily_and_a_bad_one_leaves_the_others() {
    let texts = ["198.51.100.041", "x", "fd00::00010", "0.0.0.0"];
    let (service, ignored) = read(&json!({ "externalIPs": texts }), json!({}));

    assert_eq!(service.external_ips, [ip("198.51.100.41"), ip("fd00::10")]);
    assert_eq!(
        ignored,
        [
            "spec.externalIPs[1]: \"x\" is not an IP address",
            "spec.externalIPs[3]: 0.0.0.0 is the unspecified address, which can't be used here",
        ]
    );
}

#[test]
fn only_addresses_of_the_load_balancer_that_are_vips_are_served_here() {
    let ingress = json!([
        {"ip": "203.0.113.1"},
        {"ip": "203.0.113.2", "ipMode": "VIP"},
        {"ip": "203.0.113.3", "ipMode": "Proxy"},
        {"hostname": "lb.example"},
        {"ip": "203.0.113.4", "ipMode": "Other"},
        {"ip": "nowhere"},
        {"ip": "2001:db8:f::5", "ipMode": "Proxy"},
    ]);
    let (service, ignored) = read(&json!({}), json!({"loadBalancer": {"ingress": ingress}}));

    assert_eq!(
        service.load_balancer_ips,
        ["203.0.113.1", "203.0.113.2", "203.0.113.4"].map(ip)
    );
    assert_eq!(
        service.unserved_ips,
        ["203.0.113.3", "2001:db8:f::5"].map(ip)
    );
    assert_eq!(
        ignored,
        [
            "status.loadBalancer.ingress[4].ipMode: \"Other\" is not VIP or Proxy",
            "status.loadBalancer.ingress[5].ip: \"nowhere\" is not an IP address",
        ]
    );
}

#[test]
fn source_ranges_are_trimmed_and_a_bad_one_leaves_the_others() {
    let ranges = json!({"loadBalancerSourceRanges": [" 10.0.0.1/8 ", "all", "fd00::/8"]});
    let (service, ignored) = read(&ranges, json!({}));

    assert_eq!(
        service.source_ranges,
        [(ip("10.0.0.0"), 8), (ip("fd00::"), 8)]
    );
    assert_eq!(
        ignored,
        ["spec.loadBalancerSourceRanges[1]: \"all\" is not an address with a prefix length"]
    );
}

#[test]
fn policies_are_cluster_unless_they_are_local() {
    let service = good(&json!({"internalTrafficPolicy": "Local"}));
    assert_eq!(service.internal_policy, TrafficPolicy::Local);
    assert_eq!(service.external_policy, TrafficPolicy::Cluster);
    let service = good(&json!({"externalTrafficPolicy": "Local"}));
    assert_eq!(service.internal_policy, TrafficPolicy::Cluster);
    assert_eq!(service.external_policy, TrafficPolicy::Local);

    let (service, ignored) = read(&json!({"internalTrafficPolicy": "Zone"}), json!({}));

    assert_eq!(service.internal_policy, TrafficPolicy::Cluster);
    assert_eq!(
        ignored,
        ["spec.internalTrafficPolicy: \"Zone\" is not Cluster or Local"]
    );
}

#[test]
fn affinity_lasts_for_three_hours_unless_the_service_says() {
    let config = |seconds: i64| {
        json!({
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
        })
    };
    let seconds = |fields: Value| good(&fields).affinity;
    assert_eq!(seconds(json!({})), 0);
    assert_eq!(seconds(json!({"sessionAffinity": "None"})), 0);
    assert_eq!(seconds(json!({"sessionAffinity": "ClientIP"})), 10_800);
    assert_eq!(seconds(config(60)), 60);

    let (service, ignored) = read(&config(86_401), json!({}));

    assert_eq!(service.affinity, 10_800);
    assert_eq!(
        ignored,
        [
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not from 1 to 86400 seconds"
        ]
    );
}

#[test]
fn only_a_load_balancer_of_policy_local_has_a_port_for_health_checks() {
    let port = |kind: &str, policy: &str| {
        let fields = json!({
            "type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 30_900,
        });
        good(&fields).health_check_port
    };

    assert_eq!(port("LoadBalancer", "Local"), Some(30_900));
    assert_eq!(port("LoadBalancer", "Cluster"), None);
    assert_eq!(port("NodePort", "Local"), None);
}

#[test]
fn a_node_port_of_zero_is_none_and_a_bad_one_is_left_out() {
    let ports = |number: i64| json!({"ports": [{"port": 80, "nodePort": number}]});
    assert_eq!(good(&ports(30_080)).ports[0].node_port, Some(30_080));
    assert_eq!(good(&ports(0)).ports[0].node_port, None);

    let (service, ignored) = read(&ports(70_000), json!({}));

    assert_eq!(service.ports[0].node_port, None);
    assert_eq!(
        ignored,
        ["spec.ports[0].nodePort: 70000 is not a port from 1 to 65535"]
    );
}
