//! The status of each endpoint from this node's point of view, and the reason for it. Operators see both.

use std::collections::BTreeMap;

use tunnel_common::{addr::Protocol, service::Membership};

use super::{BackendTarget, NodeInfo, PortPlan, endpoint_selection, has_policy};
use crate::model::{Endpoint, Family, ServiceState, TrafficPolicy};

/// The status of an endpoint from this node's point of view.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointStatus<'a> {
    /// The address and port.
    pub target: BackendTarget,
    /// The endpoint, as found in its slice.
    pub endpoint: &'a Endpoint,
    /// True if the endpoint gets new connections under traffic policy `Cluster`.
    pub cluster: bool,
    /// True if the endpoint gets new connections under traffic policy `Local`.
    pub local: bool,
    /// The endpoint's weight.
    pub weight: u32,
    /// The reason why the endpoint gets new connections, or why it gets none.
    pub reason: EndpointReason,
}

/// The reason why an endpoint gets new connections (active), or why it gets none (inactive).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EndpointReason {
    /// Active: the endpoint is ready.
    Ready,
    /// Active: the endpoint is terminating but still serving, and no endpoint is ready.
    TerminatingFallback,
    /// Inactive: the endpoint is not ready.
    NotReady,
    /// Inactive: the endpoint is terminating, and others are ready.
    Terminating,
    /// Inactive: topology hints select other endpoints for this node.
    ExcludedByHints,
    /// Inactive: topology keys restrict the Service to other endpoints.
    ExcludedByTopologyKeys,
    /// Inactive: the endpoint's weight is 0, and others have a greater weight.
    ZeroWeight,
    /// Inactive: the endpoint is on another node, and every traffic policy is `Local`.
    OnOtherNode,
}

impl EndpointReason {
    /// Returns the text that operators see.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ready => "active: ready",
            Self::TerminatingFallback => "active: terminating, and no endpoint is ready",
            Self::NotReady => "inactive: not ready",
            Self::Terminating => "inactive: terminating, and others are ready",
            Self::ExcludedByHints => {
                "inactive: topology hints select other endpoints for this node"
            }
            Self::ExcludedByTopologyKeys => {
                "inactive: openyurt.io/topologyKeys select other endpoints for this node"
            }
            Self::ZeroWeight => "inactive: its weight is 0",
            Self::OnOtherNode => "inactive: on another node, and the traffic policy is Local",
        }
    }
}

/// Returns the status of every endpoint of the service port with a given name and protocol, in order of
/// address. `plan` must be the plan for `restricted`, which is the Service with only the endpoints that
/// [`super::NodePools`] permits.
#[must_use]
pub fn endpoint_statuses<'a>(
    state: &'a ServiceState,
    restricted: &'a ServiceState,
    family: Family,
    port: (&str, Protocol),
    plan: &PortPlan,
    node_info: &NodeInfo,
) -> Vec<EndpointStatus<'a>> {
    let weights = state.service.weights.as_deref();
    let permitted = endpoint_selection::endpoints_of_port(&restricted.slices, family, port);
    let found = endpoint_selection::endpoints_of_port(&state.slices, family, port);
    let selected = endpoint_selection::select_sets(permitted.values().copied(), weights, node_info);
    let selected: BTreeMap<_, _> = permitted.keys().copied().zip(selected).collect();
    let leads = |policy| has_policy(&plan.frontends, policy);
    let (by_cluster, by_local) = (leads(TrafficPolicy::Cluster), leads(TrafficPolicy::Local));
    found
        .into_iter()
        .map(|(target, endpoint)| {
            let selected = selected.get(&target);
            let is_in = |sets: Option<Membership>, set, is_used: bool| {
                is_used && sets.is_some_and(|sets| sets.includes(set))
            };
            let of = |sets| {
                let cluster = is_in(sets, Membership::CLUSTER, by_cluster);
                (cluster, is_in(sets, Membership::LOCAL, by_local))
            };
            let (cluster, local) = of(selected.map(|it| it.sets));
            let (may_cluster, may_local) = of(selected.map(|it| it.permitted_sets));
            let weight = selected.map_or(1, |it| it.weight);
            let permitted = permitted.get(&target).copied();
            let reason = match permitted {
                Some(permitted) if (cluster || local) && permitted.ready => EndpointReason::Ready,
                Some(_) if cluster || local => EndpointReason::TerminatingFallback,
                Some(_) if may_cluster || may_local => EndpointReason::ZeroWeight,
                Some(permitted) => {
                    inactive_reason(permitted, by_cluster || node_info.hosts(permitted))
                }
                None => EndpointReason::ExcludedByTopologyKeys,
            };
            EndpointStatus {
                target,
                endpoint: permitted.unwrap_or(endpoint),
                cluster,
                local,
                weight,
                reason,
            }
        })
        .collect()
}

/// Returns the reason why an endpoint is inactive. `is_permitted` is true if one of the service port's
/// traffic policies permits endpoints on the endpoint's node.
const fn inactive_reason(endpoint: &Endpoint, is_permitted: bool) -> EndpointReason {
    match (endpoint.ready, endpoint.is_fallback()) {
        (false, false) => EndpointReason::NotReady,
        _ if !is_permitted => EndpointReason::OnOtherNode,
        (true, _) => EndpointReason::ExcludedByHints,
        (false, true) => EndpointReason::Terminating,
    }
}
