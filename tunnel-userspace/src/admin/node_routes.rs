//! The HTTP paths that `culvert node` serves, and the ports or sockets that serve each of them.

use std::sync::Arc;

use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tracing::info;

use super::{
    NodeViews, explain_query,
    flow_list::{self, FlowWriter},
    healthz,
    http_server::{ResponseBody, Routes, json, text},
    json_list::ListLimit,
    metrics,
    readiness::Readiness,
    service_list::ServiceWriter,
    status::NodeStatus,
};

/// One of a node's listeners. Each of them serves different paths.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodeListener {
    /// The admin socket for the command line. It serves all paths.
    Socket,
    /// The admin port (`admin.address`).
    Admin,
    /// The health port (`healthz.address`).
    Healthz,
}

impl NodeListener {
    /// Returns the listener's name, which is used for its task and in logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Socket => "admin socket",
            Self::Admin => "admin",
            Self::Healthz => "healthz",
        }
    }
}

/// The path on the admin socket that ends the sessions of the node in the query `node=`.
pub const END_SESSIONS_PATH: &str = "/sessions/end";

/// The response to `/proxyMode`. kube-proxy responds with `iptables`, `ipvs` or `nftables`.
const PROXY_MODE: &str = "ebpf";

/// The HTTP routes that one of a node's listeners serves.
#[expect(missing_debug_implementations, reason = "the views contain functions")]
pub struct NodeRoutes {
    /// The listener whose paths are served.
    listener: NodeListener,
    /// The published state of the node.
    views: Arc<NodeViews>,
    lists: ListLimit,
}

/// The response to a request that ends the sessions of a node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndedSessions {
    /// The number of sessions that were ended.
    pub ended: usize,
}

impl Routes for NodeRoutes {
    fn post(&self, path: &str, query: &str) -> Option<Response<ResponseBody>> {
        let node = query.strip_prefix("node=")?;
        match (self.listener, path) {
            // Only root can use the socket; any user on the host can use the ports.
            (NodeListener::Socket, END_SESSIONS_PATH) => {
                let ended = (self.views.end_sessions)(node);
                info!(%node, sessions = ended, "an operator has ended the sessions of a node");
                Some(json(StatusCode::OK, &EndedSessions { ended }))
            }
            (NodeListener::Socket | NodeListener::Admin | NodeListener::Healthz, _) => None,
        }
    }

    async fn respond(&self, path: &str, query: &str) -> Option<Response<ResponseBody>> {
        Some(match (self.listener, path) {
            // kube-proxy's metrics port, too, always responds to `/healthz` with `ok`.
            (NodeListener::Admin, "/healthz") => text(StatusCode::OK, "ok".to_owned()),
            (NodeListener::Admin, "/livez" | "/readyz") => return None,
            (_, "/healthz") => self.respond_health("/healthz", true),
            (_, "/livez") => self.respond_health("/livez", false),
            (_, "/readyz") => {
                let readiness = Readiness::of(&self.views);
                json(status_code(readiness.ready), &readiness)
            }
            (NodeListener::Healthz, _) => return None,
            (_, "/status") => json(StatusCode::OK, &NodeStatus::of(&self.views)),
            (_, "/services") => self.services(query).await,
            (_, "/flows") => self.flows(query).await,
            // Loading the programs takes time, so that only root may ask.
            (NodeListener::Socket, "/explain") => self.explain(query).await,
            (_, "/nodes") => json(StatusCode::OK, &(self.views.tunnel)().nodes),
            (_, "/metrics") => self.metrics().await,
            (_, "/proxyMode") => text(StatusCode::OK, PROXY_MODE.to_owned()),
            (_, "/configz") => json(StatusCode::OK, &self.views.config),
            _ => return None,
        })
    }
}

impl NodeRoutes {
    /// Creates the routes of a listener.
    #[must_use]
    pub fn new(listener: NodeListener, views: Arc<NodeViews>) -> Self {
        Self {
            listener,
            views,
            lists: ListLimit::default(),
        }
    }

    /// Responds with all Services or, if the query contains a name, with those that have this name.
    async fn services(&self, query: &str) -> Response<ResponseBody> {
        if let Some(response) = self.still_starting() {
            return response;
        }
        let mut parameters = query.split('&');
        let name = parameters.find_map(|parameter| parameter.strip_prefix("name="));
        let parts = || ServiceWriter::new((self.views.services)(name));
        self.lists.respond(parts).await
    }

    /// Returns the response while the node is starting, when the maps do not hold all Services yet.
    fn still_starting(&self) -> Option<Response<ResponseBody>> {
        self.views.starting.borrow().as_ref()?;
        let why = Readiness::of(&self.views).summary().unwrap_or_default();
        let body = format!("not ready: {why}\n");
        Some(text(StatusCode::SERVICE_UNAVAILABLE, body))
    }

    /// Responds with the flows that the query selects.
    async fn flows(&self, query: &str) -> Response<ResponseBody> {
        match flow_list::parse_query(query) {
            Ok(filter) => {
                let flows = || FlowWriter::new((self.views.list_flows)(filter));
                self.lists.respond(flows).await
            }
            Err(reason) => text(StatusCode::BAD_REQUEST, format!("{reason}\n")),
        }
    }

    /// Responds with the explanation that the query asks for.
    async fn explain(&self, query: &str) -> Response<ResponseBody> {
        if let Some(response) = self.still_starting() {
            return response;
        }
        match explain_query::parse(query) {
            Ok(question) => match (self.views.explain)(question).await {
                Ok(explanation) => json(StatusCode::OK, &explanation),
                Err(problem) => text(StatusCode::UNPROCESSABLE_ENTITY, format!("{problem}\n")),
            },
            Err(reason) => text(StatusCode::BAD_REQUEST, format!("{reason}\n")),
        }
    }

    /// Responds with the metrics. They are rendered on a blocking thread, because rendering those of very many
    /// service ports would delay other tasks.
    async fn metrics(&self) -> Response<ResponseBody> {
        let views = Arc::clone(&self.views);
        let response = spawn_blocking(move || metrics::response(metrics::render(views))).await;
        response
            .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")))
    }

    fn respond_health(&self, path: &'static str, with_eligibility: bool) -> Response<ResponseBody> {
        let health = healthz::response(&self.views, with_eligibility);
        let code = status_code(health.is_positive);
        self.views.health_responses.send_modify(|responses| {
            *responses.entry((path, code.as_u16())).or_default() += 1;
        });
        json(code, &health)
    }
}

pub(super) const fn status_code(is_ok: bool) -> StatusCode {
    if is_ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

#[cfg(test)]
mod tests;
