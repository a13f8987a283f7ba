//! Computes the plan for one Service: the contents that the maps should have for it. Pure: no I/O, no clock,
//! no randomness. `reconcile/desired_plans` holds the plans for all Services, and updates those that a change
//! affects.
//!
//! - `address_index`: indexes objects by their addresses
//! - `endpoint_selection`: selects the endpoints of a service port that get traffic
//! - `endpoint_status`: determines each endpoint's status and the reason for it, for operators
//! - `external_ip_owners`: tracks the Nodes and load balancers that own external IPs
//! - `frontend_owners`: determines which Service owns a frontend that several Services claim
//! - `health_checks`: plans the health checks that load balancers use
//! - `local_node`: tracks this node's zone and addresses
//! - `no_local_endpoints`: counts service ports with traffic policy `Local` but no local endpoint
//! - `node_pools`: restricts Services to endpoints on this node or in its node pool
//! - `planned_endpoints`: stores the endpoints in a plan, shared by the ports of a Service
//! - `slots`: distributes the slots of a backend set among its backends
//! - `source_ranges`: determines which clients may use a load balancer's addresses
//! - `steering`: plans which addresses and ports are steered to the tunnel

mod address_index;
mod endpoint_selection;
mod endpoint_status;
mod external_ip_owners;
mod frontend_owners;
mod health_checks;
mod local_node;
mod no_local_endpoints;
mod node_pools;
mod planned_endpoints;
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

use endpoint_selection::EndpointSelector;
pub use endpoint_status::{EndpointReason, EndpointStatus, endpoint_statuses};
pub use external_ip_owners::ExternalIpOwners;
pub use frontend_owners::{ClaimRank, FrontendOwners};
pub use health_checks::{HealthCheck, HealthCheckListeners, HealthChecks, plan_health_check};
use litemap::LiteMap;
pub use local_node::{LocalNode, NodePortAddresses};
pub use no_local_endpoints::{NoLocalEndpoints, count_no_local_endpoints};
pub use node_pools::NodePools;
pub use planned_endpoints::{PlannedEndpoint, PlannedEndpoints};
pub use slots::{SlotLayout, WeightedTarget};
pub use steering::{
    AddressHolders, KnownAddresses, SteeringInputs, SteeringPlan, SteeringProblem, SteeringRules,
    claims_address, plan_steering,
};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{Algorithm, FrontendKey, Membership, SourceRange},
};

use crate::model::{
    self, Family, NodeAddresses, ObjectName, ServicePort, ServiceState, TrafficPolicy,
};

/// Identifies a service port, that is, a Service's port in one address family. As in kube-proxy
/// (`pkg/proxy/serviceport.go`), the port is identified by its name and protocol, not by its number.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortName {
    /// The Service's namespace and name.
    pub service: ObjectName,
    /// The port's name in the Service; empty if the port is unnamed.
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

/// The contents that the maps should have for one service port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortPlan {
    /// The frontends, keyed by the address, port and protocol that clients connect to.
    pub frontends: LiteMap<FrontendKey, FrontendPlan>,
    /// The endpoints that serve new or open connections, and the sets that contain them. A set is written only
    /// if a frontend has the corresponding traffic policy.
    pub endpoints: PlannedEndpoints,
    /// True if traffic policy `Cluster` permits at least one endpoint. Determines the error for connections
    /// to a frontend that has no backends: "host unreachable" if true (there are endpoints, but none is
    /// local), or "connection refused" if false.
    pub has_endpoints: bool,
    /// The algorithm that chooses a slot for each new connection.
    pub algorithm: Algorithm,
    /// The timeout for client-IP affinity in seconds; 0 if there is no affinity.
    pub affinity_timeout: u32,
    /// True if sockets are not translated, so that the frontends apply to packets only.
    pub socket_translation_disabled: bool,
    /// The clients that may use the load balancer's addresses, as disjoint ranges in ascending order. If
    /// empty, all clients may use them.
    pub source_ranges: Arc<[SourceRange]>,
}

