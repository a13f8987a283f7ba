use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;
use serde_json::json;

use super::*;
pub(super) use crate::model::fixture::ip;
use crate::model::{ConfigMap, EndpointSlice, Node, Service, ServiceCidr, fixture};

pub(super) fn service(spec: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": "shop"}, "spec": spec,
    })
}

pub(super) fn slice(ports: Value, endpoints: Value) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4", "ports": ports, "endpoints": endpoints,
    })
}

pub(super) fn http() -> Value {
    json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]})
}

/// Returns the manifest with the value at a JSON pointer replaced.
pub(super) fn with(mut manifest: Value, pointer: &str, value: Value) -> Value {
    let (parent, field) = pointer.rsplit_once('/').expect("a pointer");
    let parent = manifest.pointer_mut(parent).and_then(Value::as_object_mut);
    parent
        .expect("the field's parent")
        .insert(field.to_owned(), value);
    manifest
}

pub(super) fn object(manifest: Value) -> Object {
    let parsed = parse(manifest).expect("a good manifest");
    let Manifest::Object(ParsedObject { object, .. }) = parsed else {
        panic!("no object: {parsed:?}")
    };
    object
}

pub(super) fn a_service(manifest: Value) -> Arc<Service> {
    let object = object(manifest);
    let Object::Service(service) = object else {
        panic!("no Service: {object:?}")
    };
    service
}

pub(super) fn a_slice(manifest: Value) -> Arc<EndpointSlice> {
    let object = object(manifest);
    let Object::EndpointSlice(slice) = object else {
        panic!("no slice: {object:?}")
    };
    slice
}

#[track_caller]
pub(super) fn assert_skipped(manifest: Value) {
    let parsed = parse(manifest).expect("a good manifest");
    assert!(matches!(parsed, Manifest::Skipped(_)), "{parsed:?}");
}

/// Returns the errors in a manifest's ignored fields.
#[track_caller]
pub(super) fn ignored(manifest: Value) -> Vec<String> {
    let parsed = parse(manifest).expect("a good manifest");
    let Manifest::Object(ParsedObject { ignored, .. }) = parsed else {
        panic!("no object: {parsed:?}")
    };
    ignored.iter().map(ToString::to_string).collect()
}

/// Asserts that a manifest is rejected with the error `wrong`, which names the field.
#[track_caller]
pub(super) fn assert_refused(manifest: Value, wrong: &str) {
    let refused = parse(manifest).expect_err("refused");
    assert_eq!(refused.field_error.to_string(), wrong);
}

/// Asserts, for each row of the form `JSON => error`, that the manifest that `make` builds from the JSON is
/// rejected with the error.
#[track_caller]
pub(super) fn assert_all_refused(make: impl Fn(Value) -> Value, rows: &[&str]) {
    for row in rows {
        let (json, wrong) = row.split_once(" => ").expect("a row");
        let value = serde_json::from_str(json).expect("JSON");
        let refused = parse(make(value)).expect_err(row);
        assert_eq!(refused.field_error.to_string(), wrong, "{row}");
    }
}

#[test]
fn a_namespaced_object_without_a_namespace_is_in_default() {
    let manifest = with(service(http()), "/metadata", json!({"name": "web"}));

    assert_eq!(a_service(manifest).name, ObjectName::new("default", "web"));
}

#[test]
fn a_node_is_read_with_its_internal_addresses() {
    let manifest = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "edge-1", "namespace": "ignored", "labels": {"zone": "a"}},
        "status": {"addresses": [
            {"type": "Hostname", "address": "edge-1"},
            {"type": "InternalIP", "address": "192.168.1.07"},
            {"type": "InternalIP", "address": "not an address"},
            {"type": "ExternalIP", "address": "203.0.113.1"},
            {"type": "InternalIP", "address": "fd00::7"},
        ]},
    });

    assert_eq!(
        object(manifest),
        Object::Node(Arc::new(Node {
            labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
            internal_ips: vec![ip("192.168.1.7"), ip("fd00::7")],
            other_ips: vec![ip("203.0.113.1")],
            ..fixture::node("edge-1")
        }))
    );
}

