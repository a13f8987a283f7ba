use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::ObjectName;

/// The label with the zone of a Node.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// The label of `OpenYurt` with the node pool of a Node.
pub const NODE_POOL_LABEL: &str = "apps.openyurt.io/nodepool";

/// A Node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Node {
    /// The name, without a namespace.
    pub name: ObjectName,
    /// The creation time, in seconds since the epoch. Of two Nodes with the same address, the older one
    /// owns it.
    pub created: Option<i64>,
    /// All labels.
    pub labels: BTreeMap<String, String>,
    /// Valid IP addresses of type InternalIP, in the order of the object.
    pub internal_ips: Vec<IpAddr>,
    /// Valid IP addresses of all other types, in the order of the object.
    #[serde(default)]
    pub other_ips: Vec<IpAddr>,
    /// True if load balancers may send traffic to the Node: it is not being deleted, and has no taint
    /// `ToBeDeletedByClusterAutoscaler` (kube-proxy `pkg/proxy/healthcheck/proxy_health.go`).
    pub eligible: bool,
}

/// A ConfigMap.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ConfigMap {
    /// Namespace and name.
    pub name: ObjectName,
    /// The entries of `data`.
    pub data: BTreeMap<String, String>,
}

/// A ServiceCIDR: address ranges from which cluster IPs are allocated.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServiceCidr {
    /// The name, without a namespace.
    pub name: ObjectName,
    /// The ranges, each as network address and prefix length.
    pub cidrs: Vec<(IpAddr, u8)>,
}
