use std::{net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Algorithm, ObjectName, Weights};

/// A Service that is served: it has cluster IPs. One without is not, and is here only for the
/// addresses that its load balancer has.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// Who it is among all Services that had this name, where the API server says; for what is told
    /// of it there.
    #[serde(default)]
    pub uid: Option<Arc<str>>,
    /// When it was created, in seconds since the epoch; decides between two Services that claim
    /// one address. A Service that doesn't say counts as the youngest.
    pub created: Option<i64>,
    /// Cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    #[serde(default)]
    pub external_ips: Vec<IpAddr>,
    /// The addresses of its load balancer that are served on the node (`ipMode` VIP).
    #[serde(default)]
    pub load_balancer_ips: Vec<IpAddr>,
    /// The addresses of its load balancer that nodes leave alone: those of `ipMode` Proxy, and all of
    /// a Service that isn't served.
    #[serde(default)]
    pub unserved_ips: Vec<IpAddr>,
    /// The sources that may use the addresses that are served; those of a family without any are all that may.
    #[serde(default)]
    pub source_ranges: Vec<(IpAddr, u8)>,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// Which endpoints the cluster IPs lead to.
    #[serde(default)]
    pub internal_policy: TrafficPolicy,
    /// Which endpoints everything else leads to, for clients outside of the cluster.
    #[serde(default)]
    pub external_policy: TrafficPolicy,
    /// How long a client keeps its endpoint, in seconds; 0 where it doesn't.
    #[serde(default)]
    pub affinity: u32,
    /// The port that tells load balancers whether this node has endpoints, where there is one.
    #[serde(default)]
    pub health_check_port: Option<u16>,
    /// How a backend is chosen (annotation `culvert.dev/algorithm`), where the Service says.
    #[serde(default)]
    pub algorithm: Option<Algorithm>,
    /// How much each endpoint is to get (annotation `culvert.dev/weights`); the same for all where
    /// the Service doesn't say.
    #[serde(default)]
    pub weights: Option<Arc<Weights>>,
    /// Whether sockets of this node leave it alone (annotation `culvert.dev/sockets`), so that it is
    /// for packets only.
    #[serde(default)]
    pub not_for_sockets: bool,
    /// Which endpoints it keeps to (annotation `openyurt.io/topologyKeys`); all where the Service
    /// doesn't say.
    #[serde(default)]
    pub keep_to: Option<KeepTo>,
}

impl Service {
    /// A Service of that name which has nothing yet.
    #[must_use]
    pub fn named(name: ObjectName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Whether it is served, rather than known for the addresses of its load balancer only.
    #[must_use]
    pub const fn is_served(&self) -> bool {
        !self.cluster_ips.is_empty()
    }

    /// All addresses of its load balancer (`status.loadBalancer.ingress[].ip`), whether nodes serve
    /// them or not.
    pub fn ingress_ips(&self) -> impl Iterator<Item = IpAddr> {
        let served = self.load_balancer_ips.iter();
        served.chain(&self.unserved_ips).copied()
    }
}

/// One port of a Service.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServicePort {
    /// The name; empty for the only port of a Service.
    pub name: Arc<str>,
    /// The port that clients dial on a cluster IP, in host byte order, never 0.
    pub port: u16,
    /// The port that clients dial on a node, in host byte order, where there is one.
    #[serde(default)]
    pub node_port: Option<u16>,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// Which of the addresses in `spec.externalIPs` are served. Whoever may make Services writes them, and
/// takes the traffic of this node to any address by it (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExternalIps {
    /// All, as kube-proxy does.
    #[default]
    Any,
    /// Those that the cluster has anyway: an address of the load balancer of some Service, or of some
    /// Node.
    Owned,
}

/// Which endpoints a Service keeps to, seen from each node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum KeepTo {
    /// Those of the node.
    Node,
    /// Those of the node pool that the node is in.
    Pool,
}

/// Whether it counts which endpoints Services keep to.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TopologyKeys {
    /// No: kube-proxy by itself knows nothing of it.
    #[default]
    Ignore,
    /// Yes, as behind `OpenYurt`'s yurthub, which keeps the other endpoints from kube-proxy.
    Honour,
}

/// Which endpoints traffic may go to.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum TrafficPolicy {
    /// All of them.
    #[default]
    Cluster,
    /// Those of the node that the traffic reaches.
    Local,
}
