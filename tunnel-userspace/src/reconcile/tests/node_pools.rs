//! Services that are restricted to endpoints on this node or in its node pool.

use super::*;
use crate::model::{EndpointScope, NODE_POOL_LABEL};

fn adopt_honouring() -> Reconciler<Memory> {
    let settings = PlanSettings {
        topology_keys: TopologyKeys::Honor,
        ..settings()
    };
    adopt_with(Memory::new(ROOMY), settings)
}

/// Returns a Service with one endpoint on each of the nodes `node-a`, `node-b` and `node-c`. The endpoints'
/// addresses end in 1, 2 and 3, respectively.
fn restricted_service(vip: u8, keep_to: EndpointScope) -> Change<'static> {
    let mut state = state("web", vip, &BTreeSet::from([1, 2, 3]));
    Arc::make_mut(&mut state.service).endpoint_scope = Some(keep_to);
    let slice = Arc::make_mut(&mut state.slices[0]);
    let endpoints = slice.endpoints.iter_mut();
    for (endpoint, node) in endpoints.zip(["node-a", "node-b", "node-c"]) {
        endpoint.node = Some(node.into());
    }
    ("web", Some(state))
}

fn node(name: &str, pool: &str) -> (ObjectName, Option<Arc<Node>>) {
    fixture::node_update(Node {
        labels: BTreeMap::from([(NODE_POOL_LABEL.to_owned(), pool.to_owned())]),
        ..fixture::node(name)
    })
}

#[test]
fn a_service_follows_the_nodes_that_join_and_leave_its_pool() {
    let mut reconciler = adopt_honouring();
    let nodes = vec![node("node-a", "edge"), node("node-b", "edge")];
    reconciler.update(ClusterUpdate {
        nodes,
        ..update(vec![
            restricted_service(1, EndpointScope::Pool),
            set("other", 2, &[4]),
        ])
    });
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));

    apply_nodes(&mut reconciler, vec![node("node-c", "edge")]);
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2, 3]));

    // This node moves to another pool.
    apply_nodes(&mut reconciler, vec![node("node-a", "cloud")]);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));

    let removed = (ObjectName::new("", "node-b"), None);
    apply_nodes(&mut reconciler, vec![removed, node("node-a", "edge")]);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 3]));
}

#[test]
fn endpoints_excluded_by_topology_keys_have_this_reason() {
    let mut reconciler = adopt_honouring();
    apply(
        &mut reconciler,
        vec![restricted_service(1, EndpointScope::Node)],
    );

    let port = services(&reconciler, Some("web")).remove(0).ports.remove(0);
    let statuses: Vec<&str> = port.endpoints.iter().map(|it| &*it.status).collect();
    let excluded = "inactive: openyurt.io/topologyKeys select other endpoints for this node";
    assert_eq!(statuses, ["active: ready", excluded, excluded]);
}
