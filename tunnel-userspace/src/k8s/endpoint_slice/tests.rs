use serde_json::{Value, json};
use tunnel_common::addr::Protocol;

use super::*;
use crate::k8s::tests::{a_slice, assert_refused, assert_skipped, ip, slice, with};

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

#[test]
fn a_slice_is_refused_by_the_field_that_is_wrong() {
    let address = |address: &str| {
        slice(
            json!([]),
            json!([{"addresses": ["10.1.0.1"]}, {"addresses": [address]}]),
        )
    };
    let field = "endpoints[1].addresses[0]";
    assert_refused(address("pod"), field, "\"pod\" is not an IP address");
    assert_refused(
        address("fd00::1"),
        field,
        "fd00::1 is not of the slice's address type",
    );
    for (text, what) in [
        ("0.0.0.0", "the unspecified address"),
        ("127.0.0.1", "a loopback address"),
        ("169.254.0.1", "a link-local address"),
        ("224.0.0.1", "a multicast address"),
    ] {
        assert_refused(
            address(text),
            field,
            &format!("{text} is {what}, which can't be used here"),
        );
    }
    for (text, what) in [
        ("::1", "a loopback address"),
        ("fe80::1", "a link-local address"),
    ] {
        let v6 = with(address(text), "/addressType", json!("IPv6"));
        let v6 = with(v6, "/endpoints", json!([{"addresses": [text]}]));
        let reason = format!("{text} is {what}, which can't be used here");
        assert_refused(v6, "endpoints[0].addresses[0]", &reason);
    }
    let empty = slice(json!([]), json!([{"addresses": []}]));
    assert_refused(empty, "endpoints[0].addresses", "is required");

    let port = |port: Value| slice(json!([port]), json!([]));
    assert_refused(
        port(json!({"port": 70000})),
        "ports[0].port",
        "70000 is not a port from 1 to 65535",
    );
    assert_refused(
        port(json!({"port": 80, "protocol": "ICMP"})),
        "ports[0].protocol",
        "\"ICMP\" is not TCP, UDP or SCTP",
    );
    assert_refused(
        slice(json!([{"port": 80}, {"name": "", "port": 81}]), json!([])),
        "ports[1].name",
        "\"\" is there twice",
    );

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
