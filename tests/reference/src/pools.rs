//! Which endpoints OpenYurt keeps from a node: what yurthub's filter `servicetopology` leaves of a
//! slice, before kube-proxy sees it (openyurt `pkg/yurthub/filter/servicetopology/filter.go`).

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};

use super::{Cluster, Here, TopologyKeys, node};

const TOPOLOGY_KEYS: &str = "openyurt.io/topologyKeys";
const NODE_POOL: &str = "apps.openyurt.io/nodepool";

/// A slice with the endpoints that the filter lets pass.
pub(super) fn passed(cluster: &Cluster, here: &Here, slice: &EndpointSlice) -> EndpointSlice {
    let mut slice = slice.clone();
    let Some(nodes) = nodes_let_pass(cluster, here, &slice) else {
        return slice;
    };
    if let Some(endpoints) = &mut slice.endpoints {
        // An endpoint without a node is let pass by no list of nodes.
        endpoints.retain(|endpoint| {
            let node = endpoint.node_name.as_ref();
            node.is_some_and(|node| nodes.contains(node))
        });
    }
    slice
}

/// The nodes whose endpoints pass; nothing where all endpoints do (`serviceTopologyHandler`).
fn nodes_let_pass(cluster: &Cluster, here: &Here, slice: &EndpointSlice) -> Option<Vec<String>> {
    match here.topology_keys {
        TopologyKeys::Ignore => return None,
        TopologyKeys::Honour => {}
    }
    let annotations = owner(cluster, slice)?.metadata.annotations.as_ref()?;
    let only_here = vec![here.node.clone()];
    match annotations.get(TOPOLOGY_KEYS)?.as_str() {
        "kubernetes.io/hostname" => Some(only_here),
        "openyurt.io/nodepool" | "kubernetes.io/zone" => {
            // `nodePoolTopologyHandler`: a node of no pool falls back to itself.
            Some(
                node::own(cluster, here)
                    .and_then(pool)
                    .map_or(only_here, |pool| members(cluster, pool)),
            )
        }
        _ => None,
    }
}

/// The Service that the label of a slice names (`resolveServiceTopologyType`).
fn owner<'a>(cluster: &'a Cluster, slice: &EndpointSlice) -> Option<&'a Service> {
    let name = slice
        .metadata
        .labels
        .as_ref()?
        .get("kubernetes.io/service-name")?;
    let mut services = cluster.services.iter();
    services.find(|service| {
        service.metadata.namespace == slice.metadata.namespace
            && service.metadata.name.as_ref() == Some(name)
    })
}

/// The pool of a Node, by its label; an empty one is none.
fn pool(node: &Node) -> Option<&str> {
    let pool = node.metadata.labels.as_ref()?.get(NODE_POOL)?;
    Some(pool.as_str()).filter(|pool| !pool.is_empty())
}

/// The names of the Nodes in a pool.
fn members(cluster: &Cluster, of: &str) -> Vec<String> {
    let members = cluster.nodes.iter().filter(|node| pool(node) == Some(of));
    members
        .filter_map(|node| node.metadata.name.clone())
        .collect()
}
