//! What is shown of the reconciler.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tunnel_common::service::{FrontKey, Source};

use super::{MapReader, Reconciler, actual::PortUse};
use crate::{
    model::{ObjectName, ServiceState, TrafficPolicy},
    plan::{self, FrontKind, FrontPlan, PortName, PortPlan, Target},
};

/// A Service as it is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its ports, each in each family.
    pub ports: Vec<PortView>,
}

/// A port of a Service in one family, as it is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The name of the port, or empty.
    pub port: String,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// The word for how a backend is chosen.
    pub algorithm: String,
    /// How long a client keeps its backend, in seconds; 0 where it doesn't.
    pub affinity_seconds: u32,
    /// Whether sockets of this node leave it alone.
    pub not_for_sockets: bool,
    /// Who may use the addresses of the load balancer, first and last address of each range; empty
    /// where all may.
    pub sources: Vec<String>,
    /// Connections and UDP flows that were sent to a backend, as the programs counted them.
    #[serde(default)]
    pub sent: u64,
    /// Connections and datagrams that were refused.
    #[serde(default)]
    pub refused: u64,
    /// The fronts that are programmed.
    pub fronts: Vec<FrontView>,
    /// The backends that new connections go to.
    pub backends: Vec<String>,
    /// Backends that only finish what they have.
    pub leaving: Vec<String>,
    /// Whether a client of the policy Cluster would find an endpoint. Where there is no backend all the
    /// same, those there are serve no client of this node.
    #[serde(default)]
    pub has_endpoints: bool,
    /// Every endpoint that the slices have, and what becomes of it.
    pub endpoints: Vec<EndpointView>,
    /// Why it is not programmed as planned, as a word.
    pub reason: Option<String>,
    /// Why it is not programmed as planned, as a sentence.
    pub problem: Option<String>,
}

/// A front that is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontView {
    /// Its address, port and protocol.
    pub front: String,
    /// What kind of address it is.
    pub kind: String,
    /// `Cluster` or `Local`: which backends sockets of this node are led to.
    pub sockets: String,
    /// `Cluster` or `Local`: which backends packets from elsewhere are led to.
    pub packets: String,
    /// Whether something of this node listens there itself, so that its sockets are left alone.
    #[serde(default)]
    pub has_listener: bool,
}

/// An endpoint, and what becomes of it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointView {
    /// Its address and port.
    pub endpoint: String,
    /// The name of its Pod, where known.
    pub pod: Option<String>,
    /// The node it is on, where known.
    pub node: Option<String>,
    /// The zone it is in, where known.
    pub zone: Option<String>,
    /// `ready`, `terminating` (and serving), or `not ready`.
    pub category: String,
    /// The sets that it is in: `cluster`, `local`.
    pub sets: Vec<String>,
    /// Its weight beside the others.
    pub weight: u32,
    /// Whether the maps have it as a backend, for new connections or those that it has.
    pub programmed: bool,
    /// How many open sockets were sent there by this Service port, where it is programmed: TCP, and
    /// UDP whose last choice it is.
    #[serde(default)]
    pub open: Option<u64>,
    /// Why new connections go there, or don't.
    pub why: String,
}

/// The category of an endpoint that takes new connections.
const READY: &str = "ready";

impl<M: MapReader> Reconciler<M> {
    /// The Services that were read and what is programmed of them: those of a name, which may begin
    /// with the namespace and a slash, or all.
    #[must_use]
    pub fn services(&self, name: Option<&str>) -> Vec<ServiceView> {
        let all = self.plans.iter();
        all.filter(|(service, _)| name.is_none_or(|name| is_named(service, name)))
            .map(|(service, plans)| ServiceView {
                namespace: service.namespace.to_string(),
                name: service.name.to_string(),
                ports: plans
                    .iter()
                    .map(|(name, plan)| self.port_view(name, plan))
                    .collect(),
            })
            .collect()
    }

