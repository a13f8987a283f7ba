use serde_json::{Value, json};
use tunnel_common::addr::Protocol;

use super::*;
use crate::k8s::tests::{a_slice, assert_refused, assert_skipped, ignored, ip, slice, with};

#[test]
fn a_slice_is_read_with_its_owner_ports_and_endpoints() {
    let manifest = slice(
        json!([{"name": "http", "port": 8080}, {"name": "dns", "port": 53, "protocol": "UDP"}]),
        json!([
            {"addresses": ["10.1.0.010", "ignored"], "nodeName": "edge-1"},
            {"addresses": ["10.1.0.2"], "nodeName": "", "conditions": {"ready": false}},
            {"addresses": ["10.1.0.3"],
             "conditions": {"ready": false, "serving": true, "terminating": true}},
        ]),
    );

    let slice = a_slice(manifest);

    assert_eq!(slice.name, ObjectName::new("shop", "web-1"));
    assert_eq!(slice.service, ObjectName::new("shop", "web"));
    assert_eq!(slice.family, Family::V4);
    let ports: Vec<_> = slice
        .ports
        .iter()
        .map(|p| (&*p.name, p.port, p.protocol))
        .collect();
    assert_eq!(
        ports,
        [("http", 8080, Protocol::TCP), ("dns", 53, Protocol::UDP)]
    );
    let endpoint = |address, ready, terminating, node: Option<&str>| Endpoint {
        address: ip(address),
        ready,
        serving: true,
        terminating,
        node: node.map(Arc::from),
        name: None,
        zone: None,
        hints: None,
    };
    assert_eq!(
        slice.endpoints,
        [
            endpoint("10.1.0.10", true, false, Some("edge-1")),
            endpoint("10.1.0.2", false, false, None),
            endpoint("10.1.0.3", false, true, None),
        ]
    );
}

#[test]
fn a_slice_says_when_the_change_happened_that_it_tells_of() {
    let annotated = |text: &str| {
        let mut manifest = slice(json!([{"port": 80}]), json!([]));
        manifest["metadata"]["annotations"] =
            json!({"endpoints.kubernetes.io/last-change-trigger-time": text});
        a_slice(manifest).triggered.map(|at| at.to_string())
    };
    let time = "2026-07-21T10:00:00.123Z";

    assert_eq!(annotated(time).as_deref(), Some(time));
    assert_eq!(
        annotated("2026-07-21T12:00:00+02:00").as_deref(),
        Some("2026-07-21T10:00:00Z")
    );
    assert_eq!(annotated("yesterday"), None);
}

#[test]
fn a_slice_port_without_a_name_is_the_unnamed_one_and_one_without_a_number_is_left_out() {
    let ports = json!([{"port": 8080}, {"name": "none"}, {"name": "zero", "port": 0}]);

    let slice = a_slice(slice(ports, json!([])));

    let ports: Vec<_> = slice.ports.iter().map(|p| (&*p.name, p.port)).collect();
    assert_eq!(ports, [("", 8080)]);
}

#[test]
fn slices_that_say_nothing_of_a_served_service_are_skipped() {
    let good = slice(json!([]), json!([]));
    assert_skipped(with(good.clone(), "/metadata/labels", json!({})));
    assert_skipped(with(good.clone(), "/addressType", json!("FQDN")));
    let labels = json!({
        "kubernetes.io/service-name": "web", "service.kubernetes.io/headless": "",
    });
    assert_skipped(with(good, "/metadata/labels", labels));
}

/// That of the two entries of a list only the first is used, and that the second is named with what is
/// wrong with it.
fn assert_left_out(manifest: Value, field: &str, reason: &str) {
    let named = ignored(manifest.clone());
    let slice = a_slice(manifest);

    assert_eq!(named, [format!("{field}: {reason}")]);
    assert_eq!((slice.ports.len(), slice.endpoints.len()), (1, 1));
}

#[test]
fn an_endpoint_that_cannot_be_used_is_left_out_and_named() {
    let ports = json!([{"port": 80}]);
    let v4 = |endpoint: Value| {
        slice(
            ports.clone(),
            json!([{"addresses": ["10.1.0.1"]}, endpoint]),
        )
    };
    let v6 = |endpoint: Value| {
        let endpoints = json!([{"addresses": ["fd00::7"]}, endpoint]);
        with(
            slice(ports.clone(), endpoints),
            "/addressType",
            json!("IPv6"),
        )
    };
    let field = "endpoints[1].addresses[0]";
    let at = |text: &str| json!({"addresses": [text]});

    assert_left_out(v4(at("pod")), field, "\"pod\" is not an IP address");
    assert_left_out(v6(at("pod")), field, "\"pod\" is not an IP address");
    for (manifest, text) in [
        (v4(at("fd00::1")), "fd00::1"),
        (v6(at("10.1.0.1")), "10.1.0.1"),
    ] {
        let reason = format!("{text} is not of the slice's address type");
        assert_left_out(manifest, field, &reason);
    }
    for (v4_text, v6_text, what) in [
        ("0.0.0.0", "::", "the unspecified address"),
        ("127.0.0.1", "::1", "a loopback address"),
        ("169.254.0.1", "fe80::1", "a link-local address"),
        ("224.0.0.1", "ff0e::1", "a multicast address"),
    ] {
        for (manifest, text) in [(v4(at(v4_text)), v4_text), (v6(at(v6_text)), v6_text)] {
            let reason = format!("{text} is {what}, which can't be used here");
            assert_left_out(manifest, field, &reason);
        }
    }
    let empty = json!({"addresses": []});
    assert_left_out(v4(empty), "endpoints[1].addresses", "is required");
}

#[test]
fn a_port_of_a_slice_that_cannot_be_used_is_left_out_and_named() {
    let second = |port: Value| {
        let endpoints = json!([{"addresses": ["10.1.0.1"]}]);
        slice(json!([{"port": 80}, port]), endpoints)
    };

    assert_left_out(
        second(json!({"name": "b", "port": 70000})),
        "ports[1].port",
        "70000 is not a port from 1 to 65535",
    );
    assert_left_out(
        second(json!({"name": "b", "port": 80, "protocol": "ICMP"})),
        "ports[1].protocol",
        "\"ICMP\" is not TCP, UDP or SCTP",
    );
    assert_left_out(
        second(json!({"name": "", "port": 81})),
        "ports[1].name",
        "\"\" is there twice",
    );
}

#[test]
fn of_many_endpoints_that_cannot_be_used_the_first_few_are_named() {
    let endpoints: Vec<_> = (0..100).map(|_| json!({"addresses": ["pod"]})).collect();

    let named = ignored(slice(json!([]), json!(endpoints)));

    assert_eq!(named.len(), NOTED);
}

#[test]
fn a_slice_is_refused_by_the_field_that_is_wrong() {
    let good = slice(json!([]), json!([]));
    assert_refused(
        with(good.clone(), "/addressType", json!("IPv5")),
        "addressType",
        "\"IPv5\" is not IPv4, IPv6 or FQDN",
    );
    assert_refused(
        with(good.clone(), "/addressType", json!(null)),
        "addressType",
        "is required",
    );
    assert_refused(
        with(good, "/endpoints", json!({})),
        "endpoints",
        "invalid type: map, expected a sequence",
    );
}
