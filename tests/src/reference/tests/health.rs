//! Contract 7, the rows about `healthCheckNodePort`.

use serde_json::{Value, json};

use super::{Given, draining, endpoint, endpoint_with, slice, web};
use crate::reference::{address::Family, health_check_node_ports};

fn spec() -> Value {
    json!({
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": 31000,
    })
}

fn ports(spec: Value) -> Vec<u16> {
    let given = Given::new(&[web(spec)], &[]);
    let checks = health_check_node_ports(&given.cluster, &given.here);
    checks.into_keys().collect()
}

#[test]
fn only_load_balancers_with_external_policy_local_have_a_health_check_node_port() {
    assert_eq!(ports(spec()), [31000]);
    for fields in [
        json!({"type": "NodePort"}),
        json!({"externalTrafficPolicy": "Cluster"}),
        json!({"externalTrafficPolicy": null}),
        json!({"healthCheckNodePort": 0}),
        json!({"healthCheckNodePort": null}),
        json!({"clusterIP": "None"}),
    ] {
        let mut spec = spec();
        super::merge(&mut spec, fields.clone());
        assert!(ports(spec).is_empty(), "{fields}");
    }
}

#[test]
fn it_counts_distinct_local_ready_addresses_over_all_ports() {
    let mut other = slice(&[endpoint("10.0.0.1", "here"), endpoint("10.0.0.5", "here")]);
    other["metadata"]["name"] = json!("web-2");
    other["ports"] = json!([{"name": "other", "port": 9090}, {"name": "nothing"}]);
    let first = slice(&[
        endpoint("10.0.0.1", "here"),
        endpoint("10.0.0.2", "there"),
        endpoint_with("10.0.0.3", "here", draining()),
        endpoint_with("10.0.0.4", "here", super::not_ready()),
    ]);
    let given = Given::new(&[web(spec())], &[first, other]);
    let checks = health_check_node_ports(&given.cluster, &given.here);
    let check = &checks[&31000];
    assert_eq!((&*check.namespace, &*check.service), ("ns", "web"));
    assert_eq!(
        check.local_ready.clone().into_iter().collect::<Vec<_>>(),
        [(Family::Ipv4, 2)]
    );
}

#[test]
fn endpoints_that_drain_do_not_count_though_they_get_traffic() {
    let draining = [endpoint_with("10.0.0.1", "here", draining())];
    let given = Given::new(&[web(spec())], &[slice(&draining)]);
    let checks = health_check_node_ports(&given.cluster, &given.here);
    assert_eq!(checks[&31000].local_ready[&Family::Ipv4], 0);
    assert_eq!(given.front("10.96.0.1:80").local.len(), 1);
}

#[test]
fn families_are_counted_by_themselves() {
    let mut spec = spec();
    super::merge(&mut spec, json!({"clusterIPs": ["10.96.0.1", "fd96::1"]}));
    let given = Given::new(&[web(spec)], &[slice(&[endpoint("10.0.0.1", "here")])]);
    let checks = health_check_node_ports(&given.cluster, &given.here);
    let counts: Vec<_> = checks[&31000].local_ready.clone().into_iter().collect();
    assert_eq!(counts, [(Family::Ipv4, 1), (Family::Ipv6, 0)]);
}