#[test]
fn the_pod_ranges_of_a_node_are_read_and_invalid_ones_are_ignored() {
    let ranges = |spec: Value| {
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "spec": spec,
        });
        let Manifest::Object(ParsedObject {
            object: Object::Node(node),
            ignored,
        }) = parse(node).expect("a node")
        else {
            panic!("no Node")
        };
        (node.pod_cidrs.clone(), ignored)
    };

    let both = json!({"podCIDR": "10.1.2.0/24", "podCIDRs": ["10.1.2.0/24", "fd00:2::/64"]});
    let wanted = vec![(ip("10.1.2.0"), 24), (ip("fd00:2::"), 64)];
    assert_eq!(ranges(both), (wanted, Vec::new()));
    let one = json!({"podCIDR": "10.1.2.0/24"});
    assert_eq!(ranges(one).0, [(ip("10.1.2.0"), 24)]);
    assert_eq!(ranges(json!({"podCIDR": ""})), (Vec::new(), Vec::new()));
    let (valid, ignored) = ranges(json!({"podCIDRs": ["10.1.2.0/33", "10.1.2.0/24"]}));
    assert_eq!(valid, [(ip("10.1.2.0"), 24)]);
    assert_eq!(ignored[0].field, "spec.podCIDRs[0]");
}

#[test]
fn a_pod_is_read_only_while_it_has_addresses_of_its_own() {
    let pod = |spec: Value, status: Value| {
        let manifest = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web-1", "namespace": "shop"}, "spec": spec, "status": status,
        });
        let Manifest::Object(ParsedObject {
            object: Object::Pod(pod),
            ignored,
        }) = parse(manifest).expect("a Pod")
        else {
            return None;
        };
        Some((pod.ips.clone(), ignored.len()))
    };
    let status =
        |phase: &str| json!({"phase": phase, "podIPs": [{"ip": "10.1.0.5"}, {"ip": "fd00::5"}]});
    let spec = || json!({"nodeName": "node-a", "containers": []});

    let both = vec![ip("10.1.0.5"), ip("fd00::5")];
    assert_eq!(pod(spec(), status("Running")), Some((both, 0)));
    assert_eq!(pod(spec(), status("Succeeded")), None);
    assert_eq!(pod(spec(), status("Failed")), None);
    assert_eq!(pod(spec(), json!({"phase": "Pending"})), None);
    assert_eq!(pod(json!({"containers": []}), status("Pending")), None);
    let host = json!({"nodeName": "node-a", "hostNetwork": true, "containers": []});
    assert_eq!(pod(host, status("Running")), None);
    let partly = json!({"podIPs": [{"ip": "127.0.0.1"}, {"ip": "10.1.0.5"}]});
    assert_eq!(pod(spec(), partly), Some((vec![ip("10.1.0.5")], 1)));
}

#[test]
fn a_node_that_is_being_removed_gets_no_traffic_from_load_balancers() {
    let eligible = |extra: Value, pointer: &str| {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
        let object = object(with(node, pointer, extra));
        let Object::Node(node) = object else {
            panic!("no Node: {object:?}")
        };
        node.eligible
    };
    let taint = |key: &str| json!({"taints": [{"key": key, "effect": "NoSchedule"}]});

    assert!(eligible(taint("other"), "/spec"));
    assert!(!eligible(taint("ToBeDeletedByClusterAutoscaler"), "/spec"));
    let deleted = json!("2024-05-01T10:00:00Z");
    assert!(!eligible(deleted, "/metadata/deletionTimestamp"));
}

#[test]
fn a_config_map_is_read_with_its_text() {
    let manifest = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "settings", "namespace": "kube-system"}, "data": {"a": "1"},
    });
    let expected = ConfigMap {
        name: ObjectName::new("kube-system", "settings"),
        data: BTreeMap::from([("a".to_owned(), "1".to_owned())]),
    };

    let read = object(manifest.clone());
    assert_eq!(read, Object::ConfigMap(Arc::new(expected)));
    let wrong = "data.a: is the integer 1, but must be a string";
    assert_refused(with(manifest, "/data", json!({"a": 1})), wrong);
}

#[test]
fn a_service_cidr_is_parsed_in_both_versions() {
    for version in ["v1", "v1beta1"] {
        let manifest = json!({
            "apiVersion": format!("networking.k8s.io/{version}"), "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.1/12", "fd00::/112"]},
        });
        let expected = ServiceCidr {
            name: ObjectName::new("", "kubernetes"),
            cidrs: vec![(ip("10.96.0.0"), 12), (ip("fd00::"), 112)],
        };

        let read = object(manifest.clone());
        assert_eq!(read, Object::ServiceCidr(Arc::new(expected)));
        let wrong = "spec.cidrs[1]: \"10.96.0.0\" is not an address with a prefix length, such \
                     as 10.0.0.0/8";
        let cidrs = json!(["10.96.0.0/12", "10.96.0.0"]);
        assert_refused(with(manifest, "/spec/cidrs", cidrs), wrong);
    }
}

