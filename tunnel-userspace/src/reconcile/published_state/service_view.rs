//! The JSON representation of a Service in `/services` and `culvert services`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tunnel_common::service::{FrontendKey, Membership, SourceRange};

use super::{
    port_counters::read_service_counts,
    service_snapshot::{BackendSnapshot, ListenerState, PortSnapshot, ServiceSnapshot},
};
use crate::{
    model::{ObjectName, TrafficPolicy},
    plan::{self, BackendTarget, EndpointStatus, FrontendKind, FrontendPlan},
    reconcile::map_access::CounterReader,
};

/// The state of a Service on this node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// The Service's namespace.
    pub namespace: String,
    /// The Service's name.
    pub name: String,
    /// The ports. A dual-stack Service has two entries for each port.
    pub ports: Vec<PortView>,
}

/// A part of a list of Services. Each Service is a [`ServicePart::Start`], followed by its ports.
#[derive(Debug)]
pub enum ServicePart {
    /// The name of the next Service.
    Start(ObjectName),
    /// The next port of this Service.
    Port(Box<PortView>),
}

impl ServiceView {
    /// Assembles Services from their parts.
    pub fn collect(parts: impl Iterator<Item = ServicePart>) -> Vec<Self> {
        let mut services: Vec<Self> = Vec::new();
        for part in parts {
            match part {
                ServicePart::Start(name) => services.push(Self {
                    namespace: name.namespace.to_string(),
                    name: name.name.to_string(),
                    ports: Vec::new(),
                }),
                ServicePart::Port(port) => {
                    if let Some(service) = services.last_mut() {
                        service.ports.push(*port);
                    }
                }
            }
        }
        services
    }
}

/// The state of a Service's port in one address family.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The port's name, or an empty string if it has none.
    pub port: String,
    /// The protocol, `TCP` or `UDP`.
    pub protocol: String,
    /// The address family, `IPv4` or `IPv6`.
    pub family: String,
    /// The name of the load-balancing algorithm.
    pub algorithm: String,
    /// The timeout for client IP affinity in seconds, or 0 if there is no affinity.
    pub affinity_seconds: u32,
    /// True if an annotation on the Service disables socket translation.
    pub socket_translation_disabled: bool,
    /// The clients that may use the load balancer's addresses, as single addresses or ranges of the form
    /// `first-last`. Empty if all clients may use them.
    pub source_ranges: Vec<String>,
    /// The number of connections and UDP flows that have been sent to a backend.
    #[serde(default)]
    pub connections: u64,
    /// The number of connections and datagrams that have been refused.
    #[serde(default)]
    pub refused: u64,
    /// The port's frontends in the maps.
    pub frontends: Vec<FrontendView>,
    /// The backends that get new connections.
    pub backends: Vec<String>,
    /// The backends that serve only their open connections.
    pub draining: Vec<String>,
    /// True if traffic policy `Cluster` allows at least one endpoint. If this is true but there are no
    /// backends, every traffic policy is `Local` and no endpoint is on this node.
    #[serde(default)]
    pub has_endpoints: bool,
    /// The endpoints in the EndpointSlices, each with its status, and those that are still in the maps because
    /// no other endpoint could be programmed.
    pub endpoints: Vec<EndpointView>,
    /// The number of endpoints that are not in the maps and not in `endpoints`. Only a list of all Services
    /// omits endpoints.
    #[serde(default)]
    pub omitted_endpoints: usize,
    /// The label of the reason, if the port is not programmed as planned.
    pub reason: Option<String>,
    /// A description of the problem, if the port is not programmed as planned.
    pub problem: Option<String>,
}

/// A frontend in the maps.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// The frontend's address, port and protocol.
    pub frontend: String,
    /// The address type: `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The traffic policy for sockets on this node, `Cluster` or `Local`.
    pub sockets: String,
    /// The traffic policy for packets from outside this node, `Cluster` or `Local`.
    pub packets: String,
    /// True if a process on this node listens on the address itself, so that sockets are not translated.
    #[serde(default)]
    pub local_listener: bool,
    /// The id of a user whose local listener on the address is ignored, because `service.localListeners` does
    /// not contain this user.
    #[serde(default)]
    pub ignored_listener_user: Option<u32>,
}

