//! The HTTP paths that `culvert node` serves, and the ports or sockets that serve each of them.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use tokio::task::spawn_blocking;

use super::{
    NodeViews, healthz,
    http_server::{Routes, json, json_array, text},
    metrics,
    readiness::Readiness,
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

/// The response to `/proxyMode`. kube-proxy responds with `iptables`, `ipvs` or `nftables`.
const PROXY_MODE: &str = "ebpf";

/// The HTTP routes that one of a node's listeners serves.
#[expect(missing_debug_implementations, reason = "the views contain functions")]
pub struct NodeRoutes {
    /// The listener whose paths are served.
    pub listener: NodeListener,
    /// The published state of the node.
    pub views: Arc<NodeViews>,
}

impl Routes for NodeRoutes {
    async fn respond(&self, path: &str, query: &str) -> Option<Response<Full<Bytes>>> {
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
            (_, "/nodes") => json(StatusCode::OK, &(self.views.tunnel)().nodes),
            (_, "/metrics") => self.metrics().await,
            (_, "/proxyMode") => text(StatusCode::OK, PROXY_MODE.to_owned()),
            (_, "/configz") => json(StatusCode::OK, &self.views.config),
            _ => return None,
        })
    }
}

impl NodeRoutes {
    /// Responds with all Services or, if the query contains a name, with those that have this name.
    async fn services(&self, query: &str) -> Response<Full<Bytes>> {
        let is_starting = self.views.starting.borrow().is_some();
        if is_starting {
            let why = Readiness::of(&self.views).summary().unwrap_or_default();
            let body = format!("not ready: {why}\n");
            return text(StatusCode::SERVICE_UNAVAILABLE, body);
        }
        let mut parameters = query.split('&');
        let name = parameters.find_map(|parameter| parameter.strip_prefix("name="));
        let name = name.map(str::to_owned);
        self.respond_blocking(move |views| {
            json_array(StatusCode::OK, |each| {
                (views.for_each_service)(name.as_deref(), each)
            })
        })
        .await
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        self.respond_blocking(|views| metrics::response(metrics::render(views)))
            .await
    }

    /// Builds a response on a blocking thread, because rendering very many Services would delay other tasks.
    async fn respond_blocking(
        &self,
        build: impl FnOnce(Arc<NodeViews>) -> Response<Full<Bytes>> + Send + 'static,
    ) -> Response<Full<Bytes>> {
        let views = Arc::clone(&self.views);
        let response = spawn_blocking(move || build(views)).await;
        response
            .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")))
    }

    fn respond_health(&self, path: &'static str, with_eligibility: bool) -> Response<Full<Bytes>> {
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
