use std::{net::IpAddr, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Family, ObjectName};

/// An EndpointSlice: endpoints of one Service and one IP family, not necessarily all of them.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointSlice {
    /// Namespace and name.
    pub name: ObjectName,
    /// The Service of the slice (label `kubernetes.io/service-name`), in the same namespace.
    pub service: ObjectName,
    /// The IP family of all addresses.
    pub family: Family,
    /// The ports of each endpoint.
    pub ports: Vec<EndpointPort>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// The time when a Pod or Service changed, so that this version was written; `None` if unknown. Used
    /// to measure the delay until the maps are updated.
    #[serde(default)]
    pub triggered: Option<Timestamp>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointPort {
    /// The name of the Service's port; empty for the unnamed one.
    pub name: Arc<str>,
    /// The port on which the endpoints listen, in host byte order; never 0.
    pub port: u16,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// An endpoint. Missing conditions have the defaults of kube-proxy: ready and serving, not terminating
/// (`pkg/proxy/endpointschangetracker.go`).
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Endpoint {
    /// The first of the endpoint's addresses.
    pub address: IpAddr,
    /// True if the endpoint accepts new connections.
    pub ready: bool,
    /// True if the endpoint responds, ready or not.
    pub serving: bool,
    /// True if the Pod is being stopped.
    pub terminating: bool,
    /// The name of the Pod, if known.
    #[serde(default)]
    pub name: Option<Arc<str>>,
    /// The name of the node, if known.
    pub node: Option<Arc<str>>,
    /// The zone, if known.
    #[serde(default)]
    pub zone: Option<Arc<str>>,
    /// The clients that should use the endpoint; `None` if the object has no hints.
    #[serde(default)]
    pub hints: Option<Arc<Hints>>,
}

impl Endpoint {
    /// Returns true if the endpoint is terminating but still serving. It gets new connections only while
    /// no endpoint is ready.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        self.serving && self.terminating
    }
}

/// Topology hints: the clients that should use an endpoint.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hints {
    /// Nodes of the clients.
    pub nodes: Vec<Arc<str>>,
    /// Zones of the clients.
    pub zones: Vec<Arc<str>>,
}
