//! Plans one Service: computes what the maps should hold for it. Pure: no I/O, no clock, no chance.
//! `reconcile/desired` keeps the plans of all Services, and has those planned that a change concerns.
//!
//! - `claims`: who owns an address that several Services claim
//! - `endpoints`: which endpoints count
//! - `external_ips`: whose an address is, and so which external IPs are served
//! - `gaps`: where a policy finds no endpoint of this node
//! - `health`: what load balancers are told of a Service
//! - `local_node`: the zone and addresses of this node
//! - `pools`: which endpoints Services keep to, of this node or its node pool
//! - `slots`: how often, and in which order, a backend stands in a set
//! - `sources`: who may use the addresses of a load balancer
//! - `uses`: what becomes of each endpoint, and why
//! - `steering`: which addresses and ports go to the tunnel

mod claims;
mod endpoints;
mod external_ips;
mod gaps;
mod health;
mod local_node;
mod pools;
mod slots;
mod sources;
mod steering;
mod uses;

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    slice,
    sync::Arc,
};

pub use claims::{Claims, Rank};
pub use external_ips::ExternalIpOwners;
pub use gaps::{Gaps, gaps};
pub use health::{HealthCheck, HealthChecks, Listeners, health_check};
use litemap::LiteMap;
pub use local_node::{LocalNode, NodePortAddresses};
pub use pools::Pools;
pub use steering::{SteeringPlan, SteeringProblem, SteeringRules, steering};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{Algorithm, FrontKey, Source},
};
pub use uses::{Use, Why, uses};

use crate::model::{self, Family, ObjectName, ServicePort, ServiceState, TrafficPolicy};

/// A port of a Service in one family: what owns fronts and backends. The port is known by its
/// name and protocol, as kube-proxy knows it (kube-proxy `pkg/proxy/serviceport.go`).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortName {
    /// The Service.
    pub service: ObjectName,
    /// The name of the port; empty for an unnamed one.
    pub port: Arc<str>,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The family of its fronts and backends.
    pub family: Family,
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = self.family.label();
        self.service.fmt(f)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{} {family}", self.protocol)
    }
}

/// Where a backend is.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Target {
    /// Its address.
    pub address: Address,
    /// Its port.
    pub port: Port,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address.to_ip(), self.port.to_host()).fmt(f)
    }
}

/// What the maps should hold for one port of a Service in one family.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortPlan {
    /// The addresses that are translated.
    pub fronts: LiteMap<FrontKey, FrontPlan>,
    /// The backends for the policies Cluster, in the order of their slots, those of which more is
    /// wanted several times; none where no front has such a policy.
    pub cluster: Vec<Target>,
    /// The backends for the policies Local, as those.
    pub local: Vec<Target>,
    /// Whether there are endpoints at all: without them connects are refused, and with them but
    /// without any for a policy Local they lead nowhere.
    pub has_endpoints: bool,
    /// Every backend that still serves, chosen for new connections or not, in ascending order.
    pub serving: Vec<Target>,
    /// How a slot is chosen.
    pub algorithm: Algorithm,
    /// Client-IP affinity in seconds, or 0.
    pub affinity: u32,
    /// Whether sockets leave the fronts alone, so that they are for packets only.
    pub not_for_sockets: bool,
    /// The clients that may use the addresses of the load balancer, in ascending order and apart from
    /// each other; all may where there are none.
    pub sources: Vec<Source>,
}

impl PortPlan {
    /// Whether only some clients may use a front.
    #[must_use]
    pub fn is_restricted(&self, front: &FrontPlan) -> bool {
        front.kind == FrontKind::LoadBalancerIp && !self.sources.is_empty()
    }

    /// The clients that may use some of its fronts; none where all may use all.
    #[must_use]
    pub fn used_sources(&self) -> &[Source] {
        let is_used = self.fronts.values().any(|front| self.is_restricted(front));
        if is_used { &self.sources } else { &[] }
    }

    /// The same plan with other clients, as they are programmed; without any, the fronts that only
    /// some may use are left out.
    #[must_use]
    pub fn with_sources(&self, programmed: &[Source]) -> Self {
        let mut plan = self.clone();
        if programmed.is_empty() {
            plan.fronts.retain(|_, front| !self.is_restricted(front));
        } else {
            plan.sources = programmed.to_vec();
        }
        plan
    }

