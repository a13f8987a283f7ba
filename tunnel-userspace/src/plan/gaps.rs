//! Counts service ports without an endpoint on this node although a traffic policy is Local, for metrics.

use super::{FrontKind, PortPlan, ServicePlan};
use crate::model::{ByFamily, TrafficPolicy};

/// The number of service ports with a policy Local that have endpoints, but none on this node (kube-proxy's
/// `sync_proxy_rules_no_local_endpoints_total`).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Gaps {
    /// Service ports with `internalTrafficPolicy: Local`.
    pub internal: usize,
    /// Service ports with `externalTrafficPolicy: Local`.
    pub external: usize,
}

/// Counts such ports of one Service, by family.
#[must_use]
pub fn gaps(plan: &ServicePlan) -> ByFamily<Gaps> {
    let mut gaps = ByFamily::<Gaps>::default();
    for (name, port) in plan {
        let gaps = gaps.of_mut(name.family);
        gaps.internal += usize::from(lacks_local(port, true));
        gaps.external += usize::from(lacks_local(port, false));
    }
    gaps
}

fn lacks_local(port: &PortPlan, is_internal: bool) -> bool {
    let mut fronts = port.fronts.values();
    let is_local = fronts.any(|front| {
        (front.kind == FrontKind::ClusterIp) == is_internal && front.packets == TrafficPolicy::Local
    });
    is_local && port.has_endpoints && port.local.is_empty()
}
