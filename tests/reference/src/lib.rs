//! The reference model of Service semantics: the frontends of a node and the result of a new connection,
//! computed from Kubernetes objects in the simplest way.
//!
//! It is an oracle for property tests. It shares no code with the product and is written from the
//! contract (the tables of Service semantics, kube-proxy 1.36 in nftables mode), so that a misreading on
//! one side shows as a difference. It is intentionally slow: every front is computed from all objects.
//!
//! - [`address`]: addresses and ranges in Kubernetes' notation
//! - `objects`: the Services, ports and slices that count
//! - `endpoints`: the endpoints of a Service port, and the selection among them
//! - `destinations`: the addresses of a Service port
//! - `node`: the fields of a Node object
//! - `pools`: the endpoints that OpenYurt hides from a node
//! - `health`: health check node ports
//! - `verdict`: the result of a new connection to a front
//! - [`random`]: random clusters
//!
//! Omitted, since objects do not decide it: the choice among backends, masquerading, existing flows, the
//! rule for addresses in a ServiceCIDR without a Service, and VIPs with a local listener.

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

/// The node whose view is computed, and its settings.
#[derive(Clone, Debug)]
pub struct Here {
    /// The name of the Node object.
    pub node: String,
    /// The addresses of the node's interfaces.
    ///
    /// The interface is irrelevant: a loopback address is one of 127.0.0.0/8 or `::1`, and a service
    /// address on `lo` is a local address like any other (kube-proxy `pkg/proxy/nftables/proxier.go`,
    /// `ip.IsLoopback()`).
    pub addresses: Vec<IpAddr>,
    /// The setting `nodePortAddresses`: absent means the primary addresses and loopback, an empty list
    /// all local addresses.
    pub node_port_addresses: Option<Vec<Entry>>,
    pub external_ips: ExternalIps,
    pub topology_keys: TopologyKeys,
}

/// An entry of `nodePortAddresses`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entry {
    Cidr(Cidr),
    Primary,
    Localhost,
    All,
}

/// The setting for the external IPs that are served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExternalIps {
    /// All external IPs, as in kube-proxy.
    Any,
    /// Only those that the cluster owns: an address in `status.loadBalancer` of any Service (with any
    /// `ipMode`), or an address of any Node (of any type). A user who may only create Services can write
    /// neither, and so can't take over an address of others outside (CVE-2020-8554).
    Owned,
}

/// The setting for the annotation `openyurt.io/topologyKeys`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TopologyKeys {
    Ignore,
    Honor,
}

/// A transport protocol of Services.
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

/// The kind of a front's address. The order is the precedence between two Services.
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

/// The addresses and ports of endpoints.
pub type Set = BTreeSet<SocketAddr>;

/// The dialled address, port and protocol.
pub type Key = (IpAddr, u16, Protocol);

/// An address and port that the node translates.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Front {
    pub owner: Owner,
    pub kind: Kind,
    /// The address in the key.
    pub address: IpAddr,
    /// The endpoints of policy Cluster. The set is empty exactly if no node has a usable endpoint; if
    /// `policy` is Local and there is no short-circuit, only that is read.
    pub cluster: Set,
    /// The endpoints of policy Local.
    pub local: Set,
    /// The internal traffic policy of a cluster IP, the external one of all other addresses.
    pub policy: Policy,
    /// The timeout of `sessionAffinity: ClientIP` in seconds; 0 for none.
    pub affinity: u32,
    /// The permitted clients of a load balancer's address; empty for all clients, and for other kinds.
    pub source_ranges: Vec<Cidr>,
    /// The load balancer addresses of the Service port, of the front's family.
    pub load_balancer_ips: BTreeSet<IpAddr>,
    /// The primary address of the node, of the front's family.
    pub node_ip: Option<IpAddr>,
}

/// The precedence between two Services that claim one address; the least value wins. It compares the
/// kind of address, then the creation time (one without a time is the youngest), then the names. The
/// name of the port is last; the API server permits no two ports of a Service that reach it.
type Precedence = (Kind, bool, Option<Timestamp>, Owner);

fn precedence(service: &Service, front: &Front) -> Precedence {
    let created = service.metadata.creation_timestamp.as_ref();
    let created = created.map(|time| time.0);
    (front.kind, created.is_none(), created, front.owner.clone())
}

/// Returns all fronts of a node; an address with several claims belongs to the winner.
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
    // The last claim of a key replaces the others, so the winner must come last.
    let claims = claims.into_iter().rev();
    claims.map(|(key, (_, front))| (key, front)).collect()
}

/// Returns the claims of a Service port in one family, as if it were the only one.
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

/// Returns the front of a Service port at one of its addresses.
fn front_at(blank: Front, service: &Service, to: Destination) -> Front {
    Front {
        kind: to.kind,
        address: to.address,
        policy: objects::policy(service, to.kind),
        source_ranges: destinations::source_ranges(service, to.kind, Family::of(to.address)),
        ..blank
    }
}
