use super::*;
use crate::model::{Family, fixture};

fn named(name: &str) -> ObjectName {
    ObjectName::new("shop", name)
}

fn node(name: &str, pool: Option<&str>) -> (ObjectName, Node) {
    let label = |pool: &str| (NODE_POOL_LABEL.to_owned(), pool.to_owned());
    let node = Node {
        labels: pool.map(label).into_iter().collect(),
        ..fixture::node(name)
    };
    (node.name.clone(), node)
}

/// Returns the node pools as seen by node `a`. Each Node is given with its pool, or with `None` if it is in
/// no pool.
fn pools(nodes: &[(&str, Option<&str>)]) -> NodePools {
    let mut pools = NodePools::new(TopologyKeys::Honor, "a".into());
    set_nodes(&mut pools, nodes);
    pools.take_changed_services();
    pools
}

fn set_nodes(pools: &mut NodePools, nodes: &[(&str, Option<&str>)]) {
    for (name, pool) in nodes {
        let (name, node) = node(name, *pool);
        pools.set_node(&name, Some(&node));
    }
}

fn service(keep_to: Option<EndpointScope>) -> Service {
    Service {
        endpoint_scope: keep_to,
        ..Service::named(named("web"))
    }
}

/// Returns a Service with one slice per family, each with an endpoint on every one of these nodes.
fn state(keep_to: Option<EndpointScope>, nodes: &[Option<&str>]) -> ServiceState {
    let slice = |(family, net): (Family, &str)| {
        let endpoint = |(last, node): (usize, &Option<&str>)| Endpoint {
            node: node.map(Arc::from),
            ..fixture::endpoint(fixture::ip(&format!("{net}{last}")))
        };
        let endpoints = nodes.iter().enumerate().map(endpoint).collect();
        let slice = fixture::slice(net, &named("web"), family, &[], endpoints);
        Arc::new(slice)
    };
    let families = [(Family::V4, "10.1.0."), (Family::V6, "fd01::")];
    ServiceState {
        service: Arc::new(service(keep_to)),
        slices: families.into_iter().map(slice).collect(),
    }
}

#[test]
fn an_empty_label_is_no_pool() {
    assert!(pools(&[("a", Some(""))]).own_pool().is_none());
}

#[test]
fn a_service_without_an_honoured_restriction_keeps_all_endpoints() {
    let nodes = [Some("a"), Some("b"), None];
    let mut ignoring = NodePools::new(TopologyKeys::Ignore, "a".into());
    set_nodes(&mut ignoring, &[("a", Some("edge"))]);
    ignoring.set_service(&named("web"), Some(&service(Some(EndpointScope::Pool))));
    assert!(ignoring.pools.is_empty() && ignoring.pool_services.is_empty());
    for (pools, keep_to) in [(pools(&[]), None), (ignoring, Some(EndpointScope::Node))] {
        let state = state(keep_to, &nodes);
        assert!(matches!(pools.restrict(&state), Cow::Borrowed(_)));
    }
    let all_permitted = state(Some(EndpointScope::Node), &[Some("a")]);
    let restricted = pools(&[]).restrict(&all_permitted).into_owned();
    assert!(Arc::ptr_eq(&restricted.slices[0], &all_permitted.slices[0]));
}

#[test]
fn only_changes_of_the_own_pool_affect_services_restricted_to_it() {
    let nodes = [("a", Some("edge")), ("b", Some("hub")), ("c", None)];
    let mut pools = pools(&nodes);
    for (name, keep_to) in [
        ("pool", Some(EndpointScope::Pool)),
        ("node", Some(EndpointScope::Node)),
        ("all", None),
    ] {
        pools.set_service(&named(name), Some(&service(keep_to)));
    }
    let mut affects_services = |nodes: &[(&str, Option<&str>)]| {
        set_nodes(&mut pools, nodes);
        !pools.take_changed_services().is_empty()
    };
    assert!(!affects_services(&nodes));
    assert!(!affects_services(&[
        ("b", Some("cloud")),
        ("c", Some("cloud"))
    ]));
    assert!(affects_services(&[("b", Some("edge"))]));
    assert!(!affects_services(&[("b", Some("edge"))]));
    assert!(affects_services(&[("b", None)]));
    assert!(affects_services(&[("a", None)]));
    assert!(!affects_services(&[("b", Some("edge"))]));

    set_nodes(&mut pools, &[("a", Some("edge"))]);
    assert_eq!(
        pools.take_changed_services(),
        BTreeSet::from([named("pool")])
    );
    pools.set_service(&named("pool"), None);
    set_nodes(&mut pools, &[("b", None)]);
    assert!(pools.take_changed_services().is_empty());
}

#[test]
fn this_node_keeps_its_pool_while_its_object_is_deleted() {
    let mut pools = pools(&[("a", Some("edge")), ("b", Some("edge"))]);
    for name in ["a", "b"] {
        pools.set_node(&ObjectName::new("", name), None);
    }
    set_nodes(&mut pools, &[("c", Some("edge"))]);

    let pool = |node: &str| pools.pools.get(node).map(|pool| &**pool);
    assert_eq!(
        ["a", "b", "c"].map(pool),
        [Some("edge"), None, Some("edge")]
    );
}
