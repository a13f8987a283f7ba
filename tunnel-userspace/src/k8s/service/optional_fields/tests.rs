use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::{
    k8s::tests::{a_service, http, ignored, ip, service, with},
    model::Service,
};

/// Parses a Service, and asserts that exactly these errors are reported.
#[track_caller]
fn parse_with_errors(wrong: &[&str], manifest: Value) -> Arc<Service> {
    assert_eq!(ignored(manifest.clone()), wrong);
    a_service(manifest)
}

/// Parses a Service with additional fields in its `spec`, and asserts that exactly these errors are reported.
#[track_caller]
fn parse_spec(fields: Value, wrong: &[&str]) -> Arc<Service> {
    let Value::Object(mut fields) = fields else {
        panic!("no fields: {fields}")
    };
    let mut manifest = service(http());
    let spec = manifest["spec"].as_object_mut().expect("fields");
    spec.append(&mut fields);
    parse_with_errors(wrong, manifest)
}

#[test]
fn external_ips_may_have_leading_zeros_and_an_invalid_one_is_ignored() {
    let texts = [
        "198.51.100.041",
        "x",
        "fd00::00010",
        "0.0.0.0",
        "127.0.0.1",
        "fe80::1",
    ];
    let wrong = [
        "spec.externalIPs[1]: \"x\" is not an IP address",
        "spec.externalIPs[3]: 0.0.0.0 is the unspecified address, which is not allowed here",
        "spec.externalIPs[4]: 127.0.0.1 is a loopback address, which is not allowed here",
        "spec.externalIPs[5]: fe80::1 is a link-local address, which is not allowed here",
    ];
    let service = parse_spec(json!({ "externalIPs": texts }), &wrong);

    assert_eq!(service.external_ips, [ip("198.51.100.41"), ip("fd00::10")]);
}

#[test]
fn addresses_of_the_load_balancer_are_served_unless_their_mode_is_proxy() {
    let ingress = json!([
        {"ip": "203.0.113.1"},
        {"ip": "203.0.113.2", "ipMode": "VIP"},
        {"ip": "203.0.113.3", "ipMode": "Proxy"},
        {"hostname": "lb.example"},
        {"ip": "203.0.113.4", "ipMode": "Other"},
        {"ip": "nowhere"},
        {"ip": "2001:db8:f::5", "ipMode": "Proxy"},
        {"ip": "169.254.169.254"},
    ]);
    let wrong = [
        "status.loadBalancer.ingress[4].ipMode: \"Other\" is not VIP or Proxy",
        "status.loadBalancer.ingress[5].ip: \"nowhere\" is not an IP address",
        "status.loadBalancer.ingress[7].ip: 169.254.169.254 is a link-local address, which is not \
         allowed here",
    ];
    let status = json!({"loadBalancer": {"ingress": ingress}});
    let service = parse_with_errors(&wrong, with(service(http()), "/status", status));

    let served = ["203.0.113.1", "203.0.113.2", "203.0.113.4"];
    assert_eq!(service.load_balancer_ips, served.map(ip));
    let unserved = ["203.0.113.3", "2001:db8:f::5"];
    assert_eq!(service.unserved_ips, unserved.map(ip));
}

#[test]
fn source_ranges_are_trimmed_and_an_invalid_one_is_ignored() {
    let ranges = json!({"loadBalancerSourceRanges": [" 10.0.0.1/8 ", "all", "fd00::/8"]});
    let wrong = "spec.loadBalancerSourceRanges[1]: \"all\" is not an address with a prefix length, \
                 such as 10.0.0.0/8";
    let wanted = [(ip("10.0.0.0"), 8), (ip("fd00::"), 8)];

    assert_eq!(parse_spec(ranges, &[wrong]).source_ranges, wanted);
}

#[test]
fn policies_are_cluster_unless_they_are_local() {
    use TrafficPolicy::{Cluster, Local};

    let policies = |of: &str, policy: &str, wrong: &[&str]| {
        let service = parse_spec(json!({ format!("{of}TrafficPolicy"): policy }), wrong);
        (service.internal_policy, service.external_policy)
    };
    assert_eq!(policies("internal", "Local", &[]), (Local, Cluster));
    assert_eq!(policies("external", "Local", &[]), (Cluster, Local));
    let wrong = "spec.internalTrafficPolicy: \"Zone\" is not Cluster or Local";
    let found = policies("internal", "Zone", &[wrong]);
    assert_eq!(found, (Cluster, Cluster));
}

#[test]
fn affinity_lasts_for_three_hours_by_default() {
    let config = |seconds: i64| {
        json!({
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}},
        })
    };
    let seconds = |fields: Value| parse_spec(fields, &[]).affinity;
    assert_eq!(seconds(json!({})), 0);
    assert_eq!(seconds(json!({"sessionAffinity": "None"})), 0);
    assert_eq!(seconds(json!({"sessionAffinity": "ClientIP"})), 10_800);
    assert_eq!(seconds(config(60)), 60);
    let wrong = "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not a number of \
                 seconds from 1 to 86400";
    assert_eq!(parse_spec(config(86_401), &[wrong]).affinity, 10_800);
}

#[test]
fn only_a_load_balancer_with_the_local_policy_has_a_health_check_port() {
    let port = |kind: &str, policy: &str| {
        let fields = json!({
            "type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 30_900,
        });
        parse_spec(fields, &[]).health_check_port
    };

    assert_eq!(port("LoadBalancer", "Local"), Some(30_900));
    assert_eq!(port("LoadBalancer", "Cluster"), None);
    assert_eq!(port("NodePort", "Local"), None);
}

#[test]
fn a_node_port_of_zero_means_none_and_an_invalid_one_is_ignored() {
    let port = |number: i64, wrong: &[&str]| {
        let ports = json!({"ports": [{"port": 80, "nodePort": number}]});
        parse_spec(ports, wrong).ports[0].node_port
    };

    assert_eq!(port(30_080, &[]), Some(30_080));
    assert_eq!(port(0, &[]), None);
    let wrong = "spec.ports[0].nodePort: 70000 is not a port from 1 to 65535";
    assert_eq!(port(70_000, &[wrong]), None);
}
