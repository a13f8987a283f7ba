use std::{collections::BTreeMap, net::IpAddr};

use serde::{Deserialize, Serialize};

use super::ObjectName;

/// The label that holds a Node's zone.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// The OpenYurt label that names the node pool that a Node belongs to.
pub const NODE_POOL_LABEL: &str = "apps.openyurt.io/nodepool";

/// A Node.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Node {
    /// The Node's name; its namespace is empty.
    pub name: ObjectName,
    /// All labels.
    pub labels: BTreeMap<String, String>,
    /// The valid IP addresses of type `InternalIP`, in the same order as in the object.
    pub internal_ips: Vec<IpAddr>,
    /// The valid IP addresses of all other types, in the same order as in the object.
    #[serde(default)]
    pub other_ips: Vec<IpAddr>,
    /// The ranges of its pods' addresses (`spec.podCIDRs`), each as a network address and a prefix length.
    #[serde(default)]
    pub pod_cidrs: Vec<(IpAddr, u8)>,
    /// True if load balancers may send traffic to the Node: it is not being deleted, and it does not have the
    /// taint `ToBeDeletedByClusterAutoscaler` (kube-proxy `pkg/proxy/healthcheck/proxy_health.go`).
    pub eligible: bool,
}

/// The addresses in this node's Node object.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct OwnNode {
    /// The ranges of its pods' addresses, each as a network address and a prefix length.
    pub pod_cidrs: Vec<(IpAddr, u8)>,
    /// The addresses of type `InternalIP`, in the same order as in the object.
    pub internal_ips: Vec<IpAddr>,
}

impl OwnNode {
    /// Returns the addresses of a Node.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        Self {
            pod_cidrs: node.pod_cidrs.clone(),
            internal_ips: node.internal_ips.clone(),
        }
    }
}

/// A ConfigMap.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ConfigMap {
    /// The namespace and name.
    pub name: ObjectName,
    /// The entries in the `data` field.
    pub data: BTreeMap<String, String>,
}

/// A ServiceCIDR: the address ranges from which cluster IPs are allocated.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServiceCidr {
    /// The ServiceCIDR's name; its namespace is empty.
    pub name: ObjectName,
    /// The address ranges, each as a network address and a prefix length.
    pub cidrs: Vec<(IpAddr, u8)>,
}
