//! What a node answers.

use std::{
    collections::BTreeMap,
    future::Future,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use tokio::{sync::watch, task::spawn_blocking};

use super::{
    Views, health, metrics,
    ready::Readiness,
    server::{self, Site, SocketError, json, respond, text},
    status::Status,
};

/// A listener, and what it answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// The socket of the command line: everything.
    Socket,
    /// The admin port: metrics and status, mode and config, and that it answers.
    Admin,
    /// The health port.
    Healthz,
}

impl Endpoint {
    const fn name(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Admin => "admin",
            Self::Healthz => "healthz",
        }
    }

    const fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Socket => &[
                "/status",
                "/services",
                "/nodes",
                "/metrics",
                "/healthz",
                "/livez",
                "/readyz",
                "/proxyMode",
                "/configz",
            ],
            Self::Admin => &[
                "/status",
                "/services",
                "/nodes",
                "/metrics",
                "/healthz",
                "/proxyMode",
                "/configz",
            ],
            Self::Healthz => &["/healthz", "/livez", "/readyz"],
        }
    }
}

/// How Services are translated, where kube-proxy says `iptables`, `ipvs` or `nftables`.
const PROXY_MODE: &str = "ebpf";

type Answers = Arc<Mutex<metrics::Answers>>;

struct Node {
    endpoint: Endpoint,
    views: Arc<Views>,
    answers: Answers,
}

/// Serves a TCP port until the drain begins. A port that is taken, by another proxy that still
/// runs, is tried again until it is free.
pub async fn serve(
    endpoint: Endpoint,
    address: SocketAddr,
    views: Arc<Views>,
    answers: Arc<Mutex<BTreeMap<(&'static str, u16), u64>>>,
    draining: watch::Receiver<bool>,
) {
    let waiting = views.listening.clone();
    let site = Node {
        endpoint,
        views,
        answers,
    };
    server::serve_port(endpoint.name(), address, site, waiting, draining).await;
}

/// Binds the admin socket, which only its owner may use. A socket that an earlier daemon left
/// behind is replaced: that it is gone is known, since the pins are held. The second value serves
/// it until the drain begins.
///
/// # Errors
///
/// The folder or the socket can't be made.
pub fn serve_socket(
    path: &Path,
    views: Arc<Views>,
    answers: Arc<Mutex<BTreeMap<(&'static str, u16), u64>>>,
    draining: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<>, SocketError> {
    let site = Node {
        endpoint: Endpoint::Socket,
        views,
        answers,
    };
    server::serve_path(path, site, draining)
}

impl Site for Node {
    fn paths(&self) -> Option<&'static [&'static str]> {
        Some(self.endpoint.paths())
    }

    async fn answer(&self, path: &str, query: &str) -> Response<Full<Bytes>> {
        match path {
            "/status" => json(StatusCode::OK, &Status::of(&self.views)),
            "/services" => self.services(query).await,
            "/nodes" => json(StatusCode::OK, &(self.views.tunnel.nodes)()),
            "/metrics" => self.metrics().await,
            "/proxyMode" => text(StatusCode::OK, PROXY_MODE.to_owned()),
            "/configz" => json(StatusCode::OK, &self.views.config),
            // Beside the metrics it says no more than that somebody answers, as kube-proxy's does.
            "/healthz" if self.endpoint == Endpoint::Admin => text(StatusCode::OK, "ok".to_owned()),
            "/healthz" => self.health("/healthz", true),
            "/readyz" => {
                let readiness = Readiness::of(&self.views);
                json(code(readiness.ready), &readiness)
            }
            _ => self.health("/livez", false),
        }
    }
}

impl Node {
    /// Whether the start is over.
    fn is_running(&self) -> bool {
        self.views.starting.borrow().is_none()
    }

    /// All Services, or those of the name that is asked for.
    async fn services(&self, query: &str) -> Response<Full<Bytes>> {
        if !self.is_running() {
            let why = Readiness::of(&self.views).summary().unwrap_or_default();
            return text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("not ready: {why}\n"),
            );
        }
        let mut asked = query.split('&');
        let name = asked.find_map(|asked| asked.strip_prefix("name="));
        let name = name.map(str::to_owned);
        self.answer_aside(move |views| json(StatusCode::OK, &(views.services)(name.as_deref())))
            .await
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let answers = self
            .answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        self.answer_aside(move |views| {
            let counted = (views.counted)(views.service_metrics);
            match metrics::render(views, answers, counted) {
                Ok(body) => respond(StatusCode::OK, metrics::CONTENT_TYPE, body.into()),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
            }
        })
        .await
    }

    /// Makes an answer in a thread of its own: it may be about very many Services, and nobody else
    /// should wait for that.
    async fn answer_aside(
        &self,
        answer: impl FnOnce(&Arc<Views>) -> Response<Full<Bytes>> + Send + 'static,
    ) -> Response<Full<Bytes>> {
        let views = Arc::clone(&self.views);
        let answered = spawn_blocking(move || answer(&views)).await;
        answered
            .unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")))
    }

    fn health(&self, path: &'static str, asks_eligible: bool) -> Response<Full<Bytes>> {
        let health = health::of(&self.views, asks_eligible);
        let code = code(health.is_good);
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let count = answers.entry((path, code.as_u16())).or_default();
        *count = count.saturating_add(1);
        drop(answers);
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
