use std::{net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Algorithm, ObjectName, Weights};

/// A Service. One with cluster IPs is served; one without is stored only for the addresses of its load
/// balancer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// The UID, if the API server has set it; for Events about the Service.
    #[serde(default)]
    pub uid: Option<Arc<str>>,
    /// The creation time, in seconds since the epoch; decides between two Services that claim one
    /// address. A Service without one is the youngest.
    pub created: Option<i64>,
    /// Cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    #[serde(default)]
    pub external_ips: Vec<IpAddr>,
    /// The addresses of its load balancer that nodes serve (`ipMode` VIP).
    #[serde(default)]
    pub load_balancer_ips: Vec<IpAddr>,
    /// The addresses of its load balancer that nodes leave alone: those of `ipMode` Proxy, and all of a
    /// Service that isn't served.
    #[serde(default)]
    pub unserved_ips: Vec<IpAddr>,
    /// The clients that may use the served addresses; all clients of a family without any range.
    #[serde(default)]
    pub source_ranges: Vec<(IpAddr, u8)>,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// The policy for cluster IPs.
    #[serde(default)]
    pub internal_policy: TrafficPolicy,
    /// The policy for all other addresses, for clients outside of the cluster.
    #[serde(default)]
    pub external_policy: TrafficPolicy,
    /// The time for which a client keeps its endpoint, in seconds; 0 for no affinity.
    #[serde(default)]
    pub affinity: u32,
    /// The port of the health check for load balancers, if there is one.
    #[serde(default)]
    pub health_check_port: Option<u16>,
    /// The algorithm (annotation `culvert.dev/algorithm`), if the Service has one.
    #[serde(default)]
    pub algorithm: Option<Algorithm>,
    /// The weights of the endpoints (annotation `culvert.dev/weights`); all equal if the Service has
    /// none.
    #[serde(default)]
    pub weights: Option<Arc<Weights>>,
    /// True if sockets of this node leave the Service alone (annotation `culvert.dev/socket-translation`), so that
    /// it is for packets only.
    #[serde(default)]
    pub not_for_sockets: bool,
    /// The restriction to some endpoints (annotation `openyurt.io/topologyKeys`), if the Service has
    /// one.
    #[serde(default)]
    pub keep_to: Option<KeepTo>,
}

impl Service {
    /// Returns a Service with nothing but a name.
    #[must_use]
    pub fn named(name: ObjectName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Returns true if the Service is served, and not only stored for the addresses of its load
    /// balancer.
    #[must_use]
    pub const fn is_served(&self) -> bool {
        !self.cluster_ips.is_empty()
    }

    /// Returns all addresses of its load balancer (`status.loadBalancer.ingress[].ip`), whether nodes
    /// serve them or not.
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
    /// The port that clients dial on a node, in host byte order, if there is one.
    #[serde(default)]
    pub node_port: Option<u16>,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// The addresses in `spec.externalIPs` that are served. Any author of Services can write them, and
/// thereby redirect the traffic of this node to any address (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExternalIps {
    /// All, as in kube-proxy.
    #[default]
    Any,
    /// Those that the cluster owns: an address of some Service's load balancer, or of some Node.
    Owned,
}

/// The restriction of a Service to some endpoints, relative to each node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum KeepTo {
    /// To the endpoints of the node.
    Node,
    /// To the endpoints of the node's pool.
    Pool,
}

/// The handling of such restrictions.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TopologyKeys {
    /// Ignored: kube-proxy by itself doesn't know them.
    #[default]
    Ignore,
    /// Honoured, as behind `OpenYurt`'s yurthub, which hides the other endpoints from kube-proxy.
    Honor,
}

/// The endpoints that traffic may reach.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum TrafficPolicy {
    /// All endpoints.
    #[default]
    Cluster,
    /// The endpoints of the node that the traffic reaches.
    Local,
}
