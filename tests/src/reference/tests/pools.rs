//! What OpenYurt keeps from a node.

use super::*;

const HOSTNAME: &str = "kubernetes.io/hostname";
const NODE_POOL: &str = "openyurt.io/nodepool";
const ZONE: &str = "kubernetes.io/zone";

/// `web` with endpoints on `here`, `there`, on a node that has no object, and on none.
fn given(keys: &str, spec: Value) -> Given {
    let annotations = json!({"annotations": {"openyurt.io/topologyKeys": keys}});
    let mut homeless = endpoint("10.244.0.4", "");
    homeless["nodeName"] = Value::Null;
    let endpoints = [
        endpoint("10.244.0.1", "here"),
        endpoint("10.244.0.2", "there"),
        endpoint("10.244.0.3", "gone"),
        homeless,
    ];
    let web = with_metadata(web(spec), annotations);
    let mut given = Given::new(&[web], &[slice(&endpoints)]);
    given.here.topology_keys = TopologyKeys::Honour;
    given
}

fn set_pool(given: &mut Given, node: &str, pool: &str) {
    let labels = given.node(node).metadata.labels.get_or_insert_default();
    labels.insert("apps.openyurt.io/nodepool".to_owned(), pool.to_owned());
}

const ALL: &str = "10.244.0.1:8080 10.244.0.2:8080 10.244.0.3:8080 10.244.0.4:8080";

#[test]
fn the_host_name_keeps_to_this_node() {
    let given = given(HOSTNAME, json!({}));
    assert_eq!(given.meets(&POD, "10.96.0.1:80"), "10.244.0.1:8080");
}

#[test]
fn node_pool_and_zone_keep_to_the_pool_and_without_one_to_this_node() {
    for keys in [NODE_POOL, ZONE] {
        let mut given = given(keys, json!({}));
        let meets = |given: &Given| given.meets(&POD, "10.96.0.1:80");
        set_pool(&mut given, "there", "edge");
        assert_eq!(meets(&given), "10.244.0.1:8080");

        set_pool(&mut given, "here", "edge");
        assert_eq!(meets(&given), "10.244.0.1:8080 10.244.0.2:8080");

        set_pool(&mut given, "there", "cloud");
        assert_eq!(meets(&given), "10.244.0.1:8080");

        // An empty label is no pool, that others could be in too.
        set_pool(&mut given, "here", "");
        set_pool(&mut given, "there", "");
        assert_eq!(meets(&given), "10.244.0.1:8080");
    }
}

#[test]
fn anything_else_keeps_nothing_away_nor_does_anything_where_it_is_ignored() {
    for keys in ["", "*", " kubernetes.io/hostname", "kubernetes.io/zone,*"] {
        assert_eq!(given(keys, json!({})).meets(&POD, "10.96.0.1:80"), ALL);
    }
    let mut given = given(HOSTNAME, json!({}));
    given.here.topology_keys = TopologyKeys::Ignore;
    assert_eq!(given.meets(&POD, "10.96.0.1:80"), ALL);
}

#[test]
fn what_is_kept_away_is_not_there_for_any_rule() {
    let mut given = given(HOSTNAME, json!({"internalTrafficPolicy": "Local"}));
    given.here.node = "there".to_owned();
    assert_eq!(given.meets(&POD, "10.96.0.1:80"), "10.244.0.2:8080");

    // Without a filter the policy would drop: there are endpoints elsewhere.
    given.here.node = "nowhere".to_owned();
    assert_eq!(given.meets(&POD, "10.96.0.1:80"), "refused");
}