    fn port_view(&self, name: &PortName, plan: &PortPlan) -> PortView {
        let id = self.actual.id(name);
        let used = id.and_then(|id| self.actual.ports.get(&id));
        let placed = self.placed(used);
        let (backends, leaving) = used
            .into_iter()
            .flat_map(|port| &port.backends)
            .partition::<Vec<_>, _>(|(_, index)| placed.contains(index));
        let names = |targets: Vec<(&Target, &u32)>| -> Vec<String> {
            let names = targets.into_iter().map(|(target, _)| target.to_string());
            names.collect()
        };
        let sources = self
            .actual
            .id(name)
            .and_then(|id| self.actual.sources_of(id));
        let sources = sources.unwrap_or_default();
        let tally = self.tally(id);
        let problem = self.problems.get(&name.service);
        let problem = problem.and_then(|problems| problems.get(name));
        let fronts = used.into_iter().flat_map(|port| port.fronts.keys());
        let noted = |key: &FrontKey| {
            let front = plan.fronts.get(key);
            front.map(|front| self.listeners.noted(key, *front))
        };
        let fronts = fronts.map(|key| front_view(key.to_string(), noted(key).as_ref()));
        let state = self.states.get(&name.service);
        let endpoints = state
            .map(|state| self.endpoint_views(name, plan, state, used))
            .unwrap_or_default();
        // What is ready elsewhere, and not for this node, is going nowhere.
        let ready = endpoints.iter().filter(|it| it.category == READY);
        let ready: BTreeSet<&str> = ready.map(|it| it.endpoint.as_str()).collect();
        let leaving = names(leaving).into_iter();
        let leaving = leaving.filter(|it| !ready.contains(it.as_str())).collect();
        PortView {
            port: name.port.to_string(),
            protocol: name.protocol.to_string(),
            family: name.family.label().to_owned(),
            algorithm: plan.algorithm.label().to_owned(),
            affinity_seconds: plan.affinity,
            not_for_sockets: !plan.for_sockets,
            sources: sources.iter().map(source_view).collect(),
            sent: tally.sent,
            refused: tally.refused,
            fronts: fronts.collect(),
            backends: names(backends),
            leaving,
            has_endpoints: plan.has_endpoints,
            endpoints,
            reason: problem.map(|problem| problem.reason.label().to_owned()),
            problem: problem.map(ToString::to_string),
        }
    }

    fn endpoint_views(
        &self,
        name: &PortName,
        plan: &PortPlan,
        state: &ServiceState,
        used: Option<&PortUse>,
    ) -> Vec<EndpointView> {
        let near = self.pools.near(state);
        let port = (&*name.port, name.protocol);
        let uses = plan::uses(state, &near, name.family, port, plan, &self.here);
        let text = |text: &Option<std::sync::Arc<str>>| text.as_deref().map(str::to_owned);
        uses.into_iter()
            .map(|it| {
                let sets = [(it.cluster, "cluster"), (it.local, "local")];
                let sets = sets.into_iter().filter(|(is_in, _)| *is_in);
                let endpoint = it.endpoint;
                let index = used.and_then(|port| port.backends.get(&it.target).copied());
                let category = if endpoint.ready {
                    READY
                } else if endpoint.is_fallback() {
                    "terminating"
                } else {
                    "not ready"
                };
                EndpointView {
                    endpoint: it.target.to_string(),
                    pod: text(&endpoint.name),
                    node: text(&endpoint.node),
                    zone: text(&endpoint.zone),
                    category: category.to_owned(),
                    sets: sets.map(|(_, set)| set.to_owned()).collect(),
                    weight: it.weight,
                    programmed: index.is_some(),
                    open: index.and_then(|index| self.maps.open_at(index).ok()),
                    why: it.why.text().to_owned(),
                }
            })
            .collect()
    }

    /// The backends that the sets of a port lead to.
    fn placed(&self, port: Option<&PortUse>) -> BTreeSet<u32> {
        let fronts = port.into_iter().flat_map(|port| port.fronts.keys());
        fronts
            .filter_map(|key| self.actual.fronts.get(key))
            .flat_map(|front| [front.record.cluster, front.record.local])
            .filter(|set| set.len > 0)
            .filter_map(|set| self.actual.sets.get(&set.base))
            .flat_map(|set| set.backends.iter().copied())
            .collect()
    }
}

fn is_named(service: &ObjectName, name: &str) -> bool {
    match name.split_once('/') {
        Some((namespace, name)) => *service.namespace == *namespace && *service.name == *name,
        None => *service.name == *name,
    }
}

fn source_view(range: &Source) -> String {
    if range.first == range.last {
        return range.first.to_string();
    }
    format!("{}-{}", range.first, range.last)
}

/// A front; what is programmed and no longer planned has no kind.
fn front_view(front: String, plan: Option<&FrontPlan>) -> FrontView {
    let kind = match plan.map(|plan| plan.kind) {
        Some(FrontKind::ClusterIp) => "cluster IP",
        Some(FrontKind::LoadBalancerIp) => "load balancer",
        Some(FrontKind::ExternalIp) => "external IP",
        Some(FrontKind::NodePort) => "node port",
        None => "-",
    };
    let policy = |of: fn(&FrontPlan) -> TrafficPolicy| match plan.map(of) {
        Some(TrafficPolicy::Cluster) => "Cluster".to_owned(),
        Some(TrafficPolicy::Local) => "Local".to_owned(),
        None => "-".to_owned(),
    };
    FrontView {
        front,
        kind: kind.to_owned(),
        sockets: policy(|plan| plan.sockets),
        packets: policy(|plan| plan.packets),
        has_listener: plan.is_some_and(|plan| plan.has_listener),
    }
}
