//! Contract 4: which endpoints are used, and what is met without any.

use serde_json::{Value, json};

use super::{Given, draining, endpoint, endpoint_with, not_ready, slice, web};

const CLUSTER_IP: &str = "10.96.0.1:80";
const EXTERNAL_IP: &str = "198.51.100.1:80";
const NODE_PORT: &str = "192.168.0.1:30080";
const LOAD_BALANCER: &str = "203.0.113.1:80";
const EXTERNAL: [&str; 3] = [EXTERNAL_IP, NODE_PORT, LOAD_BALANCER];

/// `web` with an address of each kind, and these policies.
fn given(internal: &str, external: &str, endpoints: &[Value]) -> Given {
    let service = super::balanced(
        json!([{"ip": "203.0.113.1"}]),
        json!({
            "internalTrafficPolicy": internal,
            "externalTrafficPolicy": external,
            "externalIPs": ["198.51.100.1"],
            "ports": [{"port": 80, "nodePort": 30080}],
        }),
    );
    Given::new(&[service], &[slice(endpoints)])
}

fn hinted(address: &str, nodes: &[&str], zones: &[&str]) -> Value {
    let name = |name: &&str| json!({"name": name});
    let hints = json!({
        "forNodes": nodes.iter().map(name).collect::<Vec<_>>(),
        "forZones": zones.iter().map(name).collect::<Vec<_>>(),
    });
    endpoint_with(address, "there", json!({"hints": hints}))
}

/// The backends of the cluster IP, for endpoints with these hints; the last number of the address
/// says which.
fn near(endpoints: &[Value]) -> String {
    let front = given("Cluster", "Cluster", endpoints).front(CLUSTER_IP);
    let hosts = front.cluster.iter().map(|at| at.ip().to_string());
    let hosts: Vec<String> = hosts.map(|ip| ip.replace("10.0.0.", "")).collect();
    hosts.join(" ")
}

#[test]
fn cluster_policy_uses_all_ready_endpoints_and_no_others() {
    let endpoints = [
        endpoint("10.0.0.1", "here"),
        endpoint("10.0.0.2", "there"),
        endpoint_with("10.0.0.3", "here", draining()),
        endpoint_with("10.0.0.4", "here", not_ready()),
    ];
    let given = given("Cluster", "Cluster", &endpoints);
    for at in [CLUSTER_IP, EXTERNAL_IP, NODE_PORT, LOAD_BALANCER] {
        assert_eq!(
            given.all_meet(at),
            ["10.0.0.1:8080 10.0.0.2:8080"; 3],
            "{at}"
        );
    }
}

#[test]
fn without_a_ready_endpoint_those_that_serve_while_they_end_are_used_on_any_node() {
    let endpoints = [
        endpoint_with("10.0.0.1", "here", draining()),
        endpoint_with("10.0.0.2", "there", draining()),
        endpoint_with("10.0.0.4", "here", not_ready()),
    ];
    let given = given("Cluster", "Cluster", &endpoints);
    assert_eq!(
        given.all_meet(CLUSTER_IP),
        ["10.0.0.1:8080 10.0.0.2:8080"; 3]
    );
}

#[test]
fn endpoint_that_ends_and_does_not_serve_is_no_fallback() {
    let conditions = json!({"ready": false, "serving": false, "terminating": true});
    let endpoints = [endpoint_with(
        "10.0.0.1",
        "here",
        json!({"conditions": conditions}),
    )];
    assert_eq!(
        given("Cluster", "Cluster", &endpoints).all_meet(CLUSTER_IP),
        ["refused"; 3]
    );
}

#[test]
fn ready_endpoint_is_used_although_it_ends() {
    // As `publishNotReadyAddresses` makes them.
    let conditions = json!({"ready": true, "serving": false, "terminating": true});
    let endpoints = [endpoint_with(
        "10.0.0.1",
        "here",
        json!({"conditions": conditions}),
    )];
    let given = given("Local", "Local", &endpoints);
    assert_eq!(given.all_meet(CLUSTER_IP), ["10.0.0.1:8080"; 3]);
}

#[test]
fn endpoint_that_serves_and_does_not_end_is_never_used_unless_ready() {
    let conditions = json!({"ready": false, "serving": true, "terminating": false});
    let endpoints = [endpoint_with(
        "10.0.0.1",
        "here",
        json!({"conditions": conditions}),
    )];
    let given = given("Cluster", "Local", &endpoints);
    for at in [CLUSTER_IP, EXTERNAL_IP, NODE_PORT, LOAD_BALANCER] {
        assert_eq!(given.all_meet(at), ["refused"; 3], "{at}");
    }
}

