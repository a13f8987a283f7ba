//! Contract 2: the addresses of a Service.

use serde_json::json;

use super::{Given, balanced, endpoint, slice, web, with_ingress};
use crate::reference::{ExternalIps, Kind, Source};

#[test]
fn cluster_ip_answers_any_source() {
    let given = Given::new(
        &[web(json!({}))],
        &[slice(&[endpoint("10.0.0.1", "there")])],
    );
    assert_eq!(given.all_meet("10.96.0.1:80"), ["10.0.0.1:8080"; 3]);
}

#[test]
fn node_port_is_used_whenever_it_is_not_0_whatever_the_type() {
    for type_ in ["ClusterIP", "NodePort", "LoadBalancer"] {
        let ports = json!([{"port": 80, "nodePort": 30080}]);
        let given = Given::new(&[web(json!({"type": type_, "ports": ports}))], &[]);
        assert_eq!(
            given.front("192.168.0.1:30080").kind,
            Kind::NodePort,
            "{type_}"
        );
    }
}

#[test]
fn load_balancer_without_allocated_node_ports_has_none() {
    for node_port in [json!(0), json!(null)] {
        let spec = json!({
            "type": "LoadBalancer",
            "allocateLoadBalancerNodePorts": false,
            "ports": [{"port": 80, "nodePort": node_port}],
        });
        let given = Given::new(&[web(spec)], &[]);
        assert_eq!(given.keys(), ["10.96.0.1:80"]);
    }
}

#[test]
fn external_ip_need_not_be_on_the_node_and_is_of_the_services_families() {
    let spec = json!({"externalIPs": ["198.51.100.1", "2001:db8::1"]});
    let given = Given::new(&[web(spec)], &[slice(&[endpoint("10.0.0.1", "there")])]);
    assert_eq!(given.keys(), ["10.96.0.1:80", "198.51.100.1:80"]);
    assert_eq!(given.front("198.51.100.1:80").kind, Kind::ExternalIp);
    assert_eq!(given.all_meet("198.51.100.1:80"), ["10.0.0.1:8080"; 3]);
}

#[test]
fn owned_external_ips_are_those_of_load_balancers_and_nodes() {
    let theirs = json!([{"ip": "203.0.113.1", "ipMode": "Proxy"}]);
    let other = super::named("other", "10.96.0.2", json!({"type": "LoadBalancer"}));
    let spec = json!({"externalIPs": ["8.8.8.8", "203.0.113.1", "192.168.9.2"]});
    let mut given = Given::new(&[web(spec), with_ingress(other, theirs)], &[]);
    assert!(given.try_front("8.8.8.8:80").is_some());

    given.here.external_ips = ExternalIps::Owned;
    assert!(given.try_front("8.8.8.8:80").is_none());
    assert!(given.try_front("203.0.113.1:80").is_some());
    assert!(given.try_front("192.168.9.2:80").is_some());
}

#[test]
fn load_balancer_ip_is_a_front_in_mode_vip_or_without_a_mode_only() {
    let ingress = json!([
        {"ip": "203.0.113.1"},
        {"ip": "203.0.113.2", "ipMode": "VIP"},
        {"ip": "203.0.113.3", "ipMode": "Proxy"},
        {"hostname": "lb.example.org"},
        {"ip": ""},
        {"ip": "2001:db8::1"},
    ]);
    let given = Given::new(&[balanced(ingress, json!({}))], &[]);
    assert_eq!(
        given.keys(),
        ["10.96.0.1:80", "203.0.113.1:80", "203.0.113.2:80"]
    );
    assert_eq!(given.front("203.0.113.1:80").kind, Kind::LoadBalancerIp);
}

#[test]
fn services_share_a_load_balancer_ip_on_different_ports_and_protocols() {
    let ingress = json!([{"ip": "203.0.113.1"}]);
    let spec = |port: u16, protocol: &str| json!({"type": "LoadBalancer", "ports": [{"port": port, "protocol": protocol}]});
    let services = [
        super::named("a", "10.96.0.1", spec(80, "TCP")),
        super::named("b", "10.96.0.2", spec(80, "UDP")),
        super::named("c", "10.96.0.3", spec(81, "TCP")),
    ];
    let services = services.map(|service| with_ingress(service, ingress.clone()));
    let given = Given::new(&services, &[]);
    for (at, owner) in [
        ("203.0.113.1:80", "a"),
        ("203.0.113.1:80/udp", "b"),
        ("203.0.113.1:81", "c"),
    ] {
        assert_eq!(given.front(at).owner.service, owner, "{at}");
    }
}

#[test]
fn node_port_works_at_a_load_balancer_ip_that_the_node_holds() {
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let service = balanced(json!([{"ip": "203.0.113.1"}]), json!({"ports": ports}));
    let mut given = Given::new(&[service], &[]);
    given.here.node_port_addresses = crate::reference::NodePortAddresses::All;
    assert!(given.try_front("203.0.113.1:30080").is_none());

    given.here.addresses.push((true, super::ip("203.0.113.1")));
    assert_eq!(given.front("203.0.113.1:30080").kind, Kind::NodePort);
    assert_eq!(given.front("203.0.113.1:80").kind, Kind::LoadBalancerIp);
}

#[test]
fn unused_port_of_a_load_balancer_or_external_ip_is_nothing() {
    let spec = json!({"externalIPs": ["198.51.100.1"]});
    let given = Given::new(&[balanced(json!([{"ip": "203.0.113.1"}]), spec)], &[]);
    let expected = ["10.96.0.1:80", "198.51.100.1:80", "203.0.113.1:80"];
    assert_eq!(given.keys(), expected);
    let refusing = crate::reference::refusing_addresses(&given.cluster);
    assert!(refusing.into_iter().eq([super::ip("10.96.0.1")]));
}

#[test]
fn external_policy_has_no_meaning_for_a_cluster_ip() {
    let spec = json!({
        "type": "NodePort",
        "externalTrafficPolicy": "Local",
        "ports": [{"port": 80, "nodePort": 30080}],
    });
    let given = Given::new(&[web(spec)], &[slice(&[endpoint("10.0.0.1", "there")])]);
    assert_eq!(given.meets(&super::CLIENT, "10.96.0.1:80"), "10.0.0.1:8080");
    assert_eq!(given.meets(&super::CLIENT, "192.168.0.1:30080"), "dropped");
    assert_eq!(
        given.meets(&Source::NodeSocket, "192.168.0.1:30080"),
        "10.0.0.1:8080"
    );
}
