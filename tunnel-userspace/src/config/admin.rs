//! The `admin` and `healthz` sections.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The admin port, which serves metrics and status.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct AdminConfig {
    /// The address and port that serve `/metrics` and `/status`.
    pub address: SocketAddr,
    /// The maximum number of Service ports that have their own metrics. If there are more Service ports,
    /// those whose names sort first have metrics.
    pub service_metrics_limit: usize,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 10_249)),
            service_metrics_limit: 1000,
        }
    }
}

/// The health port, for load balancers and probes.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthzConfig {
    /// The address and port that serve `/healthz`, `/livez` and `/readyz`.
    pub address: SocketAddr,
}

impl Default for HealthzConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([0, 0, 0, 0], 10_256)),
        }
    }
}
