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
    /// The Service it belongs to (label `kubernetes.io/service-name`), in the same namespace.
    pub service: ObjectName,
    /// The family of every address in it.
    pub family: Family,
    /// The ports that every endpoint in it serves.
    pub ports: Vec<EndpointPort>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// When the Pod or Service changed that this version of it tells of, where that is known; for
    /// measuring how long that took.
    #[serde(default)]
    pub triggered: Option<Timestamp>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointPort {
    /// The name of the Service's port that it serves; empty for the unnamed one.
    pub name: Arc<str>,
    /// The port that the endpoints listen on, in host byte order, never 0.
    pub port: u16,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// One endpoint. Conditions that the object leaves out are filled in as Kubernetes means them
/// (kube-proxy `pkg/proxy/endpointschangetracker.go`): ready and serving, not terminating.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Endpoint {
    /// Its address: the first of the list.
    pub address: IpAddr,
    /// Takes new connections.
    pub ready: bool,
    /// Answers, ready or not.
    pub serving: bool,
    /// Is being stopped.
    pub terminating: bool,
    /// The name of its Pod, where known.
    #[serde(default)]
    pub name: Option<Arc<str>>,
    /// The node it runs on, where known.
    pub node: Option<Arc<str>>,
    /// The zone it is in, where known.
    #[serde(default)]
    pub zone: Option<Arc<str>>,
    /// Whose clients it is for, where the object says.
    #[serde(default)]
    pub hints: Option<Arc<Hints>>,
}

impl Endpoint {
    /// Whether it takes connections where no other does: it is going, but still answers.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        self.serving && self.terminating
    }
}

/// Whose clients an endpoint is for.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hints {
    /// Those of these nodes.
    pub nodes: Vec<Arc<str>>,
    /// Those in these zones.
    pub zones: Vec<Arc<str>>,
}