/// An endpoint and its status on this node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointView {
    /// The endpoint's address and port.
    pub endpoint: String,
    /// The name of the endpoint's Pod, if known.
    pub pod: Option<String>,
    /// The name of the endpoint's node, if known.
    pub node: Option<String>,
    /// The endpoint's zone, if known.
    pub zone: Option<String>,
    /// The endpoint's condition: `ready`, `terminating` (but still serving), `not ready`, or `removed` if it is
    /// no longer in the EndpointSlices.
    pub condition: String,
    /// The backend sets in the maps that contain the endpoint: `cluster`, `local`, both, or neither.
    pub sets: Vec<String>,
    /// The endpoint's relative weight.
    pub weight: u32,
    /// True if the endpoint is a backend in the maps, for new or open connections.
    pub programmed: bool,
    /// The number of open sockets that have been translated from this service port to the endpoint, if the
    /// endpoint is in the maps. A UDP socket is counted only for its last backend.
    #[serde(default)]
    pub open_connections: Option<u64>,
    /// `active` if the endpoint gets new connections, `inactive` if it should not get any, or `not programmed`
    /// if it should get some but is not in the maps; followed by the reason.
    pub status: String,
}

/// The condition of an endpoint that is ready for new connections.
const READY: &str = "ready";

/// The condition of a backend that is no longer in the EndpointSlices.
const REMOVED: &str = "removed";

/// The status of a backend that should not get new connections any more.
const KEPT: &str = "active: kept because no other endpoint could be programmed";

/// The maximum number of endpoints of a port that are not in the maps in a list of all Services.
const MAX_UNPROGRAMMED: usize = 10;

/// The maximum number of source ranges of a port that are listed.
const MAX_SOURCE_RANGES: usize = 100;

impl ServiceSnapshot {
    /// Returns the JSON representation of the Service's port at the given position, with the current counters,
    /// or `None` if the Service has no more ports. If `is_brief`, omits most of the endpoints that are not in
    /// the maps.
    pub(super) fn port_view(
        &self,
        position: usize,
        reader: &impl CounterReader,
        is_brief: bool,
    ) -> Option<PortView> {
        let port = self.ports.get(position)?;
        let (name, plan) = (&port.name, &port.plan);
        let problem = port.problem.as_ref();
        let backends = port.backends.iter();
        let (backends, removed) =
            backends.partition::<Vec<_>, _>(|backend| backend.sets != Membership::NONE);
        let to_text = |backend: &BackendSnapshot| backend.target.to_string();
        let (endpoints, omitted_endpoints) = if is_brief && port.frontends.is_empty() {
            (Vec::new(), plan.endpoints.len())
        } else {
            let mut endpoints = self.endpoint_views(port, reader);
            let omitted = if is_brief {
                omit_unprogrammed(&mut endpoints)
            } else {
                0
            };
            (endpoints, omitted)
        };
        // A ready endpoint that serves only other nodes is not draining.
        let ready = endpoints.iter().filter(|it| it.condition == READY);
        let ready: BTreeSet<&str> = ready.map(|it| it.endpoint.as_str()).collect();
        let removed = removed.into_iter().map(to_text);
        let draining = removed.filter(|it| !ready.contains(it.as_str())).collect();
        let frontends = port.frontends.iter();
        let counts = read_service_counts(port, reader);
        Some(PortView {
            port: name.port.to_string(),
            protocol: name.protocol.to_string(),
            family: name.family.label().to_owned(),
            algorithm: plan.algorithm.label().to_owned(),
            affinity_seconds: plan.affinity_timeout,
            socket_translation_disabled: plan.socket_translation_disabled,
            source_ranges: source_views(&port.source_ranges),
            connections: counts.sent,
            refused: counts.refused,
            frontends: frontends
                .map(|(key, listener)| frontend_view(key, plan.frontends.get(key), *listener))
                .collect(),
            backends: backends.into_iter().map(to_text).collect(),
            draining,
            has_endpoints: plan.has_endpoints,
            endpoints,
            omitted_endpoints,
            reason: problem.map(|problem| problem.reason.label().to_owned()),
            problem: problem.map(|problem| problem.text.to_string()),
        })
    }

    fn endpoint_views(
        &self,
        port: &PortSnapshot,
        reader: &impl CounterReader,
    ) -> Vec<EndpointView> {
        let PortSnapshot { name, plan, .. } = port;
        let known = port.backends.iter();
        let mut known: BTreeMap<BackendTarget, &BackendSnapshot> =
            known.map(|it| (it.target, it)).collect();
        let restricted = self.restricted.as_ref().unwrap_or(&self.state);
        let of = (&*name.port, name.protocol);
        let statuses = plan::endpoint_statuses(
            &self.state,
            restricted,
            name.family,
            of,
            plan,
            &self.node_info,
        );
        let mut views: Vec<_> = statuses
            .into_iter()
            .map(|it| {
                let backend = known.remove(&it.target);
                let endpoint = it.endpoint;
                let condition = if endpoint.ready {
                    READY
                } else if endpoint.is_fallback() {
                    "terminating"
                } else {
                    "not ready"
                };
                EndpointView {
                    pod: endpoint.name.as_deref().map(str::to_owned),
                    node: endpoint.node.as_deref().map(str::to_owned),
                    zone: endpoint.zone.as_deref().map(str::to_owned),
                    weight: it.weight,
                    status: endpoint_status(port, &it, backend),
                    ..backend_view(it.target, condition, backend, reader)
                }
            })
            .collect();
        let kept = known.into_iter();
        let kept = kept.filter(|(_, backend)| backend.sets != Membership::NONE);
        views.extend(kept.map(|(target, backend)| EndpointView {
            status: KEPT.to_owned(),
            ..backend_view(target, REMOVED, Some(backend), reader)
        }));
        views
    }
}

