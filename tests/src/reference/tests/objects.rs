//! Contract 1: which objects count, how they are read. Contract 3: affinity.

use serde_json::json;

use super::{Given, endpoint, named, slice, web, with_metadata};
use crate::reference::{
    address::{Cidr, parse},
    refusing_addresses,
};

#[test]
fn service_with_a_proxy_name_label_of_any_value_is_left_alone() {
    let labels = json!({"labels": {"service.kubernetes.io/service-proxy-name": ""}});
    let given = Given::new(&[with_metadata(web(json!({})), labels)], &[]);
    assert!(given.keys().is_empty());
}

#[test]
fn service_with_the_headless_label_and_a_cluster_ip_is_refused_while_its_slices_have_the_label() {
    let labels = json!({"labels": {"service.kubernetes.io/headless": ""}});
    let service = with_metadata(web(json!({})), labels);
    let mut given = Given::new(&[service], &[slice(&[endpoint("10.0.0.1", "here")])]);
    assert_eq!(given.all_meet("10.96.0.1:80"), ["10.0.0.1:8080"; 3]);

    let labels = given.slice(0).metadata.labels.as_mut().unwrap();
    labels.insert("service.kubernetes.io/headless".to_owned(), String::new());
    assert_eq!(given.all_meet("10.96.0.1:80"), ["refused"; 3]);
}

#[test]
fn slice_with_a_proxy_name_label_counts() {
    let mut given = Given::new(&[web(json!({}))], &[slice(&[endpoint("10.0.0.1", "here")])]);
    let labels = given.slice(0).metadata.labels.as_mut().unwrap();
    let key = "service.kubernetes.io/service-proxy-name";
    labels.insert(key.to_owned(), "other".to_owned());
    assert_eq!(given.all_meet("10.96.0.1:80"), ["10.0.0.1:8080"; 3]);
}

#[test]
fn external_name_is_ignored_even_with_a_cluster_ip() {
    let given = Given::new(&[web(json!({"type": "ExternalName"}))], &[]);
    assert!(given.keys().is_empty());
}

#[test]
fn headless_is_ignored_with_none_and_with_nothing_as_cluster_ip_also_at_its_external_ips() {
    for cluster_ip in [json!("None"), json!(""), json!(null)] {
        // Whatever is left in the other field.
        let spec = json!({
            "clusterIP": cluster_ip,
            "clusterIPs": ["10.96.0.1"],
            "externalIPs": ["198.51.100.1"],
        });
        let given = Given::new(&[web(spec)], &[]);
        assert!(given.keys().is_empty(), "{cluster_ip}");
    }
}

#[test]
fn each_family_takes_the_cluster_ip_and_the_slices_of_its_family() {
    let mut other = slice(&[endpoint("fd24::1", "here")]);
    other["metadata"]["name"] = json!("web-2");
    other["addressType"] = json!("IPv6");
    let slices = [slice(&[endpoint("10.0.0.1", "here")]), other];
    for (ips, families) in [
        (["10.96.0.1", "fd96::1"], ["IPv4", "IPv6"]),
        (["fd96::1", "10.96.0.1"], ["IPv6", "IPv4"]),
    ] {
        let spec = json!({"clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": families});
        let given = Given::new(&[web(spec)], &slices);
        assert_eq!(given.keys(), ["10.96.0.1:80", "[fd96::1]:80"]);
        assert_eq!(given.all_meet("10.96.0.1:80"), ["10.0.0.1:8080"; 3]);
        assert_eq!(given.all_meet("[fd96::1]:80"), ["[fd24::1]:8080"; 3]);
    }
}

#[test]
fn service_without_a_cluster_ip_of_a_family_has_no_address_of_it() {
    let spec = json!({
        "type": "NodePort",
        "ports": [{"port": 80, "nodePort": 30080}],
        "externalIPs": ["2001:db8::1"],
    });
    let given = Given::new(&[web(spec)], &[]);
    let keys = given.keys();
    assert!(keys.contains(&"192.168.0.1:30080".to_owned()));
    assert!(keys.iter().all(|key| !key.contains('[')), "{keys:?}");
}

