//! The status of each endpoint on this node: active or not, and the reason, for operators.

use std::collections::BTreeSet;

use tunnel_common::addr::Protocol;

use super::{Here, PortPlan, Target, endpoints, leads_by};
use crate::model::{Endpoint, Family, ServiceState, TrafficPolicy};

/// The status of an endpoint on this node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Use<'a> {
    /// The address and port.
    pub target: Target,
    /// The endpoint in its slice.
    pub endpoint: &'a Endpoint,
    /// True if the endpoint gets new connections with policy Cluster.
    pub cluster: bool,
    /// True if the endpoint gets new connections with policy Local.
    pub local: bool,
    /// The weight.
    pub weight: u32,
    /// The reason for which the endpoint gets new connections, or none.
    pub why: Why,
}

/// The reason for which an endpoint gets new connections (active), or none (inactive).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Why {
    /// Active: the endpoint is ready.
    Ready,
    /// Active: the endpoint is terminating, but still serves, and no endpoint is ready.
    LastResort,
    /// Inactive: the endpoint is not ready.
    NotReady,
    /// Inactive: the endpoint is terminating, and others are ready.
    Going,
    /// Inactive: topology hints select other endpoints for this node.
    HintedElsewhere,
    /// Inactive: topology keys restrict the Service to other endpoints.
    KeptAway,
    /// Inactive: the weight of the endpoint is 0, and others have a greater one.
    Weightless,
    /// Inactive: the endpoint is on another node, and every policy is Local.
    OnOtherNode,
}

impl Why {
    /// Returns the text for operators.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ready => "active: ready",
            Self::LastResort => "active: terminating, and no endpoint is ready",
            Self::NotReady => "inactive: not ready",
            Self::Going => "inactive: terminating, and others are ready",
            Self::HintedElsewhere => {
                "inactive: topology hints select other endpoints for this node"
            }
            Self::KeptAway => {
                "inactive: openyurt.io/topologyKeys select other endpoints for this node"
            }
            Self::Weightless => "inactive: its weight is 0",
            Self::OnOtherNode => "inactive: on another node, and the traffic policy is Local",
        }
    }
}

/// Returns the status of all endpoints of a service port, which is given by its name and protocol, in the
/// order of their addresses. `plan` must be that of `near`, the Service with only the endpoints that
/// [`super::Pools`] permits.
#[must_use]
pub fn uses<'a>(
    state: &'a ServiceState,
    near: &'a ServiceState,
    family: Family,
    port: (&str, Protocol),
    plan: &PortPlan,
    here: &Here,
) -> Vec<Use<'a>> {
    let weights = state.service.weights.as_deref();
    let admitted = endpoints::of_port(&near.slices, family, port, weights, here);
    let near = endpoints::found(&near.slices, family, port);
    let found = endpoints::found(&state.slices, family, port);
    let leads = |policy| leads_by(&plan.fronts, policy);
    let (by_cluster, by_local) = (leads(TrafficPolicy::Cluster), leads(TrafficPolicy::Local));
    let is_admitted = |target: &Target| {
        by_cluster && admitted.cluster.contains(target)
            || by_local && admitted.local.contains(target)
    };
    let cluster: BTreeSet<&Target> = plan.cluster.iter().collect();
    let local: BTreeSet<&Target> = plan.local.iter().collect();
    found
        .into_iter()
        .map(|(target, endpoint)| {
            let (cluster, local) = (cluster.contains(&target), local.contains(&target));
            let weight = admitted.weights.get(&target).copied().unwrap_or(1);
            let near = near.get(&target).copied();
            let why = match near {
                Some(near) if (cluster || local) && near.ready => Why::Ready,
                Some(_) if cluster || local => Why::LastResort,
                Some(_) if is_admitted(&target) => Why::Weightless,
                Some(near) => why_not(near, by_cluster || here.has(near)),
                None => Why::KeptAway,
            };
            Use {
                target,
                endpoint: near.unwrap_or(endpoint),
                cluster,
                local,
                weight,
                why,
            }
        })
        .collect()
}

/// Returns the reason for which an endpoint is inactive. `is_led_to` is true if a policy of the service port
/// permits endpoints on the endpoint's node.
const fn why_not(endpoint: &Endpoint, is_led_to: bool) -> Why {
    match (endpoint.ready, endpoint.is_fallback()) {
        (false, false) => Why::NotReady,
        _ if !is_led_to => Why::OnOtherNode,
        (true, _) => Why::HintedElsewhere,
        (false, true) => Why::Going,
    }
}
