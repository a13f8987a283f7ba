//! The reference model of Service semantics: what a node serves, and what a new connection meets
//! there, computed from Kubernetes objects in the plainest way.
//!
//! It is an oracle for property tests. It shares no code with the product and is written from the
//! contract (the tables of Service semantics, kube-proxy 1.36 in nftables mode), so that a
//! misreading on one side shows as a difference. It is slow on purpose: every front is computed
//! from all objects anew.
//!
//! - [`address`]: addresses and ranges as Kubernetes writes them
//! - `objects`: which Services, ports and slices count
//! - `endpoints`: which endpoints a Service port has, and which of them it uses
//! - `destinations`: the addresses that a Service port is reached at
//! - `node`: what a Node object says
//! - `pools`: which endpoints OpenYurt keeps from a node
//! - `health`: health check node ports
//! - `verdict`: what a new connection to a front meets
//! - [`random`]: random clusters
//!
//! Left out, as it is not a matter of objects: which backend is chosen, masquerading, flows that
//! exist already, the rule for addresses in a ServiceCIDR without a Service, and VIPs that are left
//! alone as something listens on them locally.

pub mod address;
mod destinations;
mod endpoints;
mod health;
mod node;
mod objects;
mod pools;
pub mod random;
mod verdict;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use k8s_openapi::{
    api::{
        core::v1::{Node, Service, ServicePort},
        discovery::v1::EndpointSlice,
    },
    jiff::Timestamp,
};

use self::{
    address::{Cidr, Family},
    destinations::Destination,
};
pub use self::{
    health::{HealthCheck, health_check_node_ports},
    verdict::{Source, Verdict, verdict},
};

/// All objects of a cluster.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    pub services: Vec<Service>,
    pub slices: Vec<EndpointSlice>,
    pub nodes: Vec<Node>,
}

/// The node that is asked about, and its settings.
#[derive(Clone, Debug)]
pub struct Here {
    /// The name of the Node object.
    pub node: String,
    /// The addresses of the node's interfaces.
    ///
    /// The interface decides nothing: a loopback address is one of 127.0.0.0/8 or `::1`, and a
    /// service address that is held on `lo` is a local address like any other (kube-proxy
    /// `pkg/proxy/nftables/proxier.go`, `ip.IsLoopback()`).
    pub addresses: Vec<IpAddr>,
    /// The setting `nodePortAddresses`. Absent, it means the primary addresses and loopback; an empty
    /// list means all local addresses.
    pub node_port_addresses: Option<Vec<Entry>>,
    pub external_ips: ExternalIps,
    pub topology_keys: TopologyKeys,
}

/// One entry of `nodePortAddresses`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entry {
    Cidr(Cidr),
    Primary,
    Localhost,
    All,
}

/// The setting that says which external IPs are served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExternalIps {
    /// All, as kube-proxy does.
    Any,
    /// Only those that the cluster owns: an address in `status.loadBalancer` of some Service (any
    /// one of the cluster, whatever its `ipMode`), or an address of some Node (of any type). Neither
    /// can be written by whoever may only make Services, so nobody can take over an address that
    /// belongs to others outside (CVE-2020-8554).
    Owned,
}

/// The setting that says whether the annotation `openyurt.io/topologyKeys` counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TopologyKeys {
    Ignore,
    Honour,
}

/// A transport protocol that Services know.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// The Service port that a front belongs to.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Owner {
    pub namespace: String,
    pub service: String,
    /// The name of the port; empty if it has none.
    pub port: String,
    pub protocol: Protocol,
}

/// What kind of address a front has. The order is the precedence between two Services.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    ClusterIp,
    LoadBalancerIp,
    ExternalIp,
    NodePort,
}

/// A traffic policy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Policy {
    Cluster,
    Local,
}

/// Addresses and ports of endpoints.
pub type Set = BTreeSet<SocketAddr>;

