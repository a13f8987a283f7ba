//! Plans one Service: computes the desired content of the maps for it. Pure: no I/O, no clock, no
//! randomness. `reconcile/desired` stores the plans of all Services, and plans those that a change
//! affects.
//!
//! - `claims`: the owner of an address that several Services claim
//! - `endpoints`: the endpoints that get traffic
//! - `external_ips`: the owners of addresses, and so the external IPs that are served
//! - `gaps`: traffic policies without an endpoint on this node
//! - `health`: the answers to load balancers' health checks
//! - `local_node`: the zone and addresses of this node
//! - `pools`: Services restricted to endpoints of this node or its node pool
//! - `slots`: the number and order of a backend's slots in a set
//! - `sources`: the clients that may use the addresses of a load balancer
//! - `uses`: the use of each endpoint, and its cause
//! - `steering`: the addresses and ports that are steered to the tunnel

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

/// A port of a Service in one family, which owns frontends and backends. The port is identified by its
/// name and protocol, as in kube-proxy (`pkg/proxy/serviceport.go`).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortName {
    /// The Service.
    pub service: ObjectName,
    /// The name of the port; empty for an unnamed one.
    pub port: Arc<str>,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The family of its frontends and backends.
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

/// The address and port of a backend.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Target {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: Port,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address.to_ip(), self.port.to_host()).fmt(f)
    }
}

/// The desired content of the maps for one port of a Service in one family.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortPlan {
    /// The addresses that are translated.
    pub fronts: LiteMap<FrontKey, FrontPlan>,
    /// The backends for the policies Cluster, in the order of their slots, with repetitions by weight;
    /// none if no frontend has such a policy.
    pub cluster: Vec<Target>,
    /// The backends for the policies Local, in the same form.
    pub local: Vec<Target>,
    /// True if there are endpoints at all: without them connects are refused; with them, but none for a
    /// policy Local, the destination is unreachable.
    pub has_endpoints: bool,
    /// Every backend that still serves, in a set or not, in ascending order.
    pub serving: Vec<Target>,
    /// The algorithm that chooses a slot.
    pub algorithm: Algorithm,
    /// The time-out of the client-IP affinity in seconds, or 0.
    pub affinity: u32,
    /// True if sockets leave the frontends alone, so that they are for packets only.
    pub not_for_sockets: bool,
    /// The clients that may use the addresses of the load balancer, ascending and disjoint; all clients
    /// if there are none.
    pub sources: Vec<Source>,
}

impl PortPlan {
    /// Returns true if only some clients may use a frontend.
    #[must_use]
    pub fn is_restricted(&self, front: &FrontPlan) -> bool {
        front.kind == FrontKind::LoadBalancerIp && !self.sources.is_empty()
    }

    /// Returns the clients that may use some of the frontends; none if all clients may use all of them.
    #[must_use]
    pub fn used_sources(&self) -> &[Source] {
        let is_used = self.fronts.values().any(|front| self.is_restricted(front));
        if is_used { &self.sources } else { &[] }
    }

    /// Returns this plan with the clients that are programmed; without any, restricted frontends are
    /// left out.
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

    /// Returns this plan with only these frontends and backends, and with each backend once if slots are
    /// short. It needs no more entries than the programmed plan, so it can be applied when the maps are
    /// full.
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

/// The properties of one address of a service port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontPlan {
    /// The kind of the address.
    pub kind: FrontKind,
    /// The policy for sockets of this node, including those of its pods.
    pub sockets: TrafficPolicy,
    /// The policy for packets from outside this node.
    pub packets: TrafficPolicy,
    /// True if the host's own sockets may use a frontend that only some clients may use; none if that is
    /// unknown before they connect.
    pub admits_host: Option<bool>,
    /// True if a local process listens on the address itself, so that sockets are left alone.
    pub has_listener: bool,
}

/// The kind of a frontend's address. Of two Services with the address, that of the first kind here wins.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum FrontKind {
    /// A cluster IP.
    ClusterIp,
    /// An address of a load balancer.
    LoadBalancerIp,
    /// An address in `spec.externalIPs`.
    ExternalIp,
    /// An address of this node, with a node port.
    NodePort,
}

/// The facts about this node that planning needs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Here {
    /// The name of its Node object.
    pub node: Arc<str>,
    /// The zone of the node, if its Node has one.
    pub zone: Option<Arc<str>>,
    /// The addresses for node ports.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The first address of each family that its Node names.
    pub primary: BTreeSet<IpAddr>,
    /// The addresses of its links that others can reach.
    pub addresses: BTreeSet<IpAddr>,
    /// The algorithm of a Service without one of its own.
    pub algorithm: model::Algorithm,
}

/// The plans of one Service, by port and family. They are shared, since they are large compared to their
/// names.
pub type ServicePlan = LiteMap<PortName, Arc<PortPlan>>;

/// Plans a Service: each port in each family of its cluster IPs. Other addresses of the Service in
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

/// Returns true if sockets of the protocol can be translated; SCTP has no connect hook.
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

/// Returns true if one of these frontends has a policy, for sockets or packets.
fn leads_by(fronts: &LiteMap<FrontKey, FrontPlan>, policy: TrafficPolicy) -> bool {
    let mut policies = fronts
        .values()
        .flat_map(|front| [front.sockets, front.packets]);
    policies.any(|used| used == policy)
}

/// Returns the addresses that lead to a port, in the family of one of its cluster IPs. An address of two
/// kinds gets the first.
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
            // A socket of this node is not external traffic (kube-proxy's short-circuit).
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

/// Returns each frontend of a Service's plan, with the name of its port and the rank that decides between
/// all Services that claim this frontend.
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
