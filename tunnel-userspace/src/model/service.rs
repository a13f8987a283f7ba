use std::{net::IpAddr, sync::Arc};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Algorithm, ObjectName, Weights};

/// A Service. If it has no cluster IPs, or another proxy serves it, it is stored only for its addresses.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Service {
    /// The namespace and name.
    pub name: ObjectName,
    /// The UID, which Events about the Service refer to; `None` if unknown, as for Services from files.
    #[serde(default)]
    pub uid: Option<Arc<str>>,
    /// The creation time, in seconds since the epoch. If two Services claim the same address, the older one
    /// gets it. A Service without a creation time counts as the youngest.
    pub created: Option<i64>,
    /// The cluster IPs, at most one per IP family.
    pub cluster_ips: Vec<IpAddr>,
    /// True if another proxy serves the Service (`service.kubernetes.io/service-proxy-name`).
    #[serde(default)]
    pub is_of_other_proxy: bool,
    /// The addresses in `spec.externalIPs`.
    #[serde(default)]
    pub external_ips: Vec<IpAddr>,
    /// The load balancer addresses that nodes serve (those whose `ipMode` is `VIP`).
    #[serde(default)]
    pub load_balancer_ips: Vec<IpAddr>,
    /// The load balancer addresses that nodes do not serve: those whose `ipMode` is `Proxy`, or all of them
    /// if the Service is not served.
    #[serde(default)]
    pub unserved_ips: Vec<IpAddr>,
    /// The address ranges of permitted clients, each as a network address and a prefix length. If there is no
    /// range for an IP family, all clients of that family are permitted.
    #[serde(default)]
    pub source_ranges: Vec<(IpAddr, u8)>,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// The traffic policy for cluster IPs.
    #[serde(default)]
    pub internal_policy: TrafficPolicy,
    /// The traffic policy for all other addresses. It applies to clients outside the cluster.
    #[serde(default)]
    pub external_policy: TrafficPolicy,
    /// The timeout for client IP affinity, in seconds; 0 if there is no affinity.
    #[serde(default)]
    pub affinity: u32,
    /// The port in `spec.healthCheckNodePort`, if the Service uses it.
    #[serde(default)]
    pub health_check_port: Option<u16>,
    /// The algorithm set by the `culvert.dev/algorithm` annotation.
    #[serde(default)]
    pub algorithm: Option<Algorithm>,
    /// The weights set by the `culvert.dev/weights` annotation; `None` if all endpoints have the same weight.
    #[serde(default)]
    pub weights: Option<Arc<Weights>>,
    /// True if the `culvert.dev/socket-translation` annotation disables translation at the socket, so that
    /// only packets are translated.
    #[serde(default, rename = "not_for_sockets")]
    pub socket_translation_disabled: bool,
    /// The subset of endpoints that clients may use, as set by the `openyurt.io/topologyKeys` annotation.
    #[serde(default, rename = "keep_to")]
    pub endpoint_scope: Option<EndpointScope>,
}

impl Service {
    /// Creates a Service with the given name and defaults for all other fields.
    #[must_use]
    pub fn named(name: ObjectName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Returns true if the Service has cluster IPs, and no other proxy serves it. Other Services are stored only for their
    /// addresses.
    #[must_use]
    pub const fn is_served(&self) -> bool {
        !self.cluster_ips.is_empty() && !self.is_of_other_proxy
    }

    /// Returns all load balancer addresses (`status.loadBalancer.ingress[].ip`), whether or not nodes serve
    /// them.
    pub fn ingress_ips(&self) -> impl Iterator<Item = IpAddr> {
        let served = self.load_balancer_ips.iter();
        served.chain(&self.unserved_ips).copied()
    }
}

/// A port of a Service.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServicePort {
    /// The port's name; may be empty if it is the Service's only port.
    pub name: Arc<str>,
    /// The port on the Service's addresses, in host byte order; never 0.
    pub port: u16,
    /// The node port, in host byte order, if there is one.
    #[serde(default)]
    pub node_port: Option<u16>,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// Determines which addresses in `spec.externalIPs` are served. Anyone who may create a Service can put any
/// address there, and so redirect this node's traffic (CVE-2020-8554).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExternalIps {
    /// Serves all addresses, as in kube-proxy.
    #[default]
    Any,
    /// Serves only addresses that the cluster owns: those of Nodes and of Services' load balancers.
    Owned,
}

/// Determines whether a node serves external IPs and load balancer addresses that are its own addresses. Anyone
/// who may create a Service can put a node's address into its external IPs, and so redirect the connections that
/// this node and its pods make to the node itself.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeAddresses {
    /// Does not serve them.
    #[default]
    Refuse,
    /// Serves them, as in kube-proxy.
    Serve,
}

/// The endpoints that clients on a node may use, as set by `openyurt.io/topologyKeys`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum EndpointScope {
    /// Only endpoints on the same node.
    Node,
    /// Only endpoints in the node's pool.
    Pool,
}

/// Determines if the `openyurt.io/topologyKeys` annotation is honoured.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TopologyKeys {
    /// The annotation is ignored, as in kube-proxy.
    #[default]
    Ignore,
    /// The annotation is honoured, as in OpenYurt, where yurthub hides all other endpoints from kube-proxy.
    Honor,
}

/// A Service's traffic policy, which decides which endpoints may be used.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum TrafficPolicy {
    /// All endpoints.
    #[default]
    Cluster,
    /// Only endpoints on the node that the traffic reaches.
    Local,
}
