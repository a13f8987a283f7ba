//! The reference model of Service semantics. From Kubernetes objects, it computes a node's frontends and the
//! outcomes of new connections in the simplest way possible.
//!
//! The model is the oracle for property tests. It shares no code with Culvert: both implement the same
//! contract (tables that describe the Service semantics of kube-proxy 1.36 in nftables mode), so if one of
//! them gets a rule wrong, the results differ. "Contract §N" in comments refers to section N of these tables.
//! The model is intentionally slow: it computes every frontend from all objects.
//!
//! - [`address`]: addresses and ranges in Kubernetes notation
//! - `objects`: the proxied Services, their ports and slices, and parsers for their fields
//! - `endpoints`: a Service port's endpoints and backend sets
//! - `destinations`: the addresses and ports at which a Service port is served
//! - `node`: fields of Node objects
//! - `pools`: the endpoints that OpenYurt's topology filter hides from a node
//! - `health`: health check node ports
//! - `verdict`: the outcome of a new connection to a frontend
//! - `masquerade`: the connections whose backend sees the node's address
//! - [`random`]: random clusters
//!
//! The model omits rules that don't depend on objects: the choice among backends, existing flows, addresses in a ServiceCIDR that belong to no Service, and VIPs that a local process listens on.

pub mod address;
mod destinations;
mod endpoints;
mod health;
mod masquerade;
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
    masquerade::{is_masqueraded, is_pod_masqueraded},
    verdict::{ConnectionSource, Verdict, verdict},
};

/// All objects in a cluster.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    pub services: Vec<Service>,
    pub slices: Vec<EndpointSlice>,
    pub nodes: Vec<Node>,
}

/// The node for which the model computes frontends, and its settings.
#[derive(Clone, Debug)]
pub struct LocalNode {
    /// The name of the node's Node object.
    pub node: String,
    /// The addresses of the node's interfaces.
    ///
    /// It doesn't matter which interface has an address. Loopback addresses are 127.0.0.0/8 and `::1`; any
    /// other address on `lo` is an ordinary local address (see `ip.IsLoopback()` in kube-proxy's
    /// `pkg/proxy/nftables/proxier.go`).
    pub addresses: Vec<IpAddr>,
    /// The setting `nodePortAddresses`. If it is absent, node ports are served on the primary and loopback
    /// addresses; if it is empty, on all local addresses.
    pub node_port_addresses: Option<Vec<NodePortEntry>>,
    pub external_ips: ExternalIps,
    pub own_addresses: OwnAddresses,
    pub topology_keys: TopologyKeys,
    pub local_senders: LocalSenders,
    pub masquerade_all: bool,
}

/// The setting that decides which senders are pods (contract §6b, "local detector modes").
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LocalSenders {
    /// Those with an address in a range. If an address family has no range, its senders are not distinguished, as with no
    /// ranges at all.
    InRanges(Vec<Cidr>),
    /// Those behind certain links of the node, which are no uplinks: no packet that arrives on an uplink is one of them.
    BehindLinks,
}

/// An entry of `nodePortAddresses`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodePortEntry {
    Cidr(Cidr),
    Primary,
    Localhost,
    All,
}

/// The setting that selects which external IPs are served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExternalIps {
    /// All external IPs, as in kube-proxy.
    Any,
    /// Only external IPs that the cluster owns: addresses in any Service's `status.loadBalancer` (with any
    /// `ipMode`), and addresses of any Node (of any type). A user who may only create Services can write
    /// neither, and so can't take over someone else's address (CVE-2020-8554).
    Owned,
}

/// The setting that decides whether external IPs are served on the node that has them on an interface, and load
/// balancer addresses on the node that also has them in its Node object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OwnAddresses {
    Refuse,
    /// As in kube-proxy.
    Serve,
}

/// The setting that decides whether the annotation `openyurt.io/topologyKeys` is honoured.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TopologyKeys {
    Ignore,
    Honor,
}

/// The transport protocol of a Service port.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// The Service port that a frontend belongs to.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Owner {
    pub namespace: String,
    pub service: String,
    /// The name of the port; empty if it has none.
    pub port: String,
    pub protocol: Protocol,
}