impl PortPlan {
    /// Returns true if only the clients in `source_ranges` may use a frontend.
    #[must_use]
    pub fn is_restricted(&self, frontend: &FrontendPlan) -> bool {
        frontend.kind == FrontendKind::LoadBalancerIp && !self.source_ranges.is_empty()
    }

    /// Returns the source ranges that restrict this port's frontends, or an empty slice if no frontend is
    /// restricted.
    #[must_use]
    pub fn used_source_ranges(&self) -> &[SourceRange] {
        let is_used = self
            .frontends
            .values()
            .any(|frontend| self.is_restricted(frontend));
        if is_used { &self.source_ranges } else { &[] }
    }

    /// Returns this plan with its source ranges replaced by `programmed`, the ranges that are already in the
    /// maps. If `programmed` is empty, restricted frontends are left out.
    #[must_use]
    pub fn with_source_ranges(&self, programmed: Arc<[SourceRange]>) -> Self {
        let mut plan = self.clone();
        if programmed.is_empty() {
            plan.frontends
                .retain(|_, frontend| !self.is_restricted(frontend));
        } else {
            plan.source_ranges = programmed;
        }
        plan
    }

    /// Returns the backend sets that the frontends use.
    #[must_use]
    pub fn used_sets(&self) -> Membership {
        let sets = [
            (TrafficPolicy::Cluster, Membership::CLUSTER),
            (TrafficPolicy::Local, Membership::LOCAL),
        ];
        let used = sets.into_iter();
        let used = used.filter(|(policy, _)| has_policy(&self.frontends, *policy));
        used.fold(Membership::NONE, |sets, (_, set)| sets.union(set))
    }
}

/// The plan for one frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FrontendPlan {
    /// The kind of address.
    pub kind: FrontendKind,
    /// The traffic policy for sockets on this node, including those in its pods.
    pub socket_policy: TrafficPolicy,
    /// The traffic policy for packets from outside this node.
    pub packet_policy: TrafficPolicy,
    /// True if sockets in the host's network namespace may use the frontend, as they always may if it is not
    /// restricted. `None` if their source address is unknown.
    pub admits_host: Option<bool>,
    /// True if a process on this node listens on the frontend's address itself, so that sockets are not
    /// translated.
    pub has_listener: bool,
}

/// The kind of a frontend's address. If several Services claim the same frontend, the claim whose kind comes
/// first in this enum wins.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum FrontendKind {
    /// A cluster IP.
    ClusterIp,
    /// An address of the Service's load balancer.
    LoadBalancerIp,
    /// An address in `spec.externalIPs`.
    ExternalIp,
    /// One of this node's addresses, with a node port.
    NodePort,
}

/// The inputs to a plan that come from this node and its config.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeInfo {
    /// The name of this node's Node object.
    pub name: Arc<str>,
    /// This node's zone, if its Node object has one.
    pub zone: Option<Arc<str>>,
    /// The addresses of this node on which node ports are served.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// The first internal address of each family in the Node object.
    pub primary_ips: BTreeSet<IpAddr>,
    /// The addresses of this node's links, except for loopback and link-local ones.
    pub link_addresses: BTreeSet<IpAddr>,
    /// All addresses in this node's Node object.
    pub status_addresses: BTreeSet<IpAddr>,
    /// Determines whether external IPs and load balancer addresses are served if they are addresses of this
    /// node.
    pub node_addresses: NodeAddresses,
    /// The algorithm for Services that don't select one.
    pub default_algorithm: model::Algorithm,
    /// True if packets are translated. Without that, SCTP ports are not planned, because sockets of SCTP meet no hook.
    pub translates_packets: bool,
}

impl NodeInfo {
    /// Returns true if an address of a Service is not served, because it is an address of this node.
    ///
    /// A user who may create Services may choose any external IP, so an external IP may be none of the
    /// addresses of this node's links. The status of a Service can be written only by the load balancer, which
    /// may have put the address on a link itself. A load balancer address is therefore refused only if it is
    /// also in the Node object, or if there is no Node object with addresses.
    #[must_use]
    pub fn refuses(&self, kind: FrontendKind, ip: &IpAddr) -> bool {
        let of_node = &self.status_addresses;
        let may_be_refused = match kind {
            FrontendKind::ClusterIp | FrontendKind::NodePort => false,
            FrontendKind::LoadBalancerIp => of_node.is_empty() || of_node.contains(ip),
            FrontendKind::ExternalIp => true,
        };
        may_be_refused
            && self.node_addresses == NodeAddresses::Refuse
            && self.link_addresses.contains(ip)
    }
}

