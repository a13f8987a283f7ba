//! The HTTP paths of `culvert node`: which port or socket serves which path.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use tokio::task::spawn_blocking;

use super::{
    Views, metrics, proxy_health,
    readiness::Readiness,
    server::{Routes, json, json_array, text},
    status::Status,
};

/// A listener; each serves other paths.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// The admin socket for the command line. It serves all paths.
    Socket,
    /// The admin port (`admin.address`).
    Admin,
    /// The health port (`healthz.address`).
    Healthz,
}

impl Endpoint {
    /// Returns the name of the listener, for logs and its task.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Socket => "admin socket",
            Self::Admin => "admin",
            Self::Healthz => "healthz",
        }
    }
}

/// The response of `/proxyMode`. kube-proxy's is `iptables`, `ipvs` or `nftables`.
const PROXY_MODE: &str = "ebpf";

/// The HTTP routes of one listener of a node.
#[expect(missing_debug_implementations, reason = "the views contain functions")]
pub struct Node {
    /// The listener.
    pub endpoint: Endpoint,
    /// The published views.
    pub views: Arc<Views>,
}

impl Routes for Node {
    async fn answer(&self, path: &str, query: &str) -> Option<Response<Full<Bytes>>> {
        Some(match (self.endpoint, path) {
            // On kube-proxy's metrics port, `/healthz` is always `ok`, too.
            (Endpoint::Admin, "/healthz") => text(StatusCode::OK, "ok".to_owned()),
            (Endpoint::Admin, "/livez" | "/readyz") => return None,
            (_, "/healthz") => self.health("/healthz", true),
            (_, "/livez") => self.health("/livez", false),
            (_, "/readyz") => {
                let readiness = Readiness::of(&self.views);
                json(code(readiness.ready), &readiness)
            }
            (Endpoint::Healthz, _) => return None,
            (_, "/status") => json(StatusCode::OK, &Status::of(&self.views)),
            (_, "/services") => self.services(query).await,
            (_, "/nodes") => json(StatusCode::OK, &(self.views.tunnel)().nodes),
            (_, "/metrics") => self.metrics().await,
            (_, "/proxyMode") => text(StatusCode::OK, PROXY_MODE.to_owned()),
            (_, "/configz") => json(StatusCode::OK, &self.views.config),
            _ => return None,
        })
    }
}

impl Node {
    /// Responds with all Services, or those with the name in the query.
    async fn services(&self, query: &str) -> Response<Full<Bytes>> {
        let is_starting = self.views.starting.borrow().is_some();
        if is_starting {
            let why = Readiness::of(&self.views).summary().unwrap_or_default();
            let body = format!("not ready: {why}\n");
            return text(StatusCode::SERVICE_UNAVAILABLE, body);
        }
        let mut asked = query.split('&');
        let name = asked.find_map(|asked| asked.strip_prefix("name="));
        let name = name.map(str::to_owned);
        self.answer_blocking(move |views| {
            json_array(StatusCode::OK, |each| {
                (views.services)(name.as_deref(), each)
            })
        })
        .await
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        self.answer_blocking(|views| metrics::answer(metrics::render(views)))
            .await
    }

    /// Builds a response in a blocking thread, because one about very many Services would delay other tasks.
    async fn answer_blocking(
        &self,
        answer: impl FnOnce(Arc<Views>) -> Response<Full<Bytes>> + Send + 'static,
    ) -> Response<Full<Bytes>> {
        let views = Arc::clone(&self.views);
        let answered = spawn_blocking(move || answer(views)).await;
        answered
            .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")))
    }

    fn health(&self, path: &'static str, asks_eligible: bool) -> Response<Full<Bytes>> {
        let health = proxy_health::of(&self.views, asks_eligible);
        let code = code(health.is_good);
        self.views.answers.send_modify(|answers| {
            *answers.entry((path, code.as_u16())).or_default() += 1;
        });
        json(code, &health)
    }
}

pub(super) const fn code(is_good: bool) -> StatusCode {
    if is_good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

#[cfg(test)]
mod tests;
