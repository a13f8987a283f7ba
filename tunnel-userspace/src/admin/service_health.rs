//! The health check port of a Service: reports to load balancers if this node has endpoints of the
//! Service (kube-proxy `pkg/proxy/healthcheck/service_health.go`).

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
    model::{Concern, Family, Kind, ObjectId, ObjectName},
    plan::{HealthChecks, Listeners},
};

/// The name of a listener, in logs.
const NAME: &str = "health check";

/// The header by which load balancers may distribute connections among nodes.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The state of the health check listeners, for status and metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChecksView {
    /// Services with a health check node port.
    pub services: usize,
    /// Services that are not served at all of their addresses, with the reason.
    pub unserved: BTreeMap<String, String>,
    /// The number of times that a port was in use by another process or Service.
    pub ports_in_use_total: u64,
}

/// The current health checks, and the owner of each listener.
#[derive(Default)]
struct Board {
    checks: Arc<HealthChecks>,
    listeners: Listeners,
}

/// The health check ports of a node.
pub struct Checks {
    checks: watch::Receiver<Arc<HealthChecks>>,
    views: Arc<Views>,
    board: watch::Sender<Arc<Board>>,
    /// Listeners, including those that wait for their port.
    open: BTreeMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
    waiting: Waiting,
    concerns: watch::Sender<Arc<[Concern]>>,
    draining: watch::Receiver<bool>,
}

impl Checks {
    /// Creates the health checks, without any listener yet.
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

    /// Follows the problems that an operator must act on.
    #[must_use]
    pub fn concerns(&self) -> watch::Receiver<Arc<[Concern]>> {
        self.concerns.subscribe()
    }

    /// Serves the health check port of every Service that has one, until the drain begins. A port that
    /// is taken is retried until it is free, and delays no other.
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

    /// Opens and closes listeners to match the current Services.
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
            info!(%address, "no longer told of");
        }
        // An unspecified address can be bound only after the listeners on single addresses are closed.
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

    /// Publishes the health checks that are not served, with the reason.
    fn tell(&self, waiting: &BTreeMap<String, String>) {
        let board = Arc::clone(&self.board.borrow());
        let Listeners { owners, losers } = &board.listeners;
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
        let concerns = refused.iter().map(|(service, note)| Concern {
            about: ObjectId {
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

/// Returns the name that [`server::serve_port`] gives a listener.
fn name(address: &SocketAddr) -> String {
    format!("{NAME} {address}")
}

/// The routes of one address.
struct Check {
    address: SocketAddr,
    board: watch::Receiver<Arc<Board>>,
    views: Arc<Views>,
}

impl Routes for Check {
    const MOST_CONNECTIONS: usize = 16;
    // Load balancers are many, and send requests rarely.
    const KEEPS_ALIVE: bool = false;
    const ONE_FAMILY: bool = true;
    const TAKES_ANY_METHOD: bool = true;

    async fn answer(&self, _path: &str, _query: &str) -> Option<Response<Full<Bytes>>> {
        let board = Arc::clone(&self.board.borrow());
        let family = Family::of(self.address.ip());
        let told = board.listeners.owners.get(&self.address).and_then(|owner| {
            let check = board.checks.services.get(owner)?;
            Some((owner, *check.local.get(&family)?))
        });
        let Some((service, local)) = told else {
            let body = "this port is no Service's any more\n".to_owned();
            return Some(text(StatusCode::SERVICE_UNAVAILABLE, body));
        };
        let is_healthy = proxy_health::of(&self.views, false).healthy;
        Some(answer(service, local, is_healthy))
    }
}

/// Builds the response to a load balancer, byte for byte as kube-proxy writes it.
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
