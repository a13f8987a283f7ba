use std::{net::IpAddr, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::{Family, ObjectName};

/// An EndpointSlice, which holds some or all of a Service's endpoints of one IP family.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointSlice {
    /// The namespace and name.
    pub name: ObjectName,
    /// The Service that the slice belongs to, in the same namespace (label `kubernetes.io/service-name`).
    pub service: ObjectName,
    /// The IP family of all addresses.
    pub family: Family,
    /// The ports that every endpoint in the slice has.
    pub ports: Vec<EndpointPort>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// The time of the change to a Pod or Service that led to this version of the slice, if known. It is used
    /// to measure the delay until the BPF maps are updated.
    #[serde(default)]
    pub triggered: Option<Timestamp>,
}

/// A port in an EndpointSlice.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointPort {
    /// The name of the corresponding Service port; empty if that port is unnamed.
    pub name: Arc<str>,
    /// The port that the endpoints listen on, in host byte order; never 0.
    pub port: u16,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// An endpoint. Missing conditions default to ready, serving and not terminating, as in kube-proxy
/// (`pkg/proxy/endpointschangetracker.go`).
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Endpoint {
    /// The endpoint's first address.
    pub address: IpAddr,
    /// True if the endpoint accepts new connections.
    pub ready: bool,
    /// True if the endpoint responds to requests, even if it is not ready.
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
    /// The endpoint's topology hints; `None` if it has none.
    #[serde(default)]
    pub hints: Option<Arc<Hints>>,
}

impl Endpoint {
    /// Returns true if the endpoint is terminating but still serving. Such an endpoint gets new connections
    /// only while no endpoint is ready.
    #[must_use]
    pub const fn is_fallback(&self) -> bool {
        self.serving && self.terminating
    }
}

/// Topology hints: the clients that an endpoint is intended for.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hints {
    /// The nodes whose clients should use the endpoint.
    pub nodes: Vec<Arc<str>>,
    /// The zones whose clients should use the endpoint.
    pub zones: Vec<Arc<str>>,
}
