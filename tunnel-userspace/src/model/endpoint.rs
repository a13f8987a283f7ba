use std::{net::IpAddr, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Family, ObjectName};

/// An EndpointSlice: some of the endpoints of one Service, of one IP family.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointSlice {
    /// Namespace and name of the slice.
    pub name: ObjectName,
    /// The Service to which it belongs (label `kubernetes.io/service-name`), in the same namespace.
    pub service: ObjectName,
    /// The family of every address in it.
    pub family: Family,
    /// The ports that every endpoint in it serves.
    pub ports: Vec<EndpointPort>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// The time of the change to the Pod or Service that caused this version, if known; to measure the
    /// latency of programming.
    #[serde(default)]
    pub triggered: Option<Timestamp>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointPort {
    /// The name of the Service's port; empty for the unnamed one.
    pub name: Arc<str>,
    /// The port that the endpoints listen on, in host byte order, never 0.
    pub port: u16,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// One endpoint. Omitted conditions get the defaults of Kubernetes (kube-proxy
/// `pkg/proxy/endpointschangetracker.go`): ready and serving, not terminating.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Endpoint {
    /// The address: the first of the list.
    pub address: IpAddr,
    /// True if it takes new connections.
    pub ready: bool,
    /// True if it answers, ready or not.
    pub serving: bool,
    /// True if it is being stopped.
    pub terminating: bool,
    /// The name of its Pod, if known.
    #[serde(default)]
    pub name: Option<Arc<str>>,
    /// The name of its node, if known.
    pub node: Option<Arc<str>>,
    /// The zone, if known.
    #[serde(default)]
    pub zone: Option<Arc<str>>,
    /// The clients that it is meant for, if the object has hints.
    #[serde(default)]
    pub hints: Option<Arc<Hints>>,
}

impl Endpoint {
    /// Returns true if it takes connections when no endpoint is ready: it is terminating, but still
    /// serves.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        self.serving && self.terminating
    }
}

/// The clients that an endpoint is meant for.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hints {
    /// The nodes of these clients.
    pub nodes: Vec<Arc<str>>,
    /// The zones of these clients.
    pub zones: Vec<Arc<str>>,
}
