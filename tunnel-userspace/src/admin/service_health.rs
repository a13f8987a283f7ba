//! Serves the health check node ports of Services, by which load balancers find the nodes that have endpoints
//! of a Service (kube-proxy `pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Response, StatusCode,
    header::{HeaderName, HeaderValue},
};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::{
    Views, proxy_health,
    server::{self, Routes, respond, text},
};
use crate::{
    drain, latest,
    listen::Waiting,
    model::{ObjectWarning, Family, Kind, ObjectId, ObjectName},
    plan::{HealthChecks, HealthCheckListeners},
};

/// The name of the listeners in logs.
const NAME: &str = "health check";

/// The response header with the number of local endpoints. Load balancers may use it as the node's weight.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The state of the health check node ports, for status and metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChecksView {
    /// The number of Services with a health check node port.
    pub services: usize,
    /// Services whose port is not served on every address, with the reason.
    pub unserved: BTreeMap<String, String>,
    /// The number of times that a port was in use by another process or Service.
    pub ports_in_use_total: u64,
}

/// The current health checks, and the Service that owns each listener.
#[derive(Default)]
struct Board {
    checks: Arc<HealthChecks>,
    listeners: HealthCheckListeners,
}

/// The server of the health check node ports.
pub struct Checks {
    checks: watch::Receiver<Arc<HealthChecks>>,
    views: Arc<Views>,
    board: watch::Sender<Arc<Board>>,
    /// The tasks of the listeners, including those whose port could not be bound yet.
    open: BTreeMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
    waiting: Waiting,
    concerns: watch::Sender<Arc<[ObjectWarning]>>,
    draining: watch::Receiver<bool>,
}

impl Checks {
    /// Creates the server; [`Self::run`] opens the listeners.
    #[must_use]
    pub fn new(
        checks: watch::Receiver<Arc<HealthChecks>>,
        views: Arc<Views>,
        draining: watch::Receiver<bool>,
    ) -> Self {
        Self {
            checks,
            views,
            board: watch::Sender::default(),
            open: BTreeMap::new(),
            tasks: JoinSet::new(),
            waiting: watch::Sender::default(),
            concerns: watch::Sender::new(Arc::default()),
            draining,
        }
    }

    /// Returns a receiver of the problems that need an operator.
    #[must_use]
    pub fn concerns(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.concerns.subscribe()
    }