/// The plans for a Service's ports. Each plan is reference-counted, since it is large compared with its name.
pub type ServicePlan = LiteMap<PortName, Arc<PortPlan>>;

/// Plans each of a Service's ports in each address family for which the Service has a cluster IP. As in
/// kube-proxy (`pkg/proxy/serviceport.go`, `newBaseServiceInfo`), addresses of any other family are not
/// served.
#[must_use]
pub fn plan_service(state: &ServiceState, node_info: &NodeInfo) -> ServicePlan {
    let service = &state.service;
    let families = service.cluster_ips.len();
    let mut plans = ServicePlan::with_capacity(families * service.ports.len());
    let mut selector = EndpointSelector::new(state, node_info);
    for ip in &service.cluster_ips {
        let family = Family::of(*ip);
        let sources = source_ranges::allowed_clients(service, family, node_info);
        let sources: Arc<[SourceRange]> = sources.into();
        let is_served =
            |port: &&ServicePort| port.protocol != Protocol::SCTP || node_info.translates_packets;
        for port in service.ports.iter().filter(is_served) {
            let name = PortName {
                service: service.name.clone(),
                port: Arc::clone(&port.name),
                protocol: port.protocol,
                family,
            };
            let endpoints = selector.select(family, (&port.name, port.protocol));
            let frontends = frontends_of_port(service, *ip, port, (node_info, &sources));
            let plan = plan_port(service, frontends, endpoints, (node_info, &sources));
            plans.insert(name, Arc::new(plan));
        }
    }
    plans
}

fn plan_port(
    service: &model::Service,
    frontends: LiteMap<FrontendKey, FrontendPlan>,
    endpoints: PlannedEndpoints,
    (node_info, sources): (&NodeInfo, &Arc<[SourceRange]>),
) -> PortPlan {
    PortPlan {
        frontends,
        has_endpoints: endpoints.has_any_in(Membership::CLUSTER),
        endpoints,
        algorithm: match service.algorithm.unwrap_or(node_info.default_algorithm) {
            model::Algorithm::Random => Algorithm::RANDOM,
            model::Algorithm::RoundRobin => Algorithm::ROUND_ROBIN,
            model::Algorithm::SourceHash => Algorithm::SOURCE_HASH,
            model::Algorithm::DestinationHash => Algorithm::DESTINATION_HASH,
            model::Algorithm::Maglev => Algorithm::MAGLEV,
            model::Algorithm::LeastConn => Algorithm::LEAST_CONN,
        },
        affinity_timeout: service.affinity,
        socket_translation_disabled: service.socket_translation_disabled,
        source_ranges: Arc::clone(sources),
    }
}

/// Returns true if any frontend has this policy, for sockets or for packets.
fn has_policy(frontends: &LiteMap<FrontendKey, FrontendPlan>, policy: TrafficPolicy) -> bool {
    let mut policies = frontends
        .values()
        .flat_map(|frontend| [frontend.socket_policy, frontend.packet_policy]);
    policies.any(|used| used == policy)
}

/// Returns a port's frontends in the address family of the cluster IP `ip`. An address of several kinds gets
/// the kind that comes first in [`FrontendKind`].
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
            // As in kube-proxy, traffic from this node does not count as external.
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
        .filter(|(ip, _, kind)| !node_info.refuses(*kind, ip))
        .chain(node_ports);
    let mut frontends = LiteMap::with_capacity(1);
    for (other, number, kind) in all.filter(|(other, ..)| Family::of(*other) == Family::of(ip)) {
        frontends
            .entry(key(other, number))
            .or_insert_with(|| frontend(kind, other));
    }
    frontends
}

/// Returns a Service's claims: each frontend in its plan, with the claim's rank and the service port's name.
/// If several Services claim the same frontend, the claim with the lowest rank wins.
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
