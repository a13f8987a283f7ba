use std::{net::IpAddr, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Algorithm, ObjectName, Weights};

/// A Service. It is served if it has cluster IPs; otherwise it is stored only for the addresses of its
/// load balancer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// The UID, for Events about the Service; `None` if unknown, as in files.
    #[serde(default)]
    pub uid: Option<Arc<str>>,
    /// The creation time, in seconds since the epoch. Of two Services that claim an address, the older
    /// one gets it; a Service without a creation time is the youngest.
    pub created: Option<i64>,
    /// The cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    #[serde(default)]
    pub external_ips: Vec<IpAddr>,
    /// Addresses of the load balancer that nodes serve (`ipMode` VIP).
    #[serde(default)]
    pub load_balancer_ips: Vec<IpAddr>,
    /// Addresses of the load balancer that nodes do not serve: those of `ipMode` Proxy, and all addresses
    /// if the Service isn't served.
    #[serde(default)]
    pub unserved_ips: Vec<IpAddr>,
    /// Address ranges of permitted clients, as network address and prefix length. A family without a
    /// range permits all clients.
    #[serde(default)]
    pub source_ranges: Vec<(IpAddr, u8)>,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// The traffic policy for cluster IPs.
    #[serde(default)]
    pub internal_policy: TrafficPolicy,
    /// The traffic policy for all other addresses; it applies to clients outside the cluster.
    #[serde(default)]
    pub external_policy: TrafficPolicy,
    /// The duration of client IP affinity in seconds; 0 without affinity.
    #[serde(default)]
    pub affinity: u32,
    /// `spec.healthCheckNodePort`, if the Service uses it.
    #[serde(default)]
    pub health_check_port: Option<u16>,
    /// The algorithm in the annotation `culvert.dev/algorithm`.
    #[serde(default)]
    pub algorithm: Option<Algorithm>,
    /// The weights in the annotation `culvert.dev/weights`; `None` if all endpoints are equal.
    #[serde(default)]
    pub weights: Option<Arc<Weights>>,
    /// True if the annotation `culvert.dev/socket-translation` disables the translation at sockets, so
    /// that only packets are translated.
    #[serde(default, rename = "not_for_sockets")]
    pub socket_translation_disabled: bool,
    /// The limit on endpoints in the annotation `openyurt.io/topologyKeys`.
    #[serde(default, rename = "keep_to")]
    pub endpoint_scope: Option<EndpointScope>,
}

impl Service {
    /// Creates a Service with all fields but the name at their defaults.
    #[must_use]
    pub fn named(name: ObjectName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Returns true if the Service has cluster IPs, and is not only stored for the addresses of its load
    /// balancer.
    #[must_use]
    pub const fn is_served(&self) -> bool {
        !self.cluster_ips.is_empty()
    }

    /// Returns all addresses of the load balancer (`status.loadBalancer.ingress[].ip`), served by nodes
    /// or not.
    pub fn ingress_ips(&self) -> impl Iterator<Item = IpAddr> {
        let served = self.load_balancer_ips.iter();
        served.chain(&self.unserved_ips).copied()
    }
}

/// A port of a Service.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServicePort {
    /// The name; may be empty if the Service has one port.
    pub name: Arc<str>,
    /// The port on the cluster IP, in host byte order; never 0.
    pub port: u16,
    /// The node port in host byte order, if any.
    #[serde(default)]
    pub node_port: Option<u16>,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// The addresses in `spec.externalIPs` that are served. Whoever may create a Service can put any address
/// there, and so redirect traffic of this node (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExternalIps {
    /// All addresses, as in kube-proxy.
    #[default]
    Any,
    /// Addresses that the cluster owns: those of a Service's load balancer or of a Node.
    Owned,
}

/// The endpoints that clients on a node may use, according to `openyurt.io/topologyKeys`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum EndpointScope {
    /// Endpoints on the node.
    Node,
    /// Endpoints in the node's pool.
    Pool,
}

/// The treatment of the annotation `openyurt.io/topologyKeys`.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TopologyKeys {
    /// Ignored, as in kube-proxy.
    #[default]
    Ignore,
    /// Honoured, as in `OpenYurt`, whose yurthub hides the other endpoints from kube-proxy.
    Honor,
}

/// The traffic policy of a Service: the endpoints that may be used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum TrafficPolicy {
    /// All endpoints.
    #[default]
    Cluster,
    /// Endpoints on the node that the traffic reaches.
    Local,
}
