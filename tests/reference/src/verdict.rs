//! The result of a new connection to a frontend (contract 4 and 6a).

use std::net::IpAddr;

use super::{Front, Here, Kind, Policy, Set, address::Family};

/// The origin of a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// A socket of the node itself, or of a pod in its network namespace.
    NodeSocket,
    /// A socket of a pod on this node, with the pod's address.
    PodSocket(IpAddr),
    /// A packet that arrived at the node from this address. If it is one of the node's own addresses, the
    /// source counts as the node (contract 4, "source is the node (type LOCAL)").
    Outside(IpAddr),
}

/// The result of a new connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Connected to one of these endpoints.
    To(Set),
    /// Refused at once, as by the nftables verdict REJECT.
    Refused,
    /// Dropped without an answer.
    Dropped,
    /// Not translated, since loopback frontends exist only in the node's network namespace.
    Untouched,
}

/// Decides on a new connection from a source to a frontend.
#[must_use]
pub fn verdict(front: &Front, source: &Source, here: &Here) -> Verdict {
    if is_foreign_loopback(front, source) {
        return Verdict::Untouched;
    }
    // Contract 6a, "no endpoints": the source ranges are checked before the endpoints.
    if !is_admitted(front, source, here) {
        return Verdict::Dropped;
    }
    // Contract 4.6: the cluster set is empty only if no node has a usable endpoint, since hints are ignored
    // if they select none.
    if front.cluster.is_empty() {
        return Verdict::Refused;
    }
    let set = match policy_for(front, source, here) {
        Policy::Cluster => &front.cluster,
        Policy::Local => &front.local,
    };
    if set.is_empty() {
        return Verdict::Dropped;
    }
    Verdict::To(set.clone())
}

/// True for a loopback frontend that is dialled from another network namespace, where 127.0.0.1 belongs to
/// the pod.
fn is_foreign_loopback(front: &Front, source: &Source) -> bool {
    match source {
        Source::NodeSocket => false,
        Source::PodSocket(_) | Source::Outside(_) => front.address.is_loopback(),
    }
}

/// Returns the policy that applies to a source (contract 4, short-circuits): the external policy Local does
/// not apply to sources on this node; the internal policy applies to all sources.
fn policy_for(front: &Front, source: &Source, here: &Here) -> Policy {
    let is_on_this_node = match source {
        Source::NodeSocket | Source::PodSocket(_) => true,
        Source::Outside(address) => is_own(*address, here),
    };
    if front.kind != Kind::ClusterIp && is_on_this_node {
        return Policy::Cluster;
    }
    front.policy
}

fn is_own(address: IpAddr, here: &Here) -> bool {
    here.addresses.contains(&address)
}

/// True if the source ranges permit a source (contract 6a, "match", "pods" and "node").
fn is_admitted(front: &Front, source: &Source, here: &Here) -> bool {
    if front.source_ranges.is_empty() {
        return true;
    }
    let address = match source {
        Source::NodeSocket => node_source(front, here),
        Source::PodSocket(address) | Source::Outside(address) => Some(*address),
    };
    let Some(address) = address else {
        return false;
    };
    in_ranges(front, address) || is_admitted_vip(front, address)
}

/// True if the source address is a load balancer address of the Service, and the ranges permit the node
/// (contract 6a, "node").
fn is_admitted_vip(front: &Front, address: IpAddr) -> bool {
    let admits_node = front.node_ip.is_some_and(|node| in_ranges(front, node));
    admits_node && front.load_balancer_ips.contains(&address)
}

fn in_ranges(front: &Front, address: IpAddr) -> bool {
    let mut ranges = front.source_ranges.iter();
    ranges.any(|range| range.contains(address))
}

/// Returns the source address of the node's own packets to a frontend. If the node has the frontend's
/// address, the kernel uses it as source, too. Otherwise it is the primary address. If there is none, it is
/// the first non-loopback address of the family, since the model does not know routes.
fn node_source(front: &Front, here: &Here) -> Option<IpAddr> {
    if is_own(front.address, here) {
        return Some(front.address);
    }
    if front.node_ip.is_some() {
        return front.node_ip;
    }
    let mut own = here.addresses.iter().copied();
    own.find(|address| Family::of(*address) == Family::of(front.address) && !address.is_loopback())
}