    /// Serves the health check node ports until the drain begins. Binding a port in use is retried until the
    /// port is free, and delays no other port.
    pub async fn run(mut self) {
        let mut waiting = self.waiting.subscribe();
        self.checks.mark_changed();
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut self.draining) => break,
                Ok(()) = self.checks.changed() => self.follow().await,
                Ok(()) = waiting.changed() => {}
                Some(_) = self.tasks.join_next() => {}
            }
            let waiting = waiting.borrow_and_update().clone();
            self.tell(&waiting);
        }
        self.tasks.shutdown().await;
    }

    /// Opens and closes listeners according to the current Services.
    async fn follow(&mut self) {
        let checks = Arc::clone(&self.checks.borrow_and_update());
        let listeners = checks.listeners();
        let wanted: BTreeSet<SocketAddr> = listeners.owners.keys().copied().collect();
        let board = Board { checks, listeners };
        self.board.send_replace(Arc::new(board));
        let stale = |address: &SocketAddr, _: &mut AbortHandle| !wanted.contains(address);
        let closing: BTreeMap<_, _> = self.open.extract_if(.., stale).collect();
        for (address, task) in &closing {
            task.abort();
            info!(%address, "health check port closed");
        }
        // An unspecified address can only be bound after the listeners on single addresses are closed.
        while closing.values().any(|task| !task.is_finished()) {
            if self.tasks.join_next().await.is_none() {
                break;
            }
        }
        for address in closing.keys() {
            self.waiting
                .send_if_modified(|names| names.remove(&name(address)).is_some());
        }
        for address in wanted {
            if self.open.contains_key(&address) {
                continue;
            }
            let routes = Check {
                address,
                board: self.board.subscribe(),
                views: Arc::clone(&self.views),
            };
            let (waiting, draining) = (self.waiting.clone(), self.draining.clone());
            let serving = server::serve_port(NAME, address, routes, waiting, draining);
            self.open.insert(address, self.tasks.spawn(serving));
        }
    }

    /// Publishes the Services whose port is not served on every address, with the reason.
    fn tell(&self, waiting: &BTreeMap<String, String>) {
        let board = Arc::clone(&self.board.borrow());
        let HealthCheckListeners { owners, losers } = &board.listeners;
        let taken = owners.iter().filter_map(|(address, owner)| {
            let why = waiting.get(&name(address))?;
            Some((
                owner,
                format!("health check port {}: {why}", address.port()),
            ))
        });
        let lost = losers.iter().filter_map(|(loser, owner)| {
            let port = board.checks.services.get(loser)?.port;
            Some((
                loser,
                format!("health check port {port} belongs to {owner}"),
            ))
        });
        let refused: BTreeMap<_, _> = taken.chain(lost).collect();
        let concerns = refused.iter().map(|(service, note)| ObjectWarning {
            regarding: ObjectId {
                kind: Kind::Service,
                name: (*service).clone(),
            },
            uid: board
                .checks
                .services
                .get(*service)
                .and_then(|check| check.uid.clone()),
            reason: Reason::HealthPortInUse,
            note: note.clone(),
        });
        latest::put(&self.concerns, concerns.collect());
        self.views.checks.send_modify(|view| {
            let refused = refused.into_iter();
            let refused: BTreeMap<_, _> = refused
                .map(|(service, note)| (service.to_string(), note))
                .collect();
            for (service, note) in &refused {
                if view.unserved.get(service) != Some(note) {
                    warn!(%service, note, "{}", Reason::HealthPortInUse.meaning());
                    view.ports_in_use_total += 1;
                }
            }
            view.services = board.checks.services.len();
            view.unserved = refused;
        });
    }
}

/// Returns the name of a listener, as built by [`server::serve_port`].
fn name(address: &SocketAddr) -> String {
    format!("{NAME} {address}")
}

/// The HTTP routes of one listener.
struct Check {
    address: SocketAddr,
    board: watch::Receiver<Arc<Board>>,
    views: Arc<Views>,
}

impl Routes for Check {
    const MOST_CONNECTIONS: usize = 16;
    // Many load balancers send requests, but each of them rarely.
    const KEEPS_ALIVE: bool = false;
    const ONE_FAMILY: bool = true;
    const TAKES_ANY_METHOD: bool = true;

    async fn answer(&self, _path: &str, _query: &str) -> Option<Response<Full<Bytes>>> {
        let board = Arc::clone(&self.board.borrow());
        let family = Family::of(self.address.ip());
        let told = board.listeners.owners.get(&self.address).and_then(|owner| {
            let check = board.checks.services.get(owner)?;
            Some((owner, *check.ready_endpoints.get(&family)?))
        });
        let Some((service, local)) = told else {
            let body = "no Service has this port any more\n".to_owned();
            return Some(text(StatusCode::SERVICE_UNAVAILABLE, body));
        };
        let is_healthy = proxy_health::of(&self.views, false).healthy;
        Some(answer(service, local, is_healthy))
    }
}

/// Builds the response to a load balancer. It equals kube-proxy's byte for byte.
fn answer(service: &ObjectName, local: usize, is_healthy: bool) -> Response<Full<Bytes>> {
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{}\",\n\t\t\"name\": \"{}\"\n\t}},\n\
         \t\"localEndpoints\": {local},\n\t\"serviceProxyHealthy\": {is_healthy}\n}}",
        service.namespace, service.name
    );
    let code = super::node::code(local > 0 && is_healthy);
    let mut response = respond(code, "application/json", body.into());
    response
        .headers_mut()
        .insert(WEIGHT, HeaderValue::from(local));
    response
}

#[cfg(test)]
mod tests;
