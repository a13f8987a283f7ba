//! What becomes of each endpoint of a port on this node, and why: for people who ask.

use std::collections::BTreeSet;

use tunnel_common::addr::Protocol;

use super::{Here, PortPlan, Target, endpoints, leads_by};
use crate::model::{Endpoint, Family, ServiceState, TrafficPolicy};

/// What becomes of an endpoint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Use<'a> {
    /// Where it is.
    pub target: Target,
    /// What the slices say of it.
    pub endpoint: &'a Endpoint,
    /// Whether traffic of a policy Cluster goes there.
    pub cluster: bool,
    /// Whether traffic of a policy Local goes there.
    pub local: bool,
    /// Its weight.
    pub weight: u32,
    /// Why it is used, or not.
    pub why: Why,
}

/// Why an endpoint takes new connections, or doesn't.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Why {
    /// It does: it is ready.
    Ready,
    /// It does: it is going, but still serves, and none is ready.
    LastResort,
    /// It doesn't: it is not ready.
    NotReady,
    /// It doesn't: it is going, and others are ready.
    Going,
    /// It doesn't: the hints of the slices lead clients of this node elsewhere.
    HintedElsewhere,
    /// It doesn't: its Service keeps to this node, or its pool, and it is elsewhere.
    KeptAway,
    /// It doesn't: its weight is 0, and others have more.
    Weightless,
    /// It doesn't: every address has a policy Local, and it is on another node.
    OnOtherNode,
}

impl Why {
    /// A few words for people.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ready => "used: ready",
            Self::LastResort => "used: terminating, but no other is ready",
            Self::NotReady => "not used: not ready",
            Self::Going => "not used: terminating, and others are ready",
            Self::HintedElsewhere => "not used: hints lead this node elsewhere",
            Self::KeptAway => "not used: openyurt.io/topologyKeys lead this node elsewhere",
            Self::Weightless => "not used: its weight is 0",
            Self::OnOtherNode => "not used: on another node, and the policy is Local",
        }
    }
}

/// What becomes of the endpoints of a Service's port in a family, for the plan that was made of it as
/// it is `near` this node ([`super::Pools`]). In the order of their addresses.
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

/// Why an endpoint is not admitted, which some policy leads to or none, as it is elsewhere.
const fn why_not(endpoint: &Endpoint, is_led_to: bool) -> Why {
    match (endpoint.ready, endpoint.is_fallback()) {
        (false, false) => Why::NotReady,
        _ if !is_led_to => Why::OnOtherNode,
        (true, _) => Why::HintedElsewhere,
        (false, true) => Why::Going,
    }
}
