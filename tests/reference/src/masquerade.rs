//! The connections whose backend sees the node's address instead of the client's (contract §6b).

use std::net::IpAddr;

use super::{AddressKind, Frontend, LocalNode, LocalSenders, Policy, address::Family};

/// Returns true if packets that arrived at the node from a source are masqueraded on their way from a frontend to a backend.
#[must_use]
pub fn is_masqueraded(
    frontend: &Frontend,
    source: IpAddr,
    backend: IpAddr,
    here: &LocalNode,
) -> bool {
    // The backend would get a packet from its own address.
    if source == backend {
        return true;
    }
    match frontend.kind {
        AddressKind::ClusterIp => here.masquerade_all || is_known_stranger(source, here),
        AddressKind::LoadBalancerIp | AddressKind::ExternalIp | AddressKind::NodePort => {
            frontend.policy == Policy::Cluster
        }
    }
}

/// Returns true if packets of a pod on this node, which arrive on the pod's link, are masqueraded on their way from a frontend to
/// a backend.
#[must_use]
pub fn is_pod_masqueraded(
    frontend: &Frontend,
    pod: IpAddr,
    backend: IpAddr,
    here: &LocalNode,
) -> bool {
    let is_to_cluster_ip = frontend.kind == AddressKind::ClusterIp;
    if is_to_cluster_ip && pod != backend && is_local_pod(pod, here) {
        return here.masquerade_all;
    }
    is_masqueraded(frontend, pod, backend, here)
}

/// Returns true if a pod on this node counts as local: it is behind one of the links, in a range, or not distinguished.
pub(crate) fn is_local_pod(pod: IpAddr, here: &LocalNode) -> bool {
    here.local_senders == LocalSenders::BehindLinks || !is_known_stranger(pod, here)
}

/// Returns true if senders are distinguished and the source is not local.
fn is_known_stranger(source: IpAddr, here: &LocalNode) -> bool {
    match &here.local_senders {
        LocalSenders::BehindLinks => true,
        LocalSenders::InRanges(ranges) => {
            let mut of_family = ranges
                .iter()
                .filter(|range| range.family() == Family::of(source))
                .peekable();
            of_family.peek().is_some() && !of_family.any(|range| range.contains(source))
        }
    }
}
