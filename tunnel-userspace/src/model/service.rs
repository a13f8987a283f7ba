use std::{net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use tunnel_common::addr::Protocol;

use super::ObjectName;

/// A Service with cluster IPs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// Who it is among all Services that had this name, where the API server says; for what is told
    /// of it there.
    #[serde(default)]
    pub uid: Option<Arc<str>>,
    /// When it was created, in seconds since the epoch; decides between two Services that claim
    /// one address. A Service that doesn't say counts as the youngest.
    pub created: Option<i64>,
    /// Cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// The ports.
    pub ports: Vec<ServicePort>,
    /// How a backend is chosen (annotation `culvert.dev/algorithm`), where the Service says.
    pub algorithm: Option<Algorithm>,
}

/// One port of a Service.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServicePort {
    /// The name; empty for the only port of a Service.
    pub name: Arc<str>,
    /// The port that clients dial on a cluster IP, in host byte order, never 0.
    pub port: u16,
    /// The transport protocol.
    #[serde(with = "super::protocol")]
    pub protocol: Protocol,
}

/// How a backend is chosen.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum Algorithm {
    /// A uniform random choice for each connection, as kube-proxy makes it.
    #[default]
    Random,
    /// In turn, counted per CPU.
    RoundRobin,
}