#[test]
fn leading_zeros_of_addresses_are_decimal() {
    for (text, address) in [
        ("172.30.0.041", Some("172.30.0.41")),
        ("010.000.0000.1", Some("10.0.0.1")),
        ("10.0.0.256", None),
        ("10.0.0", None),
        ("10.0.0.0x1", None),
        ("10.0.0.+1", None),
        ("10.0.0.1.", None),
        (" 10.0.0.1", None),
        ("", None),
        ("FD00::0001", Some("fd00::1")),
        ("::ffff:10.0.0.1", Some("10.0.0.1")),
        ("fe80::1%eth0", None),
    ] {
        let expected = address.map(super::ip);
        assert_eq!(parse(text), expected, "{text}");
    }
}

#[test]
fn ranges_are_masked_and_trimmed_and_leading_zeros_are_decimal() {
    for (text, first, length) in [
        ("010.1.2.3/8", "10.0.0.0", 8),
        ("\t10.1.2.3/32 ", "10.1.2.3", 32),
        ("1.2.3.4/0", "0.0.0.0", 0),
        ("fd00::1/64", "fd00::", 64),
    ] {
        let range = Cidr::parse(text).unwrap();
        assert_eq!(
            (range.address(), range.length()),
            (super::ip(first), length)
        );
    }
    for text in [
        "10.0.0.0",
        "10.0.0.0/33",
        "10.0.0.0/+8",
        "10.0.0.0/",
        "x/8",
        "fd00::/129",
    ] {
        assert_eq!(Cidr::parse(text), None, "{text}");
    }
}

#[test]
fn one_bad_address_or_port_does_not_break_the_others() {
    let spec = json!({
        "externalIPs": ["nonsense", "", "198.51.100.01"],
        "ports": [
            {"name": "bad", "port": 70000},
            {"name": "worse", "port": 81, "protocol": "DCCP"},
            {"name": "", "port": 80},
        ],
    });
    let slices = [slice(&[
        endpoint("nonsense", "here"),
        endpoint("10.0.0.01", "here"),
    ])];
    let given = Given::new(&[web(spec)], &slices);
    assert_eq!(given.keys(), ["10.96.0.1:80", "198.51.100.1:80"]);
    assert_eq!(given.all_meet("198.51.100.1:80"), ["10.0.0.1:8080"; 3]);
}

#[test]
fn one_number_in_three_protocols_is_three_fronts() {
    let spec = json!({"ports": [
        {"name": "t", "port": 53, "protocol": "TCP"},
        {"name": "u", "port": 53, "protocol": "UDP"},
        {"name": "s", "port": 53, "protocol": "SCTP"},
    ]});
    let given = Given::new(&[web(spec)], &[]);
    let expected = ["10.96.0.1:53", "10.96.0.1:53/sctp", "10.96.0.1:53/udp"];
    assert_eq!(given.keys(), expected);
    assert_eq!(given.front("10.96.0.1:53/udp").owner.port, "u");
}

#[test]
fn target_port_is_not_read() {
    let spec = json!({"ports": [{"port": 80, "targetPort": 9999}]});
    let given = Given::new(&[web(spec)], &[slice(&[endpoint("10.0.0.1", "here")])]);
    assert_eq!(given.all_meet("10.96.0.1:80"), ["10.0.0.1:8080"; 3]);
}

#[test]
fn affinity_is_the_timeout_or_three_hours() {
    for (spec, seconds) in [
        (json!({}), 0),
        (json!({"sessionAffinity": "None"}), 0),
        (json!({"sessionAffinity": "ClientIP"}), 10_800),
        (
            json!({
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            }),
            60,
        ),
    ] {
        let front = Given::new(&[web(spec.clone())], &[]).front("10.96.0.1:80");
        assert_eq!(front.affinity, seconds, "{spec}");
    }
}

#[test]
fn ports_without_a_front_are_refused_at_the_cluster_ips_of_services_that_count() {
    let services = [
        web(json!({"clusterIPs": ["10.96.0.1", "fd96::1"], "externalIPs": ["198.51.100.1"]})),
        named("gone", "10.96.0.2", json!({"type": "ExternalName"})),
    ];
    let given = Given::new(&services, &[]);
    let refusing: Vec<_> = refusing_addresses(&given.cluster).into_iter().collect();
    assert_eq!(refusing, [super::ip("10.96.0.1"), super::ip("fd96::1")]);
}
