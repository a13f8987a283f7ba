use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::ObjectName;

/// The label of a Node with its zone.
pub const ZONE: &str = "topology.kubernetes.io/zone";

/// The label of a Node with its node pool (`OpenYurt`).
pub const NODE_POOL: &str = "apps.openyurt.io/nodepool";

/// A Node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Node {
    /// The name; no namespace.
    pub name: ObjectName,
    /// The creation time, in seconds since the epoch; decides between two Nodes with one address.
    pub created: Option<i64>,
    /// All labels.
    pub labels: BTreeMap<String, String>,
    /// Addresses of type InternalIP that are IP addresses, in the order of the object.
    pub internal_ips: Vec<IpAddr>,
    /// Other addresses that are IP addresses, of any type, in the order of the object.
    #[serde(default)]
    pub other_ips: Vec<IpAddr>,
    /// True if load balancers may send traffic to it: it is not being deleted and has no taint
    /// `ToBeDeletedByClusterAutoscaler` (kube-proxy `pkg/proxy/healthcheck/proxy_health.go`).
    pub eligible: bool,
}

/// A ConfigMap.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ConfigMap {
    /// Namespace and name.
    pub name: ObjectName,
    /// The text entries.
    pub data: BTreeMap<String, String>,
}

/// A ServiceCIDR: ranges from which cluster IPs are allocated.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServiceCidr {
    /// The name; no namespace.
    pub name: ObjectName,
    /// The ranges: address and prefix length.
    pub cidrs: Vec<(IpAddr, u8)>,
}
