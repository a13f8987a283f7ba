use super::{FrontKind, PortPlan, ServicePlan};
use crate::model::{ByFamily, TrafficPolicy};

/// The numbers of service ports with a policy Local that have endpoints, but none on this node
/// (kube-proxy's `sync_proxy_rules_no_local_endpoints_total`).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Gaps {
    /// By the internal policy, for cluster IPs.
    pub internal: usize,
    /// By the external policy, for all other addresses.
    pub external: usize,
}

/// Returns the gaps of a Service, by family.
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
