use serde_json::{Value, json};
use tunnel_common::addr::Protocol;

use super::*;
use crate::{
    k8s::tests::{
        a_slice, assert_all_refused, assert_refused, assert_skipped, ignored, ip, slice, with,
    },
    model::fixture,
};

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
    let ports = slice.ports.iter();
    let ports: Vec<_> = ports.map(|p| (&*p.name, p.port, p.protocol)).collect();
    let wanted = [("http", 8080, Protocol::TCP), ("dns", 53, Protocol::UDP)];
    assert_eq!(ports, wanted);
    let endpoint = |address, ready, terminating, node: Option<&str>| Endpoint {
        ready,
        terminating,
        node: node.map(Arc::from),
        ..fixture::endpoint(ip(address))
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
fn a_slice_has_the_time_of_the_change_from_its_annotation() {
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
fn a_port_without_a_name_has_the_empty_name_and_one_without_a_number_is_skipped() {
    let ports = json!([{"port": 8080}, {"name": "none"}, {"name": "zero", "port": 0}]);

    let slice = a_slice(slice(ports, json!([])));

    let ports: Vec<_> = slice.ports.iter().map(|p| (&*p.name, p.port)).collect();
    assert_eq!(ports, [("", 8080)]);
}

#[test]
fn slices_without_a_served_service_are_skipped() {
    let headless =
        json!({"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""});
    for (pointer, value) in [
        ("/metadata/labels", json!({})),
        ("/metadata/labels", headless),
        ("/addressType", json!("FQDN")),
    ] {
        assert_skipped(with(slice(json!([]), json!([])), pointer, value));
    }
}

/// For each row of the form `JSON => error`, builds a manifest with `make`, in which the JSON is the second
/// entry of a list. Asserts that this entry is ignored with the error, and that the first entry is used.
#[track_caller]
fn assert_ignored(make: impl Fn(Value) -> Value, rows: &[&str]) {
    for row in rows {
        let (json, wrong) = row.split_once(" => ").expect("a row");
        let manifest = make(serde_json::from_str(json).expect("JSON"));
        assert_eq!(ignored(manifest.clone()), [wrong], "{row}");
        let slice = a_slice(manifest);
        assert_eq!((slice.ports.len(), slice.endpoints.len()), (1, 1), "{row}");
    }
}

#[test]
fn an_invalid_endpoint_is_ignored_and_reported() {
    let with_second = |first: &str, second: Value| {
        let endpoints = json!([{"addresses": [first]}, {"addresses": second}]);
        slice(json!([{"port": 80}]), endpoints)
    };
    let v4 = |addresses| with_second("10.1.0.1", addresses);
    let v6 = |addresses| {
        let manifest = with_second("fd00::7", addresses);
        with(manifest, "/addressType", json!("IPv6"))
    };
    let rows = [
        r#"["pod"] => endpoints[1].addresses[0]: "pod" is not an IP address"#,
        r#"["fd00::1"] => endpoints[1].addresses[0]: fd00::1 is not an IPv4 address, as addressType requires"#,
        r#"["0.0.0.0"] => endpoints[1].addresses[0]: 0.0.0.0 is the unspecified address, which is not allowed here"#,
        r#"["127.0.0.1"] => endpoints[1].addresses[0]: 127.0.0.1 is a loopback address, which is not allowed here"#,
        r#"["169.254.0.1"] => endpoints[1].addresses[0]: 169.254.0.1 is a link-local address, which is not allowed here"#,
        r#"["224.0.0.1"] => endpoints[1].addresses[0]: 224.0.0.1 is a multicast address, which is not allowed here"#,
        "[] => endpoints[1].addresses: is required",
    ];
    assert_ignored(v4, &rows);
    let rows = [
        r#"["pod"] => endpoints[1].addresses[0]: "pod" is not an IP address"#,
        r#"["10.1.0.1"] => endpoints[1].addresses[0]: 10.1.0.1 is not an IPv6 address, as addressType requires"#,
        r#"["::"] => endpoints[1].addresses[0]: :: is the unspecified address, which is not allowed here"#,
        r#"["::1"] => endpoints[1].addresses[0]: ::1 is a loopback address, which is not allowed here"#,
        r#"["fe80::1"] => endpoints[1].addresses[0]: fe80::1 is a link-local address, which is not allowed here"#,
        r#"["ff0e::1"] => endpoints[1].addresses[0]: ff0e::1 is a multicast address, which is not allowed here"#,
    ];
    assert_ignored(v6, &rows);
}

#[test]
fn an_invalid_port_of_a_slice_is_ignored_and_reported() {
    let endpoints = json!([{"addresses": ["10.1.0.1"]}]);
    let second = |port: Value| slice(json!([{"port": 80}, port]), endpoints.clone());
    let rows = [
        r#"{"name": "b", "port": 70000} => ports[1].port: 70000 is not a port from 1 to 65535"#,
        r#"{"name": "b", "port": 80, "protocol": "ICMP"} => ports[1].protocol: "ICMP" is not TCP, UDP or SCTP"#,
        r#"{"name": "", "port": 81} => ports[1].name: "" is already used by an earlier port"#,
    ];
    assert_ignored(second, &rows);
}

#[test]
fn only_the_first_of_many_invalid_endpoints_are_reported() {
    let endpoints: Vec<_> = (0..100).map(|_| json!({"addresses": ["pod"]})).collect();

    let named = ignored(slice(json!([]), json!(endpoints)));

    assert_eq!(named.len(), MAX_REPORTED);
}

#[test]
fn a_slice_is_refused_with_its_invalid_field() {
    let good = || slice(json!([]), json!([]));
    let rows = [
        r#""IPv5" => addressType: "IPv5" is not IPv4, IPv6 or FQDN"#,
        "null => addressType: is required",
    ];
    assert_all_refused(|kind| with(good(), "/addressType", kind), &rows);
    let wrong = "endpoints: is an object, but must be a list";
    assert_refused(with(good(), "/endpoints", json!({})), wrong);
}
