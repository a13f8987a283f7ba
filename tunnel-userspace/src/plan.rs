//! Computes the plan of one Service: the content that the maps should have for it. Pure: no I/O, no clock, no
//! randomness. `reconcile/desired` stores the plans of all Services, and updates those that a change affects.
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

/// The name of a service port: a port of a Service in one address family. As in kube-proxy
/// (`pkg/proxy/serviceport.go`), a port is identified by its name and protocol, not by its number.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortName {
    /// The Service.
    pub service: ObjectName,
    /// The name of the port in the Service; empty for an unnamed one.
    pub port: Arc<str>,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The address family of the frontends and backends.
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

/// The content that the maps should have for one service port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortPlan {
    /// The addresses and ports that are translated.
    pub fronts: LiteMap<FrontKey, FrontPlan>,
    /// The slots of the set for policy Cluster: a backend of greater weight has more slots. Empty if no
    /// frontend has this policy.
    pub cluster: Vec<Target>,
    /// The slots of the set for policy Local. Empty if no frontend has this policy.
    pub local: Vec<Target>,
    /// True if the policy Cluster permits an endpoint. Without one, connects are refused. If there is one,
    /// but a frontend with policy Local has no backend, its destination is unreachable.
    pub has_endpoints: bool,
    /// All backends that serve new or open connections, in a set or not, in ascending order.
    pub serving: Vec<Target>,
    /// The algorithm that chooses a slot.
    pub algorithm: Algorithm,
    /// The timeout of client-IP affinity in seconds; 0 for no affinity.
    pub affinity: u32,
    /// True if sockets are not translated; the frontends are for packets only.
    pub not_for_sockets: bool,
    /// The clients that may use the addresses of the load balancer, as ascending and disjoint ranges. If
    /// empty, all clients may.
    pub sources: Vec<Source>,
}

impl PortPlan {
    /// Returns true if only the clients in `sources` may use a frontend.
    #[must_use]
    pub fn is_restricted(&self, front: &FrontPlan) -> bool {
        front.kind == FrontKind::LoadBalancerIp && !self.sources.is_empty()
    }

    /// Returns the clients that may use the restricted frontends; empty if no frontend is restricted.
    #[must_use]
    pub fn used_sources(&self) -> &[Source] {
        let is_used = self.fronts.values().any(|front| self.is_restricted(front));
        if is_used { &self.sources } else { &[] }
    }

    /// Returns this plan with the client ranges `programmed`, which are in the maps already. Without any,
    /// restricted frontends are left out.
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

    /// Returns this plan with only the frontends and backends that the maps have already, and with only one
    /// slot per backend if `slots_are_short`. This needs no additional map entries, so it can be written when
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

/// The plan of one frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontPlan {
    /// The kind of the address.
    pub kind: FrontKind,
    /// The traffic policy for sockets of this node, including those of its pods.
    pub sockets: TrafficPolicy,
    /// The traffic policy for packets from outside this node.
    pub packets: TrafficPolicy,
    /// True if sockets of the host may use the frontend, if it is restricted; `None` if their source address
    /// is unknown.
    pub admits_host: Option<bool>,
    /// True if a process of this node listens on the address itself, so that sockets are not translated.
    pub has_listener: bool,
}

/// The kind of a frontend's address. If several Services have the address, the first kind in this order wins.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum FrontKind {
    /// A cluster IP.
    ClusterIp,
    /// An address of the Service's load balancer.
    LoadBalancerIp,
    /// An address in `spec.externalIPs`.
    ExternalIp,
    /// An address of this node with a node port.
    NodePort,
}

/// The inputs of a plan that come from this node and its config.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Here {
    /// The name of this node's Node object.
    pub node: Arc<str>,
    /// The zone of this node, if its Node object has one.
    pub zone: Option<Arc<str>>,
    /// The addresses of this node that serve node ports.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The first internal address of each family in the Node object.
    pub primary: BTreeSet<IpAddr>,
    /// The addresses of this node's links, except for loopback and link-local ones.
    pub addresses: BTreeSet<IpAddr>,
    /// The algorithm for Services that select none.
    pub algorithm: model::Algorithm,
}

/// The plans of a Service's ports. They are shared, since they are large compared to their names.
pub type ServicePlan = LiteMap<PortName, Arc<PortPlan>>;

/// Plans a Service: each of its ports in each family of its cluster IPs. As in kube-proxy
/// (`pkg/proxy/serviceport.go`, `newBaseServiceInfo`), an address of any other family is not served.
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

/// Returns true if sockets of the protocol can be translated: the kernel has no connect hook for SCTP.
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

/// Returns true if a frontend has the policy, for sockets or packets.
fn leads_by(fronts: &LiteMap<FrontKey, FrontPlan>, policy: TrafficPolicy) -> bool {
    let mut policies = fronts
        .values()
        .flat_map(|front| [front.sockets, front.packets]);
    policies.any(|used| used == policy)
}

/// Returns the frontends of a port in the family of the cluster IP `ip`. An address of several kinds gets the
/// first kind.
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
            // As in kube-proxy, traffic from this node is not external.
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

/// Returns the frontends in a Service's plan. If several Services have a frontend, the one with the smallest
/// rank owns it.
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
