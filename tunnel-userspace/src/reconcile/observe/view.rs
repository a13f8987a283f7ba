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

impl Shown {
    /// The Service with the counts of now.
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
        // What is ready elsewhere, and not for this node, is going nowhere.
        let ready = endpoints.iter().filter(|it| it.category == READY);
        let ready: BTreeSet<&str> = ready.map(|it| it.endpoint.as_str()).collect();
        let leaving = leaving.into_iter().map(in_words);
        let leaving = leaving.filter(|it| !ready.contains(it.as_str())).collect();
        let fronts = port.fronts.iter();
        let tally = tally(port, counts);
        PortView {
            port: name.port.to_string(),
            protocol: name.protocol.to_string(),
            family: name.family.label().to_owned(),
            algorithm: plan.algorithm.label().to_owned(),
            affinity_seconds: plan.affinity,
            not_for_sockets: plan.not_for_sockets,
            sources: port.sources.iter().map(source_view).collect(),
            sent: tally.sent,
            refused: tally.refused,
            fronts: fronts
                .map(|(key, has_listener)| front_view(key, plan.fronts.get(key), *has_listener))
                .collect(),
            backends: backends.into_iter().map(in_words).collect(),
            leaving,
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
                    open: index.and_then(|index| counts.open_at(*index).ok()),
                    why: it.why.text().to_owned(),
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

/// A front; what is programmed and no longer planned has no kind.
fn front_view(front: &FrontKey, plan: Option<&FrontPlan>, has_listener: bool) -> FrontView {
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
        front: front.to_string(),
        kind: kind.to_owned(),
        sockets: policy(|plan| plan.sockets),
        packets: policy(|plan| plan.packets),
        has_listener,
    }
}
