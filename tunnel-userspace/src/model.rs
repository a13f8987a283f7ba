//! The Kubernetes objects that Culvert uses, as plain types that do not depend on the Kubernetes client
//! libraries.

mod algorithm;
mod cluster_update;
mod endpoint;
mod family;
mod flow_needs;
mod link_networks;
mod namespace;
mod node;
mod node_list;
mod object_warning;
mod pod;
mod protocol;
mod selector;
mod service;
mod steering;

#[cfg(test)]
pub(crate) mod fixture;

use std::{cmp::Ordering, fmt, sync::Arc};

pub use algorithm::{Algorithm, Weights};
pub use cluster_update::{ClusterUpdate, ServiceState};
pub use endpoint::{Endpoint, EndpointPort, EndpointSlice, Hints};
pub use family::{Family, PerFamily};
pub use flow_needs::FlowNeeds;
pub use link_networks::{LinkNetwork, LinkNetworks};
pub use namespace::intern_namespace;
pub use node::{ConfigMap, NODE_POOL_LABEL, Node, OwnNode, ServiceCidr, ZONE_LABEL};
pub use node_list::NodeList;
pub use object_warning::ObjectWarning;
pub use pod::{Pod, PodNamespaces};
pub use selector::{Selector, SelectorError};
use serde::{Deserialize, Serialize};
pub use service::{
    EndpointScope, ExternalIps, NodeAddresses, Service, ServicePort, TopologyKeys, TrafficPolicy,
};
pub use steering::{SteeringTarget, SteeringTargets};

/// The namespace and name of an object. The namespace is empty if the object is cluster-scoped.
#[derive(Clone, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct ObjectName {
    /// The namespace; empty for cluster-scoped objects.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl ObjectName {
    /// Creates an object name from a namespace and a name.
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl Ord for ObjectName {
    /// Compares by namespace, then by name. Equal pointers mean equal strings, so in that case the text need
    /// not be compared. Most of the names that are compared share a namespace, and many share the name, too.
    fn cmp(&self, other: &Self) -> Ordering {
        let order = |one: &Arc<str>, other: &Arc<str>| {
            if Arc::ptr_eq(one, other) {
                Ordering::Equal
            } else {
                one.cmp(other)
            }
        };
        order(&self.namespace, &other.namespace).then_with(|| order(&self.name, &other.name))
    }
}

impl PartialOrd for ObjectName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// A Kubernetes object of a kind that Culvert reads. Clones share the same object.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub enum Object {
    /// A Service. Services without cluster IPs and those assigned to other proxies are kept only for their
    /// load balancer addresses.
    Service(Arc<Service>),
    /// An EndpointSlice that contains IP addresses.
    EndpointSlice(Arc<EndpointSlice>),
    /// A Node.
    Node(Arc<Node>),
    /// A ConfigMap.
    ConfigMap(Arc<ConfigMap>),
    /// A ServiceCIDR.
    ServiceCidr(Arc<ServiceCidr>),
    /// A Pod.
    Pod(Arc<Pod>),
}

/// The kind and name that identify an object in the cluster.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ObjectId {
    /// The kind.
    pub kind: Kind,
    /// The name.
    pub name: ObjectName,
}

impl ObjectId {
    /// Creates an identifier from a kind and a name.
    #[must_use]
    pub const fn new(kind: Kind, name: ObjectName) -> Self {
        Self { kind, name }
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// A kind of Kubernetes object that Culvert reads.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Kind {
    /// The `v1` Service kind.
    Service,
    /// The `discovery.k8s.io/v1` EndpointSlice kind.
    EndpointSlice,
    /// The `v1` Node kind.
    Node,
    /// The `v1` ConfigMap kind.
    ConfigMap,
    /// The `networking.k8s.io/v1` ServiceCIDR kind.
    #[serde(rename = "ServiceCIDR")]
    ServiceCidr,
    /// The `v1` Pod kind.
    Pod,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
            Self::ConfigMap => "ConfigMap",
            Self::ServiceCidr => "ServiceCIDR",
            Self::Pod => "Pod",
        })
    }
}

impl Object {
    /// Returns the kind of the object.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Service(_) => Kind::Service,
            Self::EndpointSlice(_) => Kind::EndpointSlice,
            Self::Node(_) => Kind::Node,
            Self::ConfigMap(_) => Kind::ConfigMap,
            Self::ServiceCidr(_) => Kind::ServiceCidr,
            Self::Pod(_) => Kind::Pod,
        }
    }

    /// Returns the name of the object.
    #[must_use]
    pub fn name(&self) -> &ObjectName {
        match self {
            Self::Service(object) => &object.name,
            Self::EndpointSlice(object) => &object.name,
            Self::Node(object) => &object.name,
            Self::ConfigMap(object) => &object.name,
            Self::ServiceCidr(object) => &object.name,
            Self::Pod(object) => &object.name,
        }
    }

    /// Returns the identifier of the object.
    #[must_use]
    pub fn id(&self) -> ObjectId {
        ObjectId::new(self.kind(), self.name().clone())
    }
}