    /// The same plan with no other fronts and backends than those, and where slots are short with each
    /// backend once. It needs no more room than the plan that is programmed, so it can be followed when
    /// the maps are full.
    #[must_use]
    pub fn restricted_to(
        &self,
        has: impl Fn(&FrontKey) -> bool,
        known: impl Fn(&Target) -> bool,
        slots_are_short: bool,
    ) -> Self {
        let only = |targets: &[Target]| {
            let mut seen = BTreeSet::new();
            let known = targets.iter().copied().filter(&known);
            let chosen = known.filter(|target| !slots_are_short || seen.insert(*target));
            chosen.collect()
        };
        let mut plan = Self {
            cluster: only(&self.cluster),
            local: only(&self.local),
            serving: only(&self.serving),
            ..self.clone()
        };
        plan.fronts.retain(|key, _| has(key));
        plan
    }
}

/// How one address of a service port is served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontPlan {
    /// What kind of address it is.
    pub kind: FrontKind,
    /// Which backends sockets of this node are led to, those of its pods among them.
    pub sockets: TrafficPolicy,
    /// Which backends packets from elsewhere are led to.
    pub packets: TrafficPolicy,
    /// Whether the host's own sockets may use it, where only some clients may; nothing where that is not
    /// known before they connect.
    pub admits_host: Option<bool>,
    /// Whether something of this node listens there itself, so that sockets are left alone.
    pub has_listener: bool,
}

/// What kind of address a front is, the one first that wins where two Services have it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum FrontKind {
    /// A cluster IP.
    ClusterIp,
    /// An address of a load balancer.
    LoadBalancerIp,
    /// One of `spec.externalIPs`.
    ExternalIp,
    /// An address of this node, with a node port.
    NodePort,
}

/// What planning needs to know of this node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Here {
    /// The name of its Node object.
    pub node: Arc<str>,
    /// The zone that it is in, where its Node says.
    pub zone: Option<Arc<str>>,
    /// Its addresses that node ports are dialled on.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The first address of each family that its Node names.
    pub primary: BTreeSet<IpAddr>,
    /// The addresses of its links that others can reach it at.
    pub addresses: BTreeSet<IpAddr>,
    /// How a backend is chosen where a Service doesn't say.
    pub algorithm: model::Algorithm,
}

/// The plans of one Service, by port and family. They are shared, as they are large beside their
/// names.
pub type ServicePlan = LiteMap<PortName, Arc<PortPlan>>;

/// Plans a Service: each port in each family that it has a cluster IP of. Its other addresses of
/// another family are not served (kube-proxy `pkg/proxy/serviceport.go`, `newBaseServiceInfo`).
#[must_use]
pub fn service(state: &ServiceState, here: &Here) -> ServicePlan {
    let service = &state.service;
    let families = service.cluster_ips.len();
    let mut plans = ServicePlan::with_capacity(families * service.ports.len());
    for ip in &service.cluster_ips {
        let ports = service.ports.iter();
        for port in ports.filter(|port| is_planned(port.protocol)) {
            let name = PortName {
                service: service.name.clone(),
                port: Arc::clone(&port.name),
                protocol: port.protocol,
                family: Family::of(*ip),
            };
            plans.insert(name, Arc::new(self::port(state, *ip, port, here)));
        }
    }
    plans
}

/// Whether sockets of the protocol can be translated; SCTP has no connect hook.
fn is_planned(protocol: Protocol) -> bool {
    protocol == Protocol::TCP || protocol == Protocol::UDP
}