/// Returns the view of an endpoint, of which only the backend in the maps is known.
fn backend_view(
    target: BackendTarget,
    condition: &str,
    backend: Option<&BackendSnapshot>,
    reader: &impl CounterReader,
) -> EndpointView {
    let sets = [
        (Membership::CLUSTER, "cluster"),
        (Membership::LOCAL, "local"),
    ];
    let is_in = |set| backend.is_some_and(|backend| backend.sets.includes(set));
    let sets = sets.into_iter().filter(|(set, _)| is_in(*set));
    EndpointView {
        endpoint: target.to_string(),
        pod: None,
        node: None,
        zone: None,
        condition: condition.to_owned(),
        sets: sets.map(|(_, set)| set.to_owned()).collect(),
        weight: 1,
        programmed: backend.is_some(),
        open_connections: backend.and_then(|it| reader.open_connections(it.index).ok()),
        status: String::new(),
    }
}

/// Returns the status of an endpoint, which says if it is in the maps as planned.
fn endpoint_status(
    port: &PortSnapshot,
    planned: &EndpointStatus<'_>,
    backend: Option<&BackendSnapshot>,
) -> String {
    let is_planned = planned.cluster || planned.local;
    let is_in_set = backend.is_some_and(|backend| backend.sets != Membership::NONE);
    match (is_planned, is_in_set) {
        (true, false) => {
            let problem = port.problem.as_ref();
            let reason = problem.map_or("not written yet", |problem| problem.reason.label());
            format!("not programmed: {reason}")
        }
        (false, true) => KEPT.to_owned(),
        (true, true) | (false, false) => planned.reason.text().to_owned(),
    }
}

/// Removes most of the endpoints that are not in the maps. Returns how many it removes.
fn omit_unprogrammed(endpoints: &mut Vec<EndpointView>) -> usize {
    let (before, mut unprogrammed) = (endpoints.len(), 0);
    endpoints.retain(|endpoint| {
        unprogrammed += usize::from(!endpoint.programmed);
        endpoint.programmed || unprogrammed <= MAX_UNPROGRAMMED
    });
    before - endpoints.len()
}

fn source_views(ranges: &[SourceRange]) -> Vec<String> {
    let listed = ranges.iter().take(MAX_SOURCE_RANGES).map(source_view);
    let more = ranges.len().saturating_sub(MAX_SOURCE_RANGES);
    let more = (more > 0).then(|| format!("and {more} more"));
    listed.chain(more).collect()
}

fn source_view(range: &SourceRange) -> String {
    if range.first == range.last {
        return range.first.to_string();
    }
    format!("{}-{}", range.first, range.last)
}

/// Returns a frontend's JSON representation. A frontend that is in the maps but no longer planned has the
/// type `-`.
fn frontend_view(
    frontend: &FrontendKey,
    plan: Option<&FrontendPlan>,
    listener: ListenerState,
) -> FrontendView {
    let kind = match plan.map(|plan| plan.kind) {
        Some(FrontendKind::ClusterIp) => "ClusterIP",
        Some(FrontendKind::LoadBalancerIp) => "LoadBalancer",
        Some(FrontendKind::ExternalIp) => "ExternalIP",
        Some(FrontendKind::NodePort) => "NodePort",
        None => "-",
    };
    let policy = |of: fn(&FrontendPlan) -> TrafficPolicy| match plan.map(of) {
        Some(TrafficPolicy::Cluster) => "Cluster".to_owned(),
        Some(TrafficPolicy::Local) => "Local".to_owned(),
        None => "-".to_owned(),
    };
    FrontendView {
        frontend: frontend.to_string(),
        kind: kind.to_owned(),
        sockets: policy(|plan| plan.socket_policy),
        packets: policy(|plan| plan.packet_policy),
        local_listener: listener.is_yielding,
        ignored_listener_user: listener.ignored_user,
    }
}