#[test]
fn hints_for_this_node_win_if_all_ready_endpoints_have_some() {
    let hints = [
        hinted("10.0.0.1", &["here"], &["b"]),
        hinted("10.0.0.2", &["there"], &["a"]),
        hinted("10.0.0.3", &["there", "here"], &["b"]),
    ];
    assert_eq!(near(&hints), "1 3");
}

#[test]
fn hints_for_the_zone_hold_if_no_endpoint_is_for_this_node() {
    let hints = [
        hinted("10.0.0.1", &["there"], &["a"]),
        hinted("10.0.0.2", &["there"], &["b"]),
        hinted("10.0.0.3", &["there"], &["b", "a"]),
    ];
    assert_eq!(near(&hints), "1 3");
}

#[test]
fn hints_for_the_zone_hold_if_one_endpoint_has_none_for_nodes() {
    let hints = [
        hinted("10.0.0.1", &["here"], &["b"]),
        hinted("10.0.0.2", &[], &["a"]),
    ];
    assert_eq!(near(&hints), "2");
}

#[test]
fn one_ready_endpoint_without_hints_disables_the_filter() {
    let hints = [
        hinted("10.0.0.1", &["here"], &["a"]),
        hinted("10.0.0.2", &["there"], &["b"]),
        hinted("10.0.0.3", &[], &[]),
    ];
    assert_eq!(near(&hints), "1 2 3");
}

#[test]
fn hints_that_leave_nothing_disable_the_filter() {
    let hints = [
        hinted("10.0.0.1", &["there"], &["b"]),
        hinted("10.0.0.2", &["there"], &["c"]),
    ];
    assert_eq!(near(&hints), "1 2");
}

#[test]
fn only_hints_of_ready_endpoints_are_looked_at() {
    let mut unhinted = endpoint_with("10.0.0.3", "here", not_ready());
    unhinted["hints"] = json!(null);
    let mut draining = hinted("10.0.0.4", &["here"], &["a"]);
    super::merge(&mut draining, super::draining());
    let hints = [
        hinted("10.0.0.1", &[], &["a"]),
        hinted("10.0.0.2", &[], &["b"]),
        unhinted,
        draining,
    ];
    assert_eq!(near(&hints), "1");
}

#[test]
fn fallback_endpoints_are_not_filtered_by_hints() {
    let mut one = hinted("10.0.0.1", &["here"], &["a"]);
    let mut two = hinted("10.0.0.2", &["there"], &["b"]);
    super::merge(&mut one, draining());
    super::merge(&mut two, draining());
    assert_eq!(near(&[one, two]), "1 2");
}

#[test]
fn node_without_a_zone_or_with_an_empty_one_or_without_an_object_ignores_hints_for_zones() {
    let hints = [
        hinted("10.0.0.1", &[], &["a"]),
        hinted("10.0.0.2", &[], &[""]),
    ];
    let key = "topology.kubernetes.io/zone";
    let mut given = given("Cluster", "Cluster", &hints);
    let labels = given.node("here").metadata.labels.as_mut().unwrap();
    labels.insert(key.to_owned(), String::new());
    assert_eq!(given.front(CLUSTER_IP).cluster.len(), 2);

    given.node("here").metadata.labels = None;
    assert_eq!(given.front(CLUSTER_IP).cluster.len(), 2);

    given.cluster.nodes.clear();
    assert_eq!(given.front(CLUSTER_IP).cluster.len(), 2);
}

#[test]
fn traffic_distribution_and_topology_annotations_are_not_looked_at() {
    let spec = json!({"trafficDistribution": "PreferClose"});
    let annotations = json!({"annotations": {"service.kubernetes.io/topology-mode": "Disabled"}});
    let service = super::with_metadata(web(spec), annotations);
    let hints = [
        hinted("10.0.0.1", &[], &["a"]),
        hinted("10.0.0.2", &[], &["b"]),
    ];
    let given = Given::new(&[service], &[slice(&hints)]);
    assert_eq!(given.all_meet(CLUSTER_IP), ["10.0.0.1:8080"; 3]);
}

#[test]
fn local_set_is_not_filtered_by_hints() {
    let mut endpoints = [
        hinted("10.0.0.1", &["there"], &["b"]),
        hinted("10.0.0.2", &["here"], &["a"]),
    ];
    for endpoint in &mut endpoints {
        endpoint["nodeName"] = json!("here");
    }
    let given = given("Local", "Local", &endpoints);
    assert_eq!(
        given.all_meet(CLUSTER_IP),
        ["10.0.0.1:8080 10.0.0.2:8080"; 3]
    );
}

