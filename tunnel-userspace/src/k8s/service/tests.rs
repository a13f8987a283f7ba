use serde_json::{Value, json};
use tunnel_common::addr::Protocol;

use super::*;
use crate::{
    k8s::tests::{a_service, assert_all_refused, assert_skipped, http, ignored, ip, service, with},
    model::Algorithm,
};

#[test]
fn a_service_is_read_with_its_addresses_ports_and_age() {
    let manifest = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": "web", "namespace": "shop",
            "creationTimestamp": "2024-05-01T10:00:00Z",
            "annotations": {"culvert.dev/algorithm": "round-robin", "other": "kept out"},
        },
        "spec": {
            "type": "NodePort",
            "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00::010"],
            "ports": [
                {"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080},
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "sig", "port": 53, "protocol": "SCTP"},
            ],
        },
    });

    let port = |name: &str, port, protocol| ServicePort {
        name: Arc::from(name),
        port,
        node_port: None,
        protocol,
    };
    assert_eq!(
        *a_service(manifest),
        Service {
            created: Some(1_714_557_600),
            cluster_ips: vec![ip("10.96.0.10"), ip("fd00::10")],
            ports: vec![
                ServicePort {
                    node_port: Some(30_080),
                    ..port("http", 80, Protocol::TCP)
                },
                port("dns", 53, Protocol::UDP),
                port("sig", 53, Protocol::SCTP),
            ],
            algorithm: Some(Algorithm::RoundRobin),
            ..Service::named(ObjectName::new("shop", "web"))
        }
    );
}

fn with_port(mut spec: Value) -> Value {
    spec["ports"] = json!([{"port": 80}]);
    service(spec)
}

#[test]
fn cluster_ip_is_used_if_cluster_ips_are_missing_and_leading_zeros_are_decimal() {
    for spec in [
        json!({"clusterIP": "10.96.0.010"}),
        json!({"clusterIPs": ["10.96.0.010"]}),
        json!({"clusterIP": "10.96.0.010", "clusterIPs": ["10.96.0.10"]}),
    ] {
        let service = a_service(with_port(spec.clone()));
        assert_eq!(service.cluster_ips, [ip("10.96.0.10")], "{spec}");
    }
}

#[test]
fn services_that_are_not_served_are_skipped_even_if_they_are_invalid() {
    let labelled = |label: &str| with(service(http()), "/metadata/labels", json!({label: ""}));
    let bad_ports = json!([{"port": 0}]);
    for spec in [
        json!({"type": "ExternalName", "clusterIP": "10.96.0.10", "externalName": "example.org"}),
        json!({"clusterIP": "None", "ports": bad_ports}),
        json!({"clusterIP": "None", "clusterIPs": ["None"]}),
        json!({"clusterIPs": ["None"]}),
        json!({"clusterIP": "", "ports": bad_ports}),
        json!({"ports": bad_ports}),
        json!(null),
    ] {
        assert_skipped(service(spec));
    }
    let other_proxy = with(
        service(json!({"ports": bad_ports})),
        "/metadata/labels",
        json!({"service.kubernetes.io/service-proxy-name": ""}),
    );
    assert_skipped(other_proxy);
    // The Service has a cluster IP, so it isn't headless.
    a_service(labelled("service.kubernetes.io/headless"));
}

#[test]
fn a_service_that_is_not_served_keeps_only_its_addresses() {
    let labels = json!({"service.kubernetes.io/service-proxy-name": ""});
    let ingress = json!([
        {"ip": "203.0.113.1"},
        {"ip": "2001:db8:f::1", "ipMode": "Proxy"},
        {"ip": "nowhere", "ipMode": "Other"},
    ]);
    let status = json!({"loadBalancer": {"ingress": ingress}});
    let of_other = with(service(http()), "/metadata/labels", labels);
    let headless = service(json!({"clusterIP": "None"}));
    for (manifest, cluster_ips) in [(of_other, vec![ip("10.96.0.10")]), (headless, vec![])] {
        let manifest = with(manifest, "/status", status.clone());

        let service = a_service(manifest.clone());

        let wanted = Service {
            is_of_other_proxy: !cluster_ips.is_empty(),
            cluster_ips,
            unserved_ips: vec![ip("203.0.113.1"), ip("2001:db8:f::1")],
            ..Service::named(service.name.clone())
        };
        assert_eq!(*service, wanted);
        assert!(ignored(manifest).is_empty());
    }
}