/// The kind of a frontend's address. If two Services claim the same address, the kind listed first wins.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum AddressKind {
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

/// A set of endpoints, each given by its address and port.
pub type EndpointSet = BTreeSet<SocketAddr>;

/// The address, port and protocol of a frontend.
pub type Key = (IpAddr, u16, Protocol);

/// A frontend: an address and port that the node translates.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frontend {
    pub owner: Owner,
    pub kind: AddressKind,
    /// The address in the frontend's [`Key`].
    pub address: IpAddr,
    /// The endpoints that traffic policy `Cluster` selects. This set is empty if and only if no node has a
    /// usable endpoint.
    pub cluster: EndpointSet,
    /// The endpoints that traffic policy `Local` selects.
    pub local: EndpointSet,
    /// The internal traffic policy for a cluster IP, or the external one for any other address.
    pub policy: Policy,
    /// The timeout for `sessionAffinity: ClientIP`, in seconds; 0 without affinity.
    pub affinity: u32,
    /// The source ranges for a load balancer address. The list is empty if all clients are permitted, and
    /// always for other kinds of address.
    pub source_ranges: Vec<Cidr>,
    /// The Service's load balancer addresses in the frontend's family.
    pub load_balancer_ips: BTreeSet<IpAddr>,
    /// The node's primary address in the frontend's family.
    pub node_ip: Option<IpAddr>,
}

/// The precedence among Services that claim the same address; the lowest value wins. It depends first on the
/// kind of address, then on the creation time (a Service without one counts as the youngest), then on the
/// names. The port's name comes last and never matters, since the API server doesn't let a Service have two
/// ports with the same number and protocol.
type Precedence = (AddressKind, bool, Option<Timestamp>, Owner);

fn precedence(service: &Service, frontend: &Frontend) -> Precedence {
    let created = service.metadata.creation_timestamp.as_ref();
    let created = created.map(|time| time.0);
    (
        frontend.kind,
        created.is_none(),
        created,
        frontend.owner.clone(),
    )
}

/// Returns all of a node's frontends. If several Services claim the same key, the one with precedence wins.
#[must_use]
pub fn frontends(cluster: &Cluster, here: &LocalNode) -> BTreeMap<Key, Frontend> {
    let mut claims = Vec::new();
    for service in objects::proxied_services(cluster) {
        for family in Family::BOTH {
            for port in objects::ports(service, family) {
                claims.extend(claims_of(cluster, here, (service, port), family));
            }
        }
    }
    claims.sort_by(|(_, a), (_, b)| a.0.cmp(&b.0));
    // `collect` keeps the last of several claims to the same key, so the claim with precedence must be last.
    let claims = claims.into_iter().rev();
    claims.map(|(key, (_, frontend))| (key, frontend)).collect()
}

/// Returns the frontends that a Service port claims in one address family.
fn claims_of(
    cluster: &Cluster,
    here: &LocalNode,
    (service, port): (&Service, &ServicePort),
    family: Family,
) -> Vec<(Key, (Precedence, Frontend))> {
    let Some(protocol) = objects::protocol(port.protocol.as_deref()) else {
        return Vec::new();
    };
    let owner = objects::owner(service, port.name.as_deref(), protocol);
    let usable = endpoints::endpoints(cluster, here, &owner, family);
    let zone = node::zone(cluster, here);
    let template = Frontend {
        owner,
        kind: AddressKind::ClusterIp,
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
        let frontend = frontend_at(template.clone(), service, to);
        let precedence = precedence(service, &frontend);
        claims.push(((to.address, to.port, protocol), (precedence, frontend)));
    }
    claims
}

/// Returns a Service port's frontend at one of its addresses.
fn frontend_at(template: Frontend, service: &Service, to: Destination) -> Frontend {
    Frontend {
        kind: to.kind,
        address: to.address,
        policy: objects::policy(service, to.kind),
        source_ranges: destinations::source_ranges(service, to.kind, Family::of(to.address)),
        ..template
    }
}