#[test]
fn local_policies_use_local_ready_endpoints_only() {
    let endpoints = [
        endpoint("10.0.0.1", "here"),
        endpoint_with("10.0.0.2", "here", draining()),
        endpoint("10.0.0.3", "there"),
    ];
    let given = given("Local", "Local", &endpoints);
    assert_eq!(given.all_meet(CLUSTER_IP), ["10.0.0.1:8080"; 3]);
    for at in EXTERNAL {
        assert_eq!(given.meets(&super::CLIENT, at), "10.0.0.1:8080", "{at}");
    }
}

#[test]
fn local_fallback_goes_before_ready_endpoints_elsewhere() {
    let endpoints = [
        endpoint_with("10.0.0.1", "here", draining()),
        endpoint("10.0.0.2", "there"),
    ];
    let given = given("Local", "Local", &endpoints);
    assert_eq!(given.all_meet(CLUSTER_IP), ["10.0.0.1:8080"; 3]);
    for at in EXTERNAL {
        let expected = ["10.0.0.2:8080", "10.0.0.2:8080", "10.0.0.1:8080"];
        assert_eq!(given.all_meet(at), expected, "{at}");
    }
}

#[test]
fn without_endpoints_anywhere_every_address_refuses_every_source() {
    for (internal, external) in [("Cluster", "Cluster"), ("Local", "Local")] {
        let given = given(
            internal,
            external,
            &[endpoint_with("10.0.0.1", "here", not_ready())],
        );
        for at in [CLUSTER_IP, EXTERNAL_IP, NODE_PORT, LOAD_BALANCER] {
            assert_eq!(given.all_meet(at), ["refused"; 3], "{at}");
        }
    }
}

#[test]
fn internal_policy_local_without_a_local_endpoint_drops_all_sources_at_the_cluster_ip() {
    let given = given("Local", "Cluster", &[endpoint("10.0.0.1", "there")]);
    assert_eq!(given.all_meet(CLUSTER_IP), ["dropped"; 3]);
}

#[test]
fn internal_policy_applies_to_the_cluster_ip_only() {
    let given = given("Local", "Cluster", &[endpoint("10.0.0.1", "there")]);
    for at in EXTERNAL {
        assert_eq!(given.all_meet(at), ["10.0.0.1:8080"; 3], "{at}");
    }
}

#[test]
fn internal_policy_local_drops_also_where_only_fallback_endpoints_are_elsewhere() {
    let given = given(
        "Local",
        "Cluster",
        &[endpoint_with("10.0.0.1", "there", draining())],
    );
    assert_eq!(given.all_meet(CLUSTER_IP), ["dropped"; 3]);
}

#[test]
fn external_policy_local_without_a_local_endpoint_drops_what_comes_from_outside() {
    let given = given("Cluster", "Local", &[endpoint("10.0.0.1", "there")]);
    for at in EXTERNAL {
        assert_eq!(given.meets(&super::CLIENT, at), "dropped", "{at}");
    }
}

#[test]
fn external_policy_local_is_short_circuited_for_pods_and_the_node() {
    let endpoints = [endpoint("10.0.0.1", "here"), endpoint("10.0.0.2", "there")];
    let given = given("Cluster", "Local", &endpoints);
    let all = "10.0.0.1:8080 10.0.0.2:8080";
    for at in EXTERNAL {
        assert_eq!(given.all_meet(at), [all, all, "10.0.0.1:8080"], "{at}");
    }
}

#[test]
fn packet_from_an_address_of_the_node_is_short_circuited() {
    let given = given("Cluster", "Local", &[endpoint("10.0.0.1", "there")]);
    for (address, expected) in [
        ("172.17.0.1", "10.0.0.1:8080"),
        ("192.168.0.2", "dropped"),
        // A pod of another node is as foreign as anybody.
        ("10.244.7.1", "dropped"),
    ] {
        let source = crate::reference::Source::Outside(super::ip(address));
        assert_eq!(given.meets(&source, LOAD_BALANCER), expected, "{address}");
    }
}

#[test]
fn short_circuit_heeds_hints() {
    let hints = [
        hinted("10.0.0.1", &[], &["a"]),
        hinted("10.0.0.2", &[], &["b"]),
    ];
    let given = given("Cluster", "Local", &hints);
    assert_eq!(given.meets(&super::POD, LOAD_BALANCER), "10.0.0.1:8080");
}
