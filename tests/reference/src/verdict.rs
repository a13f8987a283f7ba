//! The outcome of a new connection to a frontend (contract §4 and §6a).

use std::net::IpAddr;

use super::{AddressKind, EndpointSet, Frontend, LocalNode, Policy, address::Family, masquerade};

/// The origin of a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ConnectionSource {
    /// A socket on the node itself, or in a pod that uses the node's network namespace.
    NodeSocket,
    /// A socket in a pod on this node, with the pod's address.
    PodSocket(IpAddr),
    /// A packet that arrived on the link of a pod on this node, with the pod's address.
    PodPacket(IpAddr),
    /// A packet that arrived at the node from this address. If it is one of the node's own addresses, the
    /// source counts as the node (contract §4, "source is the node (type LOCAL)").
    Outside(IpAddr),
}

/// The outcome of a new connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Connected to one of these endpoints.
    To(EndpointSet),
    /// Refused at once, as by a `reject` rule in nftables.
    Refused,
    /// Silently dropped.
    Dropped,
    /// Not translated, since loopback frontends exist only in the node's network namespace.
    Untouched,
}

/// Determines the outcome of a new connection from a source to a frontend.
#[must_use]
pub fn verdict(frontend: &Frontend, source: &ConnectionSource, here: &LocalNode) -> Verdict {
    if is_foreign_loopback(frontend, source) {
        return Verdict::Untouched;
    }
    // Contract §6a, "no endpoints": the source ranges are checked before the endpoints.
    if !is_permitted(frontend, source, here) {
        return Verdict::Dropped;
    }
    // Contract §4.6: the cluster set is empty only if no node has a usable endpoint, since hints are ignored
    // if they select none.
    if frontend.cluster.is_empty() {
        return Verdict::Refused;
    }
    let set = match policy_for(frontend, source, here) {
        Policy::Cluster => &frontend.cluster,
        Policy::Local => &frontend.local,
    };
    if set.is_empty() {
        return Verdict::Dropped;
    }
    Verdict::To(set.clone())
}

/// Returns true for a loopback frontend dialled from another network namespace, where 127.0.0.1 belongs to
/// the pod.
fn is_foreign_loopback(frontend: &Frontend, source: &ConnectionSource) -> bool {
    match source {
        ConnectionSource::NodeSocket => false,
        ConnectionSource::PodSocket(_)
        | ConnectionSource::PodPacket(_)
        | ConnectionSource::Outside(_) => frontend.address.is_loopback(),
    }
}

/// Returns the traffic policy that applies to a source (contract §4, short-circuits): the external policy
/// `Local` doesn't apply to sources on this node that count as local; the internal policy applies to all sources.
fn policy_for(frontend: &Frontend, source: &ConnectionSource, here: &LocalNode) -> Policy {
    let is_on_this_node = match source {
        ConnectionSource::NodeSocket | ConnectionSource::PodSocket(_) => true,
        ConnectionSource::PodPacket(address) => masquerade::is_local_pod(*address, here),
        ConnectionSource::Outside(address) => is_own(*address, here),
    };
    if frontend.kind != AddressKind::ClusterIp && is_on_this_node {
        return Policy::Cluster;
    }
    frontend.policy
}

fn is_own(address: IpAddr, here: &LocalNode) -> bool {
    here.addresses.contains(&address)
}

/// Returns true if the frontend's source ranges permit a source (contract §6a, "match", "pods" and "node").
fn is_permitted(frontend: &Frontend, source: &ConnectionSource, here: &LocalNode) -> bool {
    if frontend.source_ranges.is_empty() {
        return true;
    }
    let address = match source {
        ConnectionSource::NodeSocket => node_source(frontend, here),
        ConnectionSource::PodSocket(address)
        | ConnectionSource::PodPacket(address)
        | ConnectionSource::Outside(address) => Some(*address),
    };
    let Some(address) = address else {
        return false;
    };
    in_ranges(frontend, address) || is_permitted_vip(frontend, address)
}

/// Returns true if the source address is one of the Service's load balancer addresses and the ranges permit
/// the node (contract §6a, "node").
fn is_permitted_vip(frontend: &Frontend, address: IpAddr) -> bool {
    let admits_node = frontend
        .node_ip
        .is_some_and(|node| in_ranges(frontend, node));
    admits_node && frontend.load_balancer_ips.contains(&address)
}

fn in_ranges(frontend: &Frontend, address: IpAddr) -> bool {
    let mut ranges = frontend.source_ranges.iter();
    ranges.any(|range| range.contains(address))
}

/// Returns the source address of the node's own packets to a frontend. If the node has the frontend's
/// address, the kernel uses that as the source address too. Otherwise, since the model doesn't know the
/// routes, the source is the node's primary address or, if there is none, the first non-loopback address in
/// the frontend's address family.
fn node_source(frontend: &Frontend, here: &LocalNode) -> Option<IpAddr> {
    if is_own(frontend.address, here) {
        return Some(frontend.address);
    }
    if frontend.node_ip.is_some() {
        return frontend.node_ip;
    }
    let mut own = here.addresses.iter().copied();
    own.find(|address| {
        Family::of(*address) == Family::of(frontend.address) && !address.is_loopback()
    })
}