/// What is dialled.
pub type Key = (IpAddr, u16, Protocol);

/// One address and port that the node translates.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Front {
    pub owner: Owner,
    pub kind: Kind,
    /// The address in the key.
    pub address: IpAddr,
    /// What policy Cluster chooses from. It is empty exactly if there is no usable endpoint on any
    /// node; where `policy` is Local and nothing is short-circuited, that is all it is read for.
    pub cluster: Set,
    /// What policy Local chooses from.
    pub local: Set,
    /// The internal traffic policy of a cluster IP, the external one of all other addresses.
    pub policy: Policy,
    /// The timeout of `sessionAffinity: ClientIP` in seconds; 0 for none.
    pub affinity: u32,
    /// Whom a load balancer's address admits; empty if all, and for all other kinds.
    pub source_ranges: Vec<Cidr>,
    /// The load balancer addresses of the Service port, of the front's family.
    pub load_balancer_ips: BTreeSet<IpAddr>,
    /// The primary address of the node, of the front's family.
    pub node_ip: Option<IpAddr>,
}

/// Which of two Services has an address that both claim: the least one wins. That is by the kind of
/// address, then the older Service, of which one that doesn't say when it was made is the youngest, then
/// by names. The name of the port is last; the API server admits no two ports of a Service that come to it.
type Precedence = (Kind, bool, Option<Timestamp>, Owner);

fn precedence(service: &Service, front: &Front) -> Precedence {
    let created = service.metadata.creation_timestamp.as_ref();
    let created = created.map(|time| time.0);
    (front.kind, created.is_none(), created, front.owner.clone())
}

/// All fronts of a node: of each address that several Service ports claim, the one that has it.
#[must_use]
pub fn fronts(cluster: &Cluster, here: &Here) -> BTreeMap<Key, Front> {
    let mut claims = Vec::new();
    for service in objects::counted_services(cluster) {
        for family in Family::BOTH {
            for port in objects::ports(service, family) {
                claims.extend(claims_of(cluster, here, (service, port), family));
            }
        }
    }
    claims.sort_by(|(_, a), (_, b)| a.0.cmp(&b.0));
    // The one that wins an address comes last, in the place of the others.
    let claims = claims.into_iter().rev();
    claims.map(|(key, (_, front))| (key, front)).collect()
}

/// What one port of a Service would be reached at, were it alone, for one family.
fn claims_of(
    cluster: &Cluster,
    here: &Here,
    (service, port): (&Service, &ServicePort),
    family: Family,
) -> Vec<(Key, (Precedence, Front))> {
    let Some(protocol) = objects::protocol(port.protocol.as_deref()) else {
        return Vec::new();
    };
    let owner = objects::owner(service, port.name.as_deref(), protocol);
    let usable = endpoints::endpoints(cluster, here, &owner, family);
    let zone = node::zone(cluster, here);
    let blank = Front {
        owner,
        kind: Kind::ClusterIp,
        address: family.unspecified(),
        cluster: endpoints::cluster_set(&usable, here, zone),
        local: endpoints::local_set(&usable),
        policy: Policy::Cluster,
        affinity: objects::affinity(service),
        source_ranges: Vec::new(),
        load_balancer_ips: destinations::load_balancer_ips(service, family),
        node_ip: node::primary(cluster, here, family),
    };
    let mut claims = Vec::new();
    for to in destinations::destinations(cluster, here, (service, port), family) {
        let front = front_at(blank.clone(), service, to);
        let precedence = precedence(service, &front);
        claims.push(((to.address, to.port, protocol), (precedence, front)));
    }
    claims
}

/// The front of a Service port at one of its addresses.
fn front_at(blank: Front, service: &Service, to: Destination) -> Front {
    Front {
        kind: to.kind,
        address: to.address,
        policy: objects::policy(service, to.kind),
        source_ranges: destinations::source_ranges(service, to.kind, Family::of(to.address)),
        ..blank
    }
}