#[test]
fn a_service_is_refused_with_its_invalid_cluster_ip() {
    let rows = [
        r#"{"clusterIPs": ["10.96.0.300"]} => spec.clusterIPs[0]: "10.96.0.300" is not an IP address"#,
        r#"{"clusterIPs": ["10.96.0.1", "10.96.0.2"]} => spec.clusterIPs[1]: 10.96.0.2 is a second address of its IP family; only one of each family is allowed"#,
        r#"{"clusterIPs": ["::1", "0.0.0.0"]} => spec.clusterIPs[1]: 0.0.0.0 is the unspecified address, which is not allowed here"#,
        r#"{"clusterIP": "127.0.0.1", "clusterIPs": ["127.0.0.1"]} => spec.clusterIPs[0]: 127.0.0.1 is a loopback address, which is not allowed here"#,
        r#"{"clusterIP": "127.0.0.1", "clusterIPs": ["fd00::1"]} => spec.clusterIP: 127.0.0.1 is a loopback address, which is not allowed here"#,
        r#"{"clusterIP": "169.254.0.1"} => spec.clusterIP: 169.254.0.1 is a link-local address, which is not allowed here"#,
        r#"{"clusterIPs": ["ff02::1"]} => spec.clusterIPs[0]: ff02::1 is a multicast address, which is not allowed here"#,
        r#"{"clusterIPs": ["255.255.255.255"]} => spec.clusterIPs[0]: 255.255.255.255 is the broadcast address, which is not allowed here"#,
        r#"{"clusterIP": "x"} => spec.clusterIP: "x" is not an IP address"#,
        r#"{"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.2"]} => spec.clusterIP: 10.96.0.1 is missing from spec.clusterIPs"#,
    ];
    assert_all_refused(with_port, &rows);
}

#[test]
fn a_service_is_served_without_a_cluster_ip_that_no_host_may_serve() {
    for (single, several) in [
        ("fe80::1", ["fe80::1", "10.96.0.10"]),
        ("10.96.0.10", ["10.96.0.10", "::1"]),
    ] {
        let manifest = with_port(json!({"clusterIP": single, "clusterIPs": several}));

        assert_eq!(a_service(manifest.clone()).cluster_ips, [ip("10.96.0.10")]);
        let ignored = ignored(manifest);
        assert_eq!(ignored.len(), 1, "{ignored:?}");
        assert!(ignored[0].starts_with("spec.clusterIPs["), "{ignored:?}");
    }
}

#[test]
fn a_service_is_refused_with_its_invalid_port() {
    let with_ports = |ports| service(json!({"clusterIP": "10.96.0.10", "ports": ports}));
    let rows = [
        r#"[] => spec.ports: is required"#,
        r#"[{"port": 0}] => spec.ports[0].port: 0 is not a port from 1 to 65535"#,
        r#"[{"port": 65536}] => spec.ports[0].port: 65536 is not a port from 1 to 65535"#,
        r#"[{"port": -1}] => spec.ports[0].port: -1 is not a port from 1 to 65535"#,
        r#"[{"port": "80"}] => spec.ports[0].port: is the string "80", but must be an integer"#,
        r#"[{"port": 80, "protocol": "tcp"}] => spec.ports[0].protocol: "tcp" is not TCP, UDP or SCTP"#,
        r#"[{"name": "a", "port": 80}, {"port": 81}] => spec.ports[1].name: is required if there are several ports"#,
        r#"[{"name": "a", "port": 80}, {"name": "a", "port": 81}] => spec.ports[1].name: "a" is already used by an earlier port"#,
        r#"[{"name": "a", "port": 80}, {"name": "b", "port": 80}] => spec.ports[1].port: "80/TCP" is already used by an earlier port"#,
    ];
    assert_all_refused(with_ports, &rows);
}
