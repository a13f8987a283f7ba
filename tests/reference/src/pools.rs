//! OpenYurt's filter by node and node pool: yurthub's `servicetopology` removes endpoints from a slice before
//! kube-proxy reads it (see `pkg/yurthub/filter/servicetopology/filter.go` in openyurt).

use k8s_openapi::api::{
    core::v1::{Node, Service},
    discovery::v1::EndpointSlice,
};

use super::{Cluster, LocalNode, TopologyKeys, node, objects};

const TOPOLOGY_KEYS: &str = "openyurt.io/topologyKeys";
const NODE_POOL: &str = "apps.openyurt.io/nodepool";

/// Returns a copy of a slice with only the endpoints that pass the filter.
pub(super) fn filter_endpoints(
    cluster: &Cluster,
    here: &LocalNode,
    slice: &EndpointSlice,
) -> EndpointSlice {
    let mut slice = slice.clone();
    let Some(nodes) = permitted_nodes(cluster, here, &slice) else {
        return slice;
    };
    if let Some(endpoints) = &mut slice.endpoints {
        // If the filter selects nodes, an endpoint without a node name doesn't pass.
        endpoints.retain(|it| {
            it.node_name
                .as_ref()
                .is_some_and(|node| nodes.contains(node))
        });
    }
    slice
}

/// Returns the names of the nodes whose endpoints pass, or `None` if all endpoints pass (see
/// `serviceTopologyHandler`).
fn permitted_nodes(
    cluster: &Cluster,
    here: &LocalNode,
    slice: &EndpointSlice,
) -> Option<Vec<String>> {
    if here.topology_keys == TopologyKeys::Ignore {
        return None;
    }
    let annotations = owner(cluster, slice)?.metadata.annotations.as_ref()?;
    let only_here = vec![here.node.clone()];
    match annotations.get(TOPOLOGY_KEYS)?.as_str() {
        "kubernetes.io/hostname" => Some(only_here),
        // As in `nodePoolTopologyHandler`, a node without a pool uses only its own endpoints.
        "openyurt.io/nodepool" | "kubernetes.io/zone" => {
            let pool = node::own(cluster, here).and_then(pool);
            Some(pool.map_or(only_here, |pool| members(cluster, pool)))
        }
        _ => None,
    }
}

/// Returns the Service that a slice's label names (see `resolveServiceTopologyType`).
fn owner<'a>(cluster: &'a Cluster, slice: &EndpointSlice) -> Option<&'a Service> {
    let name = objects::label(&slice.metadata, objects::SERVICE_NAME);
    let mut services = cluster.services.iter();
    services.find(|service| {
        service.metadata.namespace == slice.metadata.namespace
            && service.metadata.name.as_deref() == name
    })
}

/// Returns the node pool that a Node's label names; an empty label counts as none.
fn pool(node: &Node) -> Option<&str> {
    objects::label(&node.metadata, NODE_POOL).filter(|pool| !pool.is_empty())
}

/// Returns the names of the Nodes in a node pool.
fn members(cluster: &Cluster, of: &str) -> Vec<String> {
    let members = cluster.nodes.iter().filter(|node| pool(node) == Some(of));
    let names = members.filter_map(|node| node.metadata.name.clone());
    names.collect()
}
