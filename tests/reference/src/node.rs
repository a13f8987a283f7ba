//! Fields of Node objects (contract §1, "Node").

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node, NodeAddress};

use super::{
    Cluster, LocalNode,
    address::{Family, parse},
    objects,
};

/// Returns the node's zone, taken from the label on its Node object; an empty label counts as none.
pub(super) fn zone<'a>(cluster: &'a Cluster, here: &LocalNode) -> Option<&'a str> {
    let node = own(cluster, here)?;
    let zone = objects::label(&node.metadata, "topology.kubernetes.io/zone");
    zone.filter(|zone| !zone.is_empty())
}

/// Returns the node's primary address in an address family: the first `InternalIP`, unless that is a loopback
/// address (see newProxyServer in kube-proxy's `cmd/kube-proxy/app/server.go`).
pub(super) fn primary(cluster: &Cluster, here: &LocalNode, family: Family) -> Option<IpAddr> {
    let node = own(cluster, here)?;
    let internal = addresses(node).filter(|address| address.type_ == "InternalIP");
    let mut parsed = internal.filter_map(|address| parse(&address.address));
    let first = parsed.find(|address| Family::of(*address) == family);
    first.filter(|address| !address.is_loopback())
}

/// Returns all addresses in a Node object, whatever their type.
pub(super) fn addresses(node: &Node) -> impl Iterator<Item = &NodeAddress> {
    let status = node.status.as_ref();
    let addresses = status.and_then(|status| status.addresses.as_ref());
    addresses.into_iter().flatten()
}

pub(super) fn own<'a>(cluster: &'a Cluster, here: &LocalNode) -> Option<&'a Node> {
    let mut nodes = cluster.nodes.iter();
    nodes.find(|node| node.metadata.name.as_ref() == Some(&here.node))
}
