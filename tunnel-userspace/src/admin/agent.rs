//! What an agent shows and answers.

use std::{future::Future, net::SocketAddr, path::Path, sync::Arc};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{
    metrics,
    ready::Readiness,
    server::{self, Site, SocketError, json, respond, text},
};
use crate::{
    identity::{Receiver, State},
    listen::Waiting,
    tunnel::{AgentView, Board, ConnectionState},
};

/// What is shown of an agent.
#[derive(Clone)]
pub struct AgentViews {
    /// What does not change while it runs.
    pub setup: AgentSetup,
    /// Its connections.
    pub board: Arc<Board>,
    /// Its certificate.
    pub identity: Receiver,
    /// Ports that are not ours yet, and why.
    pub listening: Waiting,
}

/// What does not change while an agent runs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentSetup {
    /// The version of the agent.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// When it started, RFC 3339.
    pub started: String,
    /// What may be dialled.
    pub allow: Vec<String>,
}

/// The status of an agent.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Whether a gateway is connected, and its own port is there.
    pub ready: bool,
    /// Why not.
    #[serde(default)]
    pub not_ready: Option<String>,
    /// What does not change while it runs.
    #[serde(flatten)]
    pub setup: AgentSetup,
    /// Its connections.
    pub tunnel: AgentView,
    /// Its certificate.
    pub identity: State,
}

impl AgentViews {
    fn readiness(&self) -> Readiness {
        let view = self.board.view();
        let mut connections = view.connections.iter();
        let is_connected =
            connections.any(|connection| connection.state == ConnectionState::Connected);
        let why = if is_connected {
            None
        } else if self.identity.current().is_none() {
            let problem = self.identity.state().problem.unwrap_or_default();
            Some(format!("waiting for a certificate: {problem}"))
        } else {
            Some("no gateway is connected".to_owned())
        };
        let listening = self.listening.borrow();
        let ports = listening.iter();
        let ports = ports.map(|(port, why)| format!("cannot listen on {port}: {why}"));
        Readiness::because(why.into_iter().chain(ports).collect())
    }

    fn status(&self) -> AgentStatus {
        let readiness = self.readiness();
        AgentStatus {
            ready: readiness.ready,
            not_ready: readiness.summary(),
            setup: self.setup.clone(),
            tunnel: self.board.view(),
            identity: self.identity.state(),
        }
    }
}

/// Serves a port of an agent until the drain begins: metrics, status, `/healthz` (it runs) and
/// `/readyz` (a gateway is connected).
pub async fn serve_agent(address: SocketAddr, views: AgentViews, draining: watch::Receiver<bool>) {
    let waiting = views.listening.clone();
    server::serve_port("agent", address, views, waiting, draining).await;
}

/// Binds the socket of an agent; the second value serves it until the drain begins.
///
/// # Errors
///
/// The folder or the socket can't be made.
pub fn serve_agent_socket(
    path: &Path,
    views: AgentViews,
    draining: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<>, SocketError> {
    server::serve_path(path, views, draining)
}

impl Site for AgentViews {
    fn paths(&self) -> Option<&'static [&'static str]> {
        Some(&["/status", "/metrics", "/healthz", "/readyz"])
    }

    async fn answer(&self, path: &str, _query: &str) -> Response<Full<Bytes>> {
        match path {
            "/status" => json(StatusCode::OK, &self.status()),
            "/metrics" => match metrics::render_agent(&self.status()) {
                Ok(body) => respond(StatusCode::OK, metrics::CONTENT_TYPE, body.into()),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            },
            "/readyz" => match self.readiness().summary() {
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                None => text(StatusCode::OK, "ok\n".to_owned()),
            },
            _ => text(StatusCode::OK, "ok\n".to_owned()),
        }
    }
}
