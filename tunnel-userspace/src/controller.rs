//! The controller, which approves and signs the certificate requests of gateways and agents, and keeps the CA. Any number of
//! controllers may run at once: each write is conditional and can be repeated, so there is no leader.
//!
//! - `table`: the rules for requests (no I/O)
//! - `ca_state`: the state of the CA, and its next change (no I/O)
//! - `cluster`: the objects that are read and written
//! - `ca_keeper`: makes the changes of the CA
//! - `kube_cluster`: the objects on the API server
//! - `received`: the requests as the API server sends them
//! - `queue`: the requests that wait
//! - `requests`: handles a request
//! - `watch`: follows the requests on the API server
//! - `run`: runs all of it

pub mod ca_keeper;
pub mod ca_state;
pub mod cluster;
mod kube_cluster;
mod queue;
mod received;
pub mod requests;
pub mod run;
pub mod table;
mod watch;

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::run::{ControllerState, run};
use self::{ca_state::CaSettings, requests::RequestSettings, table::Rules};
use crate::duration;

/// The settings for `culvert controller`.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct ControllerSettings {
    /// The namespace of the ServiceAccounts, the Secret and the ConfigMap.
    pub namespace: String,
    /// The ServiceAccount of the agents' pods.
    pub agent_service_account: String,
    /// The ServiceAccount of the gateways' pods.
    pub gateway_service_account: String,
    /// The maximum life of a certificate.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub life: Duration,
    /// The life of a CA. The next one is created when a third of it is left.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub ca_life: Duration,
    /// The time between the publication of a CA and its first signature.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub overlap: Duration,
    /// The maximum number of requests that are handled in a second, from 1 to 1000.
    pub requests_per_second: u32,
    /// The file with the nodes that get no certificate, in the format of `tunnel.gateway.denyFile`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny_file: Option<PathBuf>,
    /// The address of the port for metrics and probes.
    pub admin_address: std::net::SocketAddr,
}

impl Default for ControllerSettings {
    fn default() -> Self {
        const DAY: u64 = 86_400;
        Self {
            namespace: "kube-system".to_owned(),
            agent_service_account: "culvert-agent".to_owned(),
            gateway_service_account: "culvert-cloud".to_owned(),
            life: Duration::from_secs(30 * DAY),
            ca_life: Duration::from_secs(3650 * DAY),
            overlap: Duration::from_secs(7 * DAY),
            requests_per_second: 20,
            deny_file: None,
            admin_address: ([0, 0, 0, 0], 10_287).into(),
        }
    }
}

impl ControllerSettings {
    /// Returns the settings with which [`run()`] works. `instance` is the name of this controller.
    #[must_use]
    pub fn for_run(&self, instance: &str) -> run::Settings {
        let signed = |time: Duration| time.try_into().unwrap_or(jiff::SignedDuration::MAX);
        let account = |name| format!("system:serviceaccount:{}:{name}", self.namespace);
        run::Settings {
            requests: RequestSettings {
                rules: Rules {
                    agents: account(&self.agent_service_account),
                    gateways: account(&self.gateway_service_account),
                    max_life: i64::try_from(self.life.as_secs()).unwrap_or(i64::MAX),
                },
                ca: CaSettings {
                    ca_life: signed(self.ca_life),
                    overlap: signed(self.overlap),
                    life: signed(self.life),
                },
            },
            namespace: self.namespace.clone(),
            instance: instance.to_owned(),
            requests_per_second: self.requests_per_second,
        }
    }
}
