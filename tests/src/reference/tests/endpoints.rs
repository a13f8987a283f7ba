//! Contract 1: how EndpointSlices are read.

use std::slice::from_ref;

use serde_json::{Value, json};

use super::{Given, draining, endpoint, endpoint_with, slice, web};

/// What the cluster IP of `web` is translated to, with these slices.
fn backends(slices: &[Value]) -> String {
    let given = Given::new(&[web(json!({}))], slices);
    super::texts(&given.front("10.96.0.1:80").cluster)
}

/// A second slice of `web`.
fn second(endpoints: &[Value]) -> Value {
    let mut slice = slice(endpoints);
    slice["metadata"]["name"] = json!("web-2");
    slice
}

#[test]
fn slice_belongs_to_the_service_of_its_label_in_its_namespace() {
    let mut unlabelled = slice(&[endpoint("10.0.0.1", "here")]);
    unlabelled["metadata"]["labels"] = json!({});
    let mut elsewhere = slice(&[endpoint("10.0.0.2", "here")]);
    elsewhere["metadata"]["namespace"] = json!("other");
    let mut others = slice(&[endpoint("10.0.0.3", "here")]);
    others["metadata"]["labels"] = json!({"kubernetes.io/service-name": "other"});
    assert_eq!(backends(&[unlabelled, elsewhere, others]), "");
}

#[test]
fn slice_of_another_address_type_is_ignored() {
    for address_type in ["FQDN", "IPv6"] {
        let mut other = slice(&[endpoint("10.0.0.1", "here")]);
        other["addressType"] = json!(address_type);
        assert_eq!(backends(&[other]), "", "{address_type}");
    }
}

#[test]
fn address_of_another_family_than_its_slice_is_ignored() {
    assert_eq!(backends(&[slice(&[endpoint("fd24::1", "here")])]), "");
}

#[test]
fn slice_port_is_found_by_name_and_protocol() {
    for (port, expected) in [
        (
            json!({"name": "", "port": 8080, "protocol": "TCP"}),
            "10.0.0.1:8080",
        ),
        (json!({"name": "", "port": 8080}), "10.0.0.1:8080"),
        (json!({"name": "http", "port": 8080, "protocol": "TCP"}), ""),
        (json!({"name": "", "port": 8080, "protocol": "UDP"}), ""),
        (json!({"port": 8080, "protocol": "TCP"}), ""),
        (json!({"name": "", "protocol": "TCP"}), ""),
        (json!({"name": "", "port": 0, "protocol": "TCP"}), ""),
    ] {
        let mut slice = slice(&[endpoint("10.0.0.1", "here")]);
        slice["ports"] = json!([port]);
        assert_eq!(backends(&[slice]), expected, "{port}");
    }
}

#[test]
fn port_numbers_may_differ_between_slices_of_a_service() {
    let mut other = second(&[endpoint("10.0.0.2", "here")]);
    other["ports"][0]["port"] = json!(9090);
    let slices = [slice(&[endpoint("10.0.0.1", "here")]), other];
    assert_eq!(backends(&slices), "10.0.0.1:8080 10.0.0.2:9090");
}

#[test]
fn only_the_first_address_of_an_endpoint_counts() {
    let both = endpoint_with("", "here", json!({"addresses": ["10.0.0.1", "10.0.0.2"]}));
    let none = endpoint_with("", "here", json!({"addresses": []}));
    assert_eq!(backends(&[slice(&[both, none])]), "10.0.0.1:8080");
}

#[test]
fn absent_conditions_mean_ready_serving_and_not_terminating() {
    let absent = json!(null);
    let ready = json!({"ready": null, "serving": false, "terminating": true});
    let serving = json!({"ready": false, "serving": null, "terminating": true});
    let running = json!({"ready": false, "serving": true, "terminating": null});
    for (conditions, expected) in [
        (absent, "10.0.0.1:8080"),
        (ready, "10.0.0.1:8080"),
        (serving, "10.0.0.1:8080"),
        (running, ""),
    ] {
        let endpoint = endpoint_with("10.0.0.1", "here", json!({"conditions": conditions}));
        assert_eq!(backends(&[slice(&[endpoint])]), expected, "{conditions}");
    }
}

#[test]
fn endpoint_is_local_only_by_the_name_of_this_node() {
    let nameless = endpoint_with("10.0.0.2", "", json!({"nodeName": null}));
    let on_our_address = endpoint("192.168.0.1", "there");
    let slices = [slice(&[
        endpoint("10.0.0.1", "here"),
        nameless,
        on_our_address,
    ])];
    let front = Given::new(&[web(json!({}))], &slices).front("10.96.0.1:80");
    assert_eq!(super::texts(&front.local), "10.0.0.1:8080");
}

#[test]
fn of_an_endpoint_in_two_slices_the_one_that_does_not_terminate_is_kept() {
    let old = endpoint_with("10.0.0.1", "there", draining());
    let new = endpoint("10.0.0.01", "here");
    let orders = [
        [slice(from_ref(&old)), second(from_ref(&new))],
        [slice(&[new]), second(&[old])],
    ];
    for slices in orders {
        let front = Given::new(&[web(json!({}))], &slices).front("10.96.0.1:80");
        assert_eq!(super::texts(&front.cluster), "10.0.0.1:8080");
        assert_eq!(super::texts(&front.local), "10.0.0.1:8080");
    }
}

#[test]
fn running_but_unready_endpoint_hides_a_terminating_one_of_its_address() {
    let unready = endpoint_with("10.0.0.1", "here", super::not_ready());
    let draining = endpoint_with("10.0.0.1", "here", draining());
    assert_eq!(backends(&[slice(&[unready, draining])]), "");
}

#[test]
fn one_address_at_two_ports_is_two_endpoints() {
    let mut other = second(&[endpoint("10.0.0.1", "here")]);
    other["ports"][0]["port"] = json!(9090);
    let slices = [slice(&[endpoint("10.0.0.1", "here")]), other];
    assert_eq!(backends(&slices), "10.0.0.1:8080 10.0.0.1:9090");
}
