//! The use of each endpoint of a port on this node, and its cause: for operators.

use std::collections::BTreeSet;

use tunnel_common::addr::Protocol;

use super::{Here, PortPlan, Target, endpoints, leads_by};
use crate::model::{Endpoint, Family, ServiceState, TrafficPolicy};

/// The use of an endpoint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Use<'a> {
    /// The address and port.
    pub target: Target,
    /// The endpoint's conditions, from its slice.
    pub endpoint: &'a Endpoint,
    /// True if traffic of a policy Cluster is sent there.
    pub cluster: bool,
    /// True if traffic of a policy Local is sent there.
    pub local: bool,
    /// The weight.
    pub weight: u32,
    /// The cause of its use or non-use.
    pub why: Why,
}

/// The cause for which an endpoint gets new connections, or none.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Why {
    /// Used: it is ready.
    Ready,
    /// Used: it is terminating, but still serves, and none is ready.
    LastResort,
    /// Not used: it is not ready.
    NotReady,
    /// Not used: it is terminating, and others are ready.
    Going,
    /// Not used: the hints of the slices are for clients elsewhere.
    HintedElsewhere,
    /// Not used: its Service is restricted to this node, or its pool.
    KeptAway,
    /// Not used: its weight is 0, and others have more.
    Weightless,
    /// Not used: every address has a policy Local, and it is on another node.
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

/// Returns the use of the endpoints of a Service's port in a family, in the order of their addresses.
/// `plan` was made for the Service `near` this node ([`super::Pools`]).
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

/// Returns the cause for an endpoint that is in no set. `is_led_to` is true if some policy admits its
/// node.
const fn why_not(endpoint: &Endpoint, is_led_to: bool) -> Why {
    match (endpoint.ready, endpoint.is_fallback()) {
        (false, false) => Why::NotReady,
        _ if !is_led_to => Why::OnOtherNode,
        (true, _) => Why::HintedElsewhere,
        (false, true) => Why::Going,
    }
}