fn port(state: &ServiceState, ip: IpAddr, port: &ServicePort, here: &Here) -> PortPlan {
    let service = &state.service;
    let weights = service.weights.as_deref();
    let named = (&*port.name, port.protocol);
    let endpoints = endpoints::of_port(&state.slices, Family::of(ip), named, weights, here);
    let sources = sources::of_service(service, Family::of(ip), here);
    let fronts = fronts(service, ip, port, (here, &sources));
    let has_endpoints = !endpoints.cluster.is_empty();
    let algorithm = service.algorithm.unwrap_or(here.algorithm);
    let used = |policy, targets: &BTreeSet<Target>| {
        if !leads_by(&fronts, policy) {
            return Vec::new();
        }
        slots::of_set(algorithm, targets, &endpoints.weights)
    };
    PortPlan {
        cluster: used(TrafficPolicy::Cluster, &endpoints.cluster),
        local: used(TrafficPolicy::Local, &endpoints.local),
        fronts,
        has_endpoints,
        serving: endpoints.serving.into_iter().collect(),
        algorithm: match algorithm {
            model::Algorithm::Random => Algorithm::RANDOM,
            model::Algorithm::RoundRobin => Algorithm::ROUND_ROBIN,
            model::Algorithm::SourceHash => Algorithm::SOURCE_HASH,
            model::Algorithm::DestinationHash => Algorithm::DESTINATION_HASH,
            model::Algorithm::Maglev => Algorithm::MAGLEV,
            model::Algorithm::LeastConn => Algorithm::LEAST_CONN,
        },
        affinity: service.affinity,
        not_for_sockets: service.not_for_sockets,
        sources,
    }
}

/// Whether anybody is led by a policy at one of these fronts.
fn leads_by(fronts: &LiteMap<FrontKey, FrontPlan>, policy: TrafficPolicy) -> bool {
    let mut policies = fronts
        .values()
        .flat_map(|front| [front.sockets, front.packets]);
    policies.any(|used| used == policy)
}

/// The addresses that lead to a port, in the family of one of its cluster IPs. Where an address is
/// of two kinds, it is of the first.
fn fronts(
    service: &model::Service,
    ip: IpAddr,
    port: &ServicePort,
    (here, sources): (&Here, &[Source]),
) -> LiteMap<FrontKey, FrontPlan> {
    let key = |ip: IpAddr, number| {
        FrontKey::new(Address::from_ip(ip), Port::from_host(number), port.protocol)
    };
    let front = |kind, ip| {
        let (sockets, packets) = match kind {
            FrontKind::ClusterIp => (service.internal_policy, service.internal_policy),
            // A socket of this node is not outside (kube-proxy's short-circuit).
            FrontKind::LoadBalancerIp | FrontKind::ExternalIp | FrontKind::NodePort => {
                (TrafficPolicy::Cluster, service.external_policy)
            }
        };
        let admits_host = if kind == FrontKind::LoadBalancerIp && !sources.is_empty() {
            sources::admit_host(sources, ip, here)
        } else {
            Some(true)
        };
        FrontPlan {
            kind,
            sockets,
            packets,
            admits_host,
            has_listener: false,
        }
    };
    let node_ports = port.node_port.into_iter();
    let node_ports = node_ports.flat_map(|number| {
        let ips = here.node_port_addresses.iter();
        ips.map(move |ip| (*ip, number, FrontKind::NodePort))
    });
    let all = [
        (FrontKind::ClusterIp, slice::from_ref(&ip)),
        (FrontKind::LoadBalancerIp, &*service.load_balancer_ips),
        (FrontKind::ExternalIp, &*service.external_ips),
    ];
    let all = all
        .into_iter()
        .flat_map(|(kind, ips)| ips.iter().map(move |ip| (*ip, port.port, kind)))
        .chain(node_ports);
    let mut fronts = LiteMap::with_capacity(1);
    for (other, number, kind) in all.filter(|(other, ..)| Family::of(*other) == Family::of(ip)) {
        fronts
            .entry(key(other, number))
            .or_insert_with(|| front(kind, other));
    }
    fronts
}

/// The claims of a Service on fronts: each front of its plan, with the rank that decides between
/// it and others.
pub fn claims(
    state: &ServiceState,
    plan: &ServicePlan,
) -> impl Iterator<Item = (FrontKey, Rank, PortName)> {
    let created = state.service.created;
    plan.iter().flat_map(move |(name, port)| {
        port.fronts
            .iter()
            .map(move |(key, front)| (*key, Rank::new(front.kind, created), name.clone()))
    })
}

#[cfg(test)]
mod tests;
