//! Computes the plan of one Service: the content that the maps should have for it. Pure: no I/O, no clock, no
//! randomness. `reconcile/desired_plans` has the plans of all Services, and updates those that a change
//! affects.
//!
//! - `endpoint_selection`: the endpoints of a service port that get traffic
//! - `endpoint_status`: the status of each endpoint, and its reason, for operators
//! - `external_ip_owners`: the Nodes and load balancers that own external IPs
//! - `frontend_owners`: the owner of a frontend that several Services have
//! - `health_checks`: the health checks of load balancers
//! - `local_node`: the zone and the addresses of this node
//! - `no_local_endpoints`: counts ports with a policy Local but no local endpoint
//! - `node_pools`: Services restricted to endpoints of this node or its node pool
//! - `slots`: the slots of each backend in a set
//! - `source_ranges`: the clients that may use the addresses of a load balancer
//! - `steering`: the addresses and ports that are steered to the tunnel

mod endpoint_selection;
mod endpoint_status;
mod external_ip_owners;
mod frontend_owners;
mod health_checks;
mod local_node;
mod no_local_endpoints;
mod node_pools;
mod slots;
mod source_ranges;
mod steering;

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    slice,
    sync::Arc,
};

pub use endpoint_status::{EndpointReason, EndpointStatus, endpoint_statuses};
pub use external_ip_owners::ExternalIpOwners;
pub use frontend_owners::{ClaimRank, FrontendOwners};
pub use health_checks::{HealthCheck, HealthCheckListeners, HealthChecks, plan_health_check};
use litemap::LiteMap;
pub use local_node::{LocalNode, NodePortAddresses};
pub use no_local_endpoints::{NoLocalEndpoints, count_no_local_endpoints};
pub use node_pools::NodePools;
pub use steering::{SteeringPlan, SteeringProblem, SteeringRules, plan_steering};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{Algorithm, FrontendKey, SourceRange},
};

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
pub struct BackendTarget {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: Port,
}

impl fmt::Display for BackendTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.address.to_ip(), self.port.to_host()).fmt(f)
    }
}

/// The content that the maps should have for one service port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortPlan {
    /// The addresses and ports that are translated.
    pub frontends: LiteMap<FrontendKey, FrontendPlan>,
    /// The slots of the set for policy Cluster: a backend of greater weight has more slots. Empty if no
    /// frontend has this policy.
    pub cluster: Vec<BackendTarget>,
    /// The slots of the set for policy Local. Empty if no frontend has this policy.
    pub local: Vec<BackendTarget>,
    /// True if the policy Cluster permits an endpoint. Without one, connects are refused. If there is one,
    /// but a frontend with policy Local has no backend, its destination is unreachable.
    pub has_endpoints: bool,
    /// All backends that serve new or open connections, in a set or not, in ascending order.
    pub serving: Vec<BackendTarget>,
    /// The algorithm that chooses a slot.
    pub algorithm: Algorithm,
    /// The timeout of client-IP affinity in seconds; 0 for no affinity.
    pub affinity_timeout: u32,
    /// True if sockets are not translated; the frontends are for packets only.
    pub socket_translation_disabled: bool,
    /// The clients that may use the addresses of the load balancer, as ascending and disjoint ranges. If
    /// empty, all clients may.
    pub source_ranges: Vec<SourceRange>,
}

impl PortPlan {
    /// Returns true if only the clients in `sources` may use a frontend.
    #[must_use]
    pub fn is_restricted(&self, frontend: &FrontendPlan) -> bool {
        frontend.kind == FrontendKind::LoadBalancerIp && !self.source_ranges.is_empty()
    }

    /// Returns the clients that may use the restricted frontends; empty if no frontend is restricted.
    #[must_use]
    pub fn used_source_ranges(&self) -> &[SourceRange] {
        let is_used = self
            .frontends
            .values()
            .any(|frontend| self.is_restricted(frontend));
        if is_used { &self.source_ranges } else { &[] }
    }