#[test]
fn an_unsupported_version_of_a_known_kind_is_refused() {
    let old = json!("discovery.k8s.io/v1beta1");
    let old = with(slice(json!([]), json!([])), "/apiVersion", old);

    let refused = parse(old).expect_err("refused");

    assert_eq!(
        refused.to_string(),
        "EndpointSlice shop/web-1: apiVersion: \"discovery.k8s.io/v1beta1\" is not supported for \
         EndpointSlice; use discovery.k8s.io/v1"
    );
    let version = |version: Value| with(service(http()), "/apiVersion", version);
    let rows = [
        r#""apps/v1" => apiVersion: "apps/v1" is not supported for Service; use v1"#,
        "null => apiVersion: is required",
    ];
    assert_all_refused(version, &rows);
}

#[test]
fn unknown_kinds_and_kinds_of_other_api_groups_are_named() {
    for name in [
        "apps/v1 Deployment",
        "serving.knative.dev/v1 Service",
        "v1 SecretList",
        "Thing",
    ] {
        let (version, kind) = name.split_once(' ').unwrap_or(("", name));
        let parsed = parse(json!({"apiVersion": version, "kind": kind, "metadata": 3}));
        assert_eq!(parsed, Ok(Manifest::Unknown(name.to_owned())));
    }
}

#[test]
fn a_manifest_without_a_valid_name_is_refused_without_an_id() {
    let rows = [
        "[1] => manifest: is a list, but must be an object",
        r#""text" => manifest: is a string, but must be an object"#,
        r#"{"apiVersion": "v1"} => kind: is required"#,
        r#"{"apiVersion": "v1", "kind": 7} => kind: is a number, but must be a string"#,
        r#"{"apiVersion": 1, "kind": "Node"} => apiVersion: is a number, but must be a string"#,
    ];
    assert_all_refused(|manifest| manifest, &rows);
    let named = |metadata| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    let name = "is not a valid name: use at most 253 lower-case letters, digits, '-' or '.'";
    let rows = [
        "null => metadata.name: is required",
        "1 => metadata: is a number, but must be an object",
        r#"{"name": ""} => metadata.name: is required"#,
        r#"{"name": 1} => metadata.name: is a number, but must be a string"#,
        &format!(r#"{{"name": "A/b"}} => metadata.name: "A/b" {name}"#),
        &format!(r#"{{"name": "a", "namespace": "a b"}} => metadata.namespace: "a b" {name}"#),
    ];
    assert_all_refused(named, &rows);
    assert_eq!(parse(named(json!(1))).expect_err("refused").id, None);
}

#[test]
fn items_of_a_typed_list_get_the_kind_of_the_list() {
    let item = json!({"metadata": {"name": "web"}, "spec": http()});
    let list = json!({"apiVersion": "v1", "kind": "ServiceList", "items": [item]});

    let Ok(Manifest::List(mut items)) = parse(list) else {
        panic!("no list")
    };

    let service = a_service(items.pop().expect("an item"));
    assert_eq!(service.name.to_string(), "default/web");
}

#[test]
fn a_list_keeps_the_kinds_of_its_items() {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service(http()), 3]});

    let items = vec![service(http()), json!(3)];
    assert_eq!(parse(list), Ok(Manifest::List(items)));
    let empty = parse(json!({"kind": "List"}));
    assert_eq!(empty, Ok(Manifest::List(Vec::new())));
    assert_refused(
        json!({"kind": "List", "items": {}}),
        "items: is an object, but must be a list",
    );
}

/// Generates arbitrary values, some of which contain keys that occur in manifests.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "(10\\.0\\.0\\.1|IPv4|None|web|UDP|\\PC{0,8})".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 6, |inner| {
        let key = "(name|spec|ports|port|addresses|endpoints|clusterIP|cidrs|status|[a-z]{0,4})";
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::btree_map(key, inner, 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_value_makes_the_reader_panic(
        kind in "(Service|EndpointSlice|Node|ConfigMap|ServiceCIDR|List|ServiceList)",
        version in "(v1|discovery.k8s.io/v1|networking.k8s.io/v1|apps/v1)",
        body in any_value(),
        field in "(spec|status|metadata|endpoints|ports|data|items)",
    ) {
        let mut manifest = json!({
            "apiVersion": version, "kind": kind,
            "metadata": {"name": "x", "labels": {"kubernetes.io/service-name": "x"}},
            "addressType": "IPv4",
        });
        manifest[field] = body.clone();
        drop(parse(manifest));
        drop(parse(body));
    }
}
