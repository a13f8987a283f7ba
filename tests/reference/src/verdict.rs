//! What a new connection to a front meets (contract 4 and 6a).

use std::net::IpAddr;

use super::{Front, Here, Kind, Policy, Set, address::Family};

/// Who opens a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// A socket of the node itself, or of a pod in its network namespace.
    NodeSocket,
    /// A socket of a pod of this node, which has the address.
    PodSocket(IpAddr),
    /// A packet that came to the node from this address. One of the node's own is taken for the
    /// node (contract 4, "source is the node (type LOCAL)").
    Outside(IpAddr),
}

/// What a new connection meets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// One of these endpoints.
    To(Set),
    /// REJECT.
    Refused,
    /// Silence.
    Dropped,
    /// The front is not there for this source: loopback is each network namespace's own.
    Untouched,
}

/// What a new connection from a source to a front meets, on the node that the front is of.
#[must_use]
pub fn verdict(front: &Front, source: &Source, here: &Here) -> Verdict {
    if is_foreign_loopback(front, source) {
        return Verdict::Untouched;
    }
    // Contract 6a, "no endpoints": the ranges come first, then the lack of endpoints.
    if !is_admitted(front, source, here) {
        return Verdict::Dropped;
    }
    // Contract 4.6: any usable endpoint on any node. The cluster set is never empty then: hints only
    // apply where they leave something.
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

/// A pod's 127.0.0.1 is its own, and no packet comes to it from outside.
fn is_foreign_loopback(front: &Front, source: &Source) -> bool {
    match source {
        Source::NodeSocket => false,
        Source::PodSocket(_) | Source::Outside(_) => front.address.is_loopback(),
    }
}

/// Contract 4, the rows about short-circuits: the external policy Local is not applied to sources on
/// this node; the internal one is applied to all.
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

/// Contract 6a, "match", "pods" and "node".
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

/// Contract 6a, "node": if the node is in the ranges, the Service's load balancer addresses are
/// admitted as sources too.
fn is_admitted_vip(front: &Front, address: IpAddr) -> bool {
    let admits_node = front.node_ip.is_some_and(|node| in_ranges(front, node));
    admits_node && front.load_balancer_ips.contains(&address)
}

fn in_ranges(front: &Front, address: IpAddr) -> bool {
    let mut ranges = front.source_ranges.iter();
    ranges.any(|range| range.contains(address))
}

/// The address that the node's own packets to a front come from: the front's, if an interface holds
/// it, as the kernel then takes the destination for the source; else the primary one; else, routes
/// being unknown here, the first of the family that is not loopback.
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
