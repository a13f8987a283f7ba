//! The HTTP paths that `culvert agent` serves, and its status.

use std::sync::Arc;

use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};

use super::{
    http_server::{ResponseBody, Routes, json, text},
    metrics,
    readiness::Readiness,
};
use crate::{
    identity::{CertificateReceiver, CertificateState},
    listen::UnboundPorts,
    tunnel::{AgentState, AgentView, ConnectionState},
};

/// The state of `culvert agent`, as published by its modules.
#[derive(Clone)]
pub struct AgentViews {
    /// Values that never change while the agent runs.
    pub setup: AgentSetup,
    /// The state of the connections to the gateways.
    pub state: Arc<AgentState>,
    /// The agent's certificate.
    pub identity: CertificateReceiver,
    /// The ports that are not bound yet, each with the error from the last attempt.
    pub unbound_ports: UnboundPorts,
}

/// Values that never change while an agent runs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentSetup {
    /// The agent's version.
    pub version: String,
    /// The process ID.
    pub pid: u32,
    /// The start time, in RFC 3339 format.
    pub started: String,
    /// The targets that the agent may dial.
    pub allowed_targets: Vec<String>,
    /// A warning if the config allows more connections than the limit on open files.
    #[serde(default)]
    pub descriptor_problem: Option<String>,
}

/// An agent's response to `/status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// True if a gateway is connected and the admin port is bound.
    pub ready: bool,
    /// The reasons why the agent is not ready; `None` if it is ready.
    #[serde(default)]
    pub not_ready: Option<String>,
    /// Values that never change while the agent runs.
    #[serde(flatten)]
    pub setup: AgentSetup,
    /// The connections to the gateways.
    pub tunnel: AgentView,
    /// The state of the agent's certificate.
    pub identity: CertificateState,
}

impl AgentViews {
    fn readiness(&self) -> Readiness {
        let view = self.state.view();
        let mut connections = view.connections.iter();
        let is_connected =
            connections.any(|connection| connection.state == ConnectionState::Connected);
        let why = || match self.identity.current() {
            Some(_) => "no gateway is connected".to_owned(),
            None => {
                let CertificateState {
                    problem, request, ..
                } = self.identity.state();
                let of_request = request.and_then(|request| request.problem);
                let problem = of_request.or(problem).unwrap_or_default();
                format!("waiting for a certificate: {problem}")
            }
        };
        let reasons = (!is_connected).then(why).into_iter().collect();
        Readiness::from_reasons(reasons, &self.unbound_ports.borrow())
    }

    fn status(&self) -> AgentStatus {
        let readiness = self.readiness();
        AgentStatus {
            ready: readiness.ready,
            not_ready: readiness.summary(),
            setup: self.setup.clone(),
            tunnel: self.state.view(),
            identity: self.identity.state(),
        }
    }
}

impl Routes for AgentViews {
    async fn respond(&self, path: &str, _query: &str) -> Option<Response<ResponseBody>> {
        Some(match path {
            "/status" => json(StatusCode::OK, &self.status()),
            "/metrics" => metrics::response(metrics::render_agent(self.status())),
            // Liveness: the process responds.
            "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
            // Readiness: at least one gateway is connected.
            "/readyz" => match self.readiness().summary() {
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                None => text(StatusCode::OK, "ok\n".to_owned()),
            },
            _ => return None,
        })
    }
}