    /// Returns this plan with the client ranges `programmed`, which are in the maps already. Without any,
    /// restricted frontends are left out.
    #[must_use]
    pub fn with_source_ranges(&self, programmed: &[SourceRange]) -> Self {
        let mut plan = self.clone();
        if programmed.is_empty() {
            plan.frontends
                .retain(|_, frontend| !self.is_restricted(frontend));
        } else {
            plan.source_ranges = programmed.to_vec();
        }
        plan
    }

    /// Returns this plan with only the frontends and backends that the maps have already, and with only one
    /// slot per backend if `slots_are_short`. This needs no additional map entries, so it can be written when
    /// the maps are full.
    #[must_use]
    pub fn reduced_to(
        &self,
        has_frontend: impl Fn(&FrontendKey) -> bool,
        has_backend: impl Fn(&BackendTarget) -> bool,
        slots_are_short: bool,
    ) -> Self {
        let only = |targets: &[BackendTarget]| {
            let mut seen = BTreeSet::new();
            let known = targets.iter().copied().filter(&has_backend);
            let chosen = known.filter(|target| !slots_are_short || seen.insert(*target));
            chosen.collect()
        };
        let mut plan = Self {
            cluster: only(&self.cluster),
            local: only(&self.local),
            serving: only(&self.serving),
            ..self.clone()
        };
        plan.frontends.retain(|key, _| has_frontend(key));
        plan
    }
}

/// The plan of one frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontendPlan {
    /// The kind of the address.
    pub kind: FrontendKind,
    /// The traffic policy for sockets of this node, including those of its pods.
    pub socket_policy: TrafficPolicy,
    /// The traffic policy for packets from outside this node.
    pub packet_policy: TrafficPolicy,
    /// True if sockets of the host may use the frontend, if it is restricted; `None` if their source address
    /// is unknown.
    pub admits_host: Option<bool>,
    /// True if a process of this node listens on the address itself, so that sockets are not translated.
    pub has_listener: bool,
}

/// The kind of a frontend's address. If several Services have the address, the first kind in this order wins.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum FrontendKind {
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
pub struct NodeInfo {
    /// The name of this node's Node object.
    pub name: Arc<str>,
    /// The zone of this node, if its Node object has one.
    pub zone: Option<Arc<str>>,
    /// The addresses of this node that serve node ports.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The first internal address of each family in the Node object.
    pub primary_ips: BTreeSet<IpAddr>,
    /// The addresses of this node's links, except for loopback and link-local ones.
    pub link_addresses: BTreeSet<IpAddr>,
    /// The algorithm for Services that select none.
    pub default_algorithm: model::Algorithm,
}

/// The plans of a Service's ports. They are shared, since they are large compared to their names.
pub type ServicePlan = LiteMap<PortName, Arc<PortPlan>>;

/// Plans a Service: each of its ports in each family of its cluster IPs. As in kube-proxy
/// (`pkg/proxy/serviceport.go`, `newBaseServiceInfo`), an address of any other family is not served.
#[must_use]
pub fn plan_service(state: &ServiceState, node_info: &NodeInfo) -> ServicePlan {
    let service = &state.service;
    let families = service.cluster_ips.len();
    let mut plans = ServicePlan::with_capacity(families * service.ports.len());
    for ip in &service.cluster_ips {
        let ports = service.ports.iter();
        for port in ports.filter(|port| is_supported(port.protocol)) {
            let name = PortName {
                service: service.name.clone(),
                port: Arc::clone(&port.name),
                protocol: port.protocol,
                family: Family::of(*ip),
            };
            plans.insert(name, Arc::new(plan_port(state, *ip, port, node_info)));
        }
    }
    plans
}

/// Returns true if sockets of the protocol can be translated: the kernel has no connect hook for SCTP.
fn is_supported(protocol: Protocol) -> bool {
    protocol == Protocol::TCP || protocol == Protocol::UDP
}

