use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use tunnel_common::service::{FrontKey, Source};

use super::{
    counted::tally,
    shown::{Shown, ShownBackend, ShownPort},
};
use crate::{
    model::TrafficPolicy,
    plan::{self, FrontKind, FrontPlan, Target},
    reconcile::access::Counts,
};

/// A Service as it is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// The ports, each in each family.
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
    /// The label of the algorithm.
    pub algorithm: String,
    /// The time for which a client keeps its backend, in seconds; 0 for no affinity.
    pub affinity_seconds: u32,
    /// True if its annotation disables socket translation.
    pub socket_translation_disabled: bool,
    /// The clients that may use the addresses of the load balancer, as first and last address of each
    /// range; empty if all may.
    pub source_ranges: Vec<String>,
    /// The number of connections and UDP flows that were sent to a backend, as counted by the programs.
    #[serde(default)]
    pub connections: u64,
    /// The number of connections and datagrams that were refused.
    #[serde(default)]
    pub refused: u64,
    /// The frontends that are programmed.
    pub frontends: Vec<FrontView>,
    /// The backends that get new connections.
    pub backends: Vec<String>,
    /// The backends that only keep their present connections.
    pub draining: Vec<String>,
    /// True if a client of the policy Cluster would find an endpoint. If there is no backend all the
    /// same, the endpoints serve no client of this node.
    #[serde(default)]
    pub has_endpoints: bool,
    /// Every endpoint of the slices, and its use.
    pub endpoints: Vec<EndpointView>,
    /// The label of the reason for which the port is not programmed as planned.
    pub reason: Option<String>,
    /// The sentence about it.
    pub problem: Option<String>,
}

/// A frontend that is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontView {
    /// The address, port and protocol.
    pub frontend: String,
    /// The type of the address: `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The policy for sockets of this node, `Cluster` or `Local`.
    pub sockets: String,
    /// The policy for packets from outside this node, `Cluster` or `Local`.
    pub packets: String,
    /// True if a local process listens on the address itself, so that sockets are not translated.
    #[serde(default)]
    pub local_listener: bool,
}

/// An endpoint, and its use.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointView {
    /// The address and port.
    pub endpoint: String,
    /// The name of its Pod, if known.
    pub pod: Option<String>,
    /// The name of its node, if known.
    pub node: Option<String>,
    /// The zone, if known.
    pub zone: Option<String>,
    /// `ready`, `terminating` (and serving), or `not ready`.
    pub condition: String,
    /// The sets that contain it: `cluster`, `local`.
    pub sets: Vec<String>,
    /// The relative weight.
    pub weight: u32,
    /// True if the maps contain it as a backend, for new or present connections.
    pub programmed: bool,
    /// The number of open sockets that this Service port sent there, if it is programmed: TCP, and UDP
    /// whose last choice it is.
    #[serde(default)]
    pub open_connections: Option<u64>,
    /// `active` or `inactive` for new connections, and the reason.
    pub status: String,
}

/// The condition of an endpoint that takes new connections.
const READY: &str = "ready";

impl Shown {
    /// Returns the Service with the present counters.
    pub(super) fn view(&self, counts: &impl Counts) -> ServiceView {
        let name = self.name();
        let ports = self.ports.iter();
        ServiceView {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            ports: ports.map(|port| self.port_view(port, counts)).collect(),
        }
    }

    fn port_view(&self, port: &ShownPort, counts: &impl Counts) -> PortView {
        let (name, plan) = (&port.name, &port.plan);
        let problem = port.problem.as_ref();
        let backends = port.backends.iter();
        let (backends, leaving) = backends.partition::<Vec<_>, _>(|backend| backend.is_placed);
        let in_words = |backend: &ShownBackend| backend.target.to_string();
        let endpoints = self.endpoint_views(port, counts);
        // An endpoint that is ready, but for other nodes only, is not draining.
        let ready = endpoints.iter().filter(|it| it.condition == READY);
        let ready: BTreeSet<&str> = ready.map(|it| it.endpoint.as_str()).collect();
        let leaving = leaving.into_iter().map(in_words);
        let draining = leaving.filter(|it| !ready.contains(it.as_str())).collect();
        let fronts = port.fronts.iter();
        let tally = tally(port, counts);
        PortView {
            port: name.port.to_string(),
            protocol: name.protocol.to_string(),
            family: name.family.label().to_owned(),
            algorithm: plan.algorithm.label().to_owned(),
            affinity_seconds: plan.affinity,
            socket_translation_disabled: plan.not_for_sockets,
            source_ranges: port.sources.iter().map(source_view).collect(),
            connections: tally.sent,
            refused: tally.refused,
            frontends: fronts
                .map(|(key, has_listener)| front_view(key, plan.fronts.get(key), *has_listener))
                .collect(),
            backends: backends.into_iter().map(in_words).collect(),
            draining,
            has_endpoints: plan.has_endpoints,
            endpoints,
            reason: problem.map(|problem| problem.reason.label().to_owned()),
            problem: problem.map(|problem| problem.text.clone()),
        }
    }

    fn endpoint_views(&self, port: &ShownPort, counts: &impl Counts) -> Vec<EndpointView> {
        let ShownPort { name, plan, .. } = port;
        let known = port.backends.iter();
        let known: BTreeMap<Target, u32> = known.map(|it| (it.target, it.index)).collect();
        let near = self.near.as_ref().unwrap_or(&self.state);
        let of = (&*name.port, name.protocol);
        let uses = plan::uses(&self.state, near, name.family, of, plan, &self.here);
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        uses.into_iter()
            .map(|it| {
                let sets = [(it.cluster, "cluster"), (it.local, "local")];
                let sets = sets.into_iter().filter(|(is_in, _)| *is_in);
                let endpoint = it.endpoint;
                let index = known.get(&it.target);
                let condition = if endpoint.ready {
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
                    condition: condition.to_owned(),
                    sets: sets.map(|(_, set)| set.to_owned()).collect(),
                    weight: it.weight,
                    programmed: index.is_some(),
                    open_connections: index.and_then(|index| counts.open_at(*index).ok()),
                    status: it.why.text().to_owned(),
                }
            })
            .collect()
    }
}

fn source_view(range: &Source) -> String {
    if range.first == range.last {
        return range.first.to_string();
    }
    format!("{}-{}", range.first, range.last)
}

/// Returns a frontend; one that is programmed but no longer planned has no kind.
fn front_view(front: &FrontKey, plan: Option<&FrontPlan>, has_listener: bool) -> FrontView {
    let kind = match plan.map(|plan| plan.kind) {
        Some(FrontKind::ClusterIp) => "ClusterIP",
        Some(FrontKind::LoadBalancerIp) => "LoadBalancer",
        Some(FrontKind::ExternalIp) => "ExternalIP",
        Some(FrontKind::NodePort) => "NodePort",
        None => "-",
    };
    let policy = |of: fn(&FrontPlan) -> TrafficPolicy| match plan.map(of) {
        Some(TrafficPolicy::Cluster) => "Cluster".to_owned(),
        Some(TrafficPolicy::Local) => "Local".to_owned(),
        None => "-".to_owned(),
    };
    FrontView {
        frontend: front.to_string(),
        kind: kind.to_owned(),
        sockets: policy(|plan| plan.sockets),
        packets: policy(|plan| plan.packets),
        local_listener: has_listener,
    }
}
