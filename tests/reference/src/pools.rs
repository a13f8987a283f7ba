//! Which endpoints OpenYurt keeps from a node: what yurthub's filter `servicetopology` leaves of a
//! slice, before kube-proxy sees it (openyurt `pkg/yurthub/filter/servicetopology/filter.go`).

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};

use super::{Cluster, Here, TopologyKeys, node, objects};

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
        endpoints.retain(|it| {
            it.node_name
                .as_ref()
                .is_some_and(|node| nodes.contains(node))
        });
    }
    slice
}

/// The nodes whose endpoints pass; nothing where all endpoints do (`serviceTopologyHandler`).
fn nodes_let_pass(cluster: &Cluster, here: &Here, slice: &EndpointSlice) -> Option<Vec<String>> {
    if here.topology_keys == TopologyKeys::Ignore {
        return None;
    }
    let annotations = owner(cluster, slice)?.metadata.annotations.as_ref()?;
    let only_here = vec![here.node.clone()];
    match annotations.get(TOPOLOGY_KEYS)?.as_str() {
        "kubernetes.io/hostname" => Some(only_here),
        // `nodePoolTopologyHandler`: a node of no pool falls back to itself.
        "openyurt.io/nodepool" | "kubernetes.io/zone" => {
            let pool = node::own(cluster, here).and_then(pool);
            Some(pool.map_or(only_here, |pool| members(cluster, pool)))
        }
        _ => None,
    }
}

/// The Service that the label of a slice names (`resolveServiceTopologyType`).
fn owner<'a>(cluster: &'a Cluster, slice: &EndpointSlice) -> Option<&'a Service> {
    let name = objects::label(&slice.metadata, objects::SERVICE_NAME);
    let mut services = cluster.services.iter();
    services.find(|service| {
        service.metadata.namespace == slice.metadata.namespace
            && service.metadata.name.as_deref() == name
    })
}

/// The pool of a Node, by its label; an empty one is none.
fn pool(node: &Node) -> Option<&str> {
    objects::label(&node.metadata, NODE_POOL).filter(|pool| !pool.is_empty())
}

/// The names of the Nodes in a pool.
fn members(cluster: &Cluster, of: &str) -> Vec<String> {
    let members = cluster.nodes.iter().filter(|node| pool(node) == Some(of));
    let names = members.filter_map(|node| node.metadata.name.clone());
    names.collect()
}