fn plan_port(
    state: &ServiceState,
    ip: IpAddr,
    port: &ServicePort,
    node_info: &NodeInfo,
) -> PortPlan {
    let service = &state.service;
    let weights = service.weights.as_deref();
    let port_key = (&*port.name, port.protocol);
    let endpoints = endpoint_selection::select_endpoints(
        &state.slices,
        Family::of(ip),
        port_key,
        weights,
        node_info,
    );
    let sources = source_ranges::allowed_clients(service, Family::of(ip), node_info);
    let frontends = frontends_of_port(service, ip, port, (node_info, &sources));
    let has_endpoints = !endpoints.cluster.is_empty();
    let algorithm = service.algorithm.unwrap_or(node_info.default_algorithm);
    let used = |policy, targets: &BTreeSet<BackendTarget>| {
        if !has_policy(&frontends, policy) {
            return Vec::new();
        }
        slots::distribute_slots(algorithm, targets, &endpoints.weights)
    };
    PortPlan {
        cluster: used(TrafficPolicy::Cluster, &endpoints.cluster),
        local: used(TrafficPolicy::Local, &endpoints.local),
        frontends,
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
        affinity_timeout: service.affinity,
        socket_translation_disabled: service.socket_translation_disabled,
        source_ranges: sources,
    }
}

/// Returns true if a frontend has the policy, for sockets or packets.
fn has_policy(frontends: &LiteMap<FrontendKey, FrontendPlan>, policy: TrafficPolicy) -> bool {
    let mut policies = frontends
        .values()
        .flat_map(|frontend| [frontend.socket_policy, frontend.packet_policy]);
    policies.any(|used| used == policy)
}

/// Returns the frontends of a port in the family of the cluster IP `ip`. An address of several kinds gets the
/// first kind.
fn frontends_of_port(
    service: &model::Service,
    ip: IpAddr,
    port: &ServicePort,
    (node_info, sources): (&NodeInfo, &[SourceRange]),
) -> LiteMap<FrontendKey, FrontendPlan> {
    let key = |ip: IpAddr, number| {
        FrontendKey::new(Address::from_ip(ip), Port::from_host(number), port.protocol)
    };
    let frontend = |kind, ip| {
        let (socket_policy, packet_policy) = match kind {
            FrontendKind::ClusterIp => (service.internal_policy, service.internal_policy),
            // As in kube-proxy, traffic from this node is not external.
            FrontendKind::LoadBalancerIp | FrontendKind::ExternalIp | FrontendKind::NodePort => {
                (TrafficPolicy::Cluster, service.external_policy)
            }
        };
        let admits_host = if kind == FrontendKind::LoadBalancerIp && !sources.is_empty() {
            source_ranges::admits_host(sources, ip, node_info)
        } else {
            Some(true)
        };
        FrontendPlan {
            kind,
            socket_policy,
            packet_policy,
            admits_host,
            has_listener: false,
        }
    };
    let node_ports = port.node_port.into_iter();
    let node_ports = node_ports.flat_map(|number| {
        let ips = node_info.node_port_addresses.iter();
        ips.map(move |ip| (*ip, number, FrontendKind::NodePort))
    });
    let all = [
        (FrontendKind::ClusterIp, slice::from_ref(&ip)),
        (FrontendKind::LoadBalancerIp, &*service.load_balancer_ips),
        (FrontendKind::ExternalIp, &*service.external_ips),
    ];
    let all = all
        .into_iter()
        .flat_map(|(kind, ips)| ips.iter().map(move |ip| (*ip, port.port, kind)))
        .chain(node_ports);
    let mut frontends = LiteMap::with_capacity(1);
    for (other, number, kind) in all.filter(|(other, ..)| Family::of(*other) == Family::of(ip)) {
        frontends
            .entry(key(other, number))
            .or_insert_with(|| frontend(kind, other));
    }
    frontends
}

/// Returns the frontends in a Service's plan. If several Services have a frontend, the one with the smallest
/// rank owns it.
pub fn frontend_claims(
    state: &ServiceState,
    plan: &ServicePlan,
) -> impl Iterator<Item = (FrontendKey, ClaimRank, PortName)> {
    let created = state.service.created;
    plan.iter().flat_map(move |(name, port)| {
        port.frontends.iter().map(move |(key, frontend)| {
            (*key, ClaimRank::new(frontend.kind, created), name.clone())
        })
    })
}

#[cfg(test)]
mod tests;
