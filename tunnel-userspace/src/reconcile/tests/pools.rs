//! Services that keep to this node or its node pool.

use super::*;
use crate::model::{KeepTo, NODE_POOL, Node};

fn adopt_honouring() -> Reconciler<Memory> {
    let settings = Settings {
        topology_keys: TopologyKeys::Honour,
        ..settings()
    };
    adopt_with(Memory::new(ROOMY), settings)
}

/// A Service with an endpoint on each of the nodes `node-a`, `node-b` and `node-c`, the last octet of
/// whose address is 1, 2 and 3.
fn keeping(vip: u8, keep_to: Option<KeepTo>) -> ServiceState {
    let mut state = state("web", vip, &BTreeSet::from([1, 2, 3]));
    Arc::make_mut(&mut state.service).keep_to = keep_to;
    let slice = Arc::make_mut(&mut state.slices[0]);
    for (endpoint, node) in slice
        .endpoints
        .iter_mut()
        .zip(["node-a", "node-b", "node-c"])
    {
        endpoint.node = Some(node.into());
    }
    state
}

fn node(name: &str, pool: Option<&str>) -> (ObjectName, Option<Arc<Node>>) {
    let label = |pool: &str| (NODE_POOL.to_owned(), pool.to_owned());
    fixture::told(Node {
        labels: pool.map(label).into_iter().collect(),
        ..fixture::node(name)
    })
}

fn move_nodes(reconciler: &mut Reconciler<Memory>, nodes: Vec<(ObjectName, Option<Arc<Node>>)>) {
    reconciler.update(Update {
        nodes,
        ..update(Vec::new())
    });
}

#[test]
fn a_service_follows_the_nodes_that_join_and_leave_its_pool() {
    let mut reconciler = adopt_honouring();
    let web = keeping(1, Some(KeepTo::Pool));
    let nodes = vec![node("node-a", Some("edge")), node("node-b", Some("edge"))];
    reconciler.update(Update {
        nodes,
        ..update(vec![("web", Some(web)), set("other", 2, &[4])])
    });
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));

    move_nodes(&mut reconciler, vec![node("node-c", Some("edge"))]);
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 2, 3]));

    // This node's own pool.
    move_nodes(&mut reconciler, vec![node("node-a", Some("cloud"))]);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));

    move_nodes(
        &mut reconciler,
        vec![
            (ObjectName::new("", "node-b"), None),
            node("node-a", Some("edge")),
        ],
    );
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1, 3]));
}

#[test]
fn endpoints_that_are_kept_away_are_shown_with_the_reason() {
    let mut reconciler = adopt_honouring();
    apply(
        &mut reconciler,
        vec![("web", Some(keeping(1, Some(KeepTo::Node))))],
    );

    let shown = reconciler.services(Some("web")).remove(0).ports.remove(0);
    let whys: Vec<&str> = shown.endpoints.iter().map(|it| &*it.why).collect();
    let away = "not used: openyurt.io/topologyKeys lead this node elsewhere";
    assert_eq!(whys, ["used: ready", away, away]);
}
