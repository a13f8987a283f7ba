//! Counts service ports that have traffic policy `Local` but no endpoint on this node, for metrics.

use tunnel_common::service::Membership;

use super::{FrontendKind, PortPlan, ServicePlan};
use crate::model::{PerFamily, TrafficPolicy};

/// The number of service ports with traffic policy `Local` that have endpoints, but none on this node
/// (kube-proxy's `sync_proxy_rules_no_local_endpoints_total`).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NoLocalEndpoints {
    /// Service ports with `internalTrafficPolicy: Local`.
    pub internal: usize,
    /// Service ports with `externalTrafficPolicy: Local`.
    pub external: usize,
}

/// Counts, by family, a Service's ports with traffic policy `Local` that have endpoints, but none on this
/// node.
#[must_use]
pub fn count_no_local_endpoints(plan: &ServicePlan) -> PerFamily<NoLocalEndpoints> {
    let mut counts = PerFamily::<NoLocalEndpoints>::default();
    for (name, port) in plan {
        let counts = counts.get_mut(name.family);
        counts.internal += usize::from(has_no_local_endpoints(port, true));
        counts.external += usize::from(has_no_local_endpoints(port, false));
    }
    counts
}

fn has_no_local_endpoints(port: &PortPlan, is_internal: bool) -> bool {
    let mut frontends = port.frontends.values();
    let is_local = frontends.any(|frontend| {
        (frontend.kind == FrontendKind::ClusterIp) == is_internal
            && frontend.packet_policy == TrafficPolicy::Local
    });
    is_local && port.has_endpoints && !port.endpoints.has_any_in(Membership::LOCAL)
}
