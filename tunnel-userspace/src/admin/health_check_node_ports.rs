//! Serves the Services' health check node ports, which load balancers probe to find out which nodes have
//! endpoints for a Service (kube-proxy: `pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

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
    NodeViews, healthz,
    http_server::{self, ResponseBody, Routes, respond, text},
};
use crate::{
    drain,
    listen::UnboundPorts,
    model::{Family, Kind, ObjectId, ObjectName, ObjectWarning},
    plan::{HealthCheckListeners, HealthChecks},
    publish,
};

/// The name that log lines use for these listeners.
const LISTENER_NAME: &str = "health check";

/// The response header that contains the number of local endpoints. Load balancers may use it as the node's
/// weight.
const WEIGHT_HEADER: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// The state of the health check node ports, for `/status` and `/metrics`.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthChecksView {
    /// The number of Services that have a health check node port.
    pub services: usize,
    /// The Services whose port is not served on every address, each with the reason.
    pub unserved: BTreeMap<String, String>,
    /// The number of times that a port turned out to be in use by another process or Service.
    pub ports_in_use_total: u64,
}

/// The current health checks, and the Service that owns each listener.
#[derive(Default)]
struct CurrentChecks {
    checks: Arc<HealthChecks>,
    listeners: HealthCheckListeners,
}

/// The server for health check node ports.
pub struct HealthCheckServer {
    checks: watch::Receiver<Arc<HealthChecks>>,
    views: Arc<NodeViews>,
    current: watch::Sender<Arc<CurrentChecks>>,
    /// The task for each listener, including listeners that are not bound yet.
    listener_tasks: BTreeMap<SocketAddr, AbortHandle>,
    tasks: JoinSet<()>,
    unbound_ports: UnboundPorts,
    warnings: watch::Sender<Arc<[ObjectWarning]>>,
    draining: watch::Receiver<bool>,
}

impl HealthCheckServer {
    /// Creates the server; [`Self::run`] opens the listeners.
    #[must_use]
    pub fn new(
        checks: watch::Receiver<Arc<HealthChecks>>,
        views: Arc<NodeViews>,
        draining: watch::Receiver<bool>,
    ) -> Self {
        Self {
            checks,
            views,
            current: watch::Sender::default(),
            listener_tasks: BTreeMap::new(),
            tasks: JoinSet::new(),
            unbound_ports: watch::Sender::default(),
            warnings: watch::Sender::new(Arc::default()),
            draining,
        }
    }

    /// Returns a receiver for the problems that an operator has to fix.
    #[must_use]
    pub fn warnings(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.warnings.subscribe()
    }

    /// Serves the health check node ports until the drain begins. If a port is in use, retries until it is
    /// free, without delaying the other ports.
    pub async fn run(mut self) {
        let mut unbound_ports = self.unbound_ports.subscribe();
        self.checks.mark_changed();
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut self.draining) => break,
                Ok(()) = self.checks.changed() => self.sync_listeners().await,
                Ok(()) = unbound_ports.changed() => {}
                Some(_) = self.tasks.join_next() => {}
            }
            let unbound_ports = unbound_ports.borrow_and_update().clone();
            self.publish(&unbound_ports);
        }
        self.tasks.shutdown().await;
    }

    /// Opens and closes listeners to match the current Services.
    async fn sync_listeners(&mut self) {
        let checks = Arc::clone(&self.checks.borrow_and_update());
        let listeners = checks.listeners();
        let wanted: BTreeSet<SocketAddr> = listeners.owners.keys().copied().collect();
        let current = CurrentChecks { checks, listeners };
        self.current.send_replace(Arc::new(current));
        let stale = |address: &SocketAddr, _: &mut AbortHandle| !wanted.contains(address);
        let closing: BTreeMap<_, _> = self.listener_tasks.extract_if(.., stale).collect();
        for (address, task) in &closing {
            task.abort();
            info!(%address, "health check port closed");
        }
        // The unspecified address can only be bound once the listeners on specific addresses are closed.
        while closing.values().any(|task| !task.is_finished()) {
            if self.tasks.join_next().await.is_none() {
                break;
            }
        }
        for address in closing.keys() {
            self.unbound_ports
                .send_if_modified(|names| names.remove(&listener_name(address)).is_some());
        }
        for address in wanted {
            if self.listener_tasks.contains_key(&address) {
                continue;
            }
            let routes = HealthCheckRoutes {
                address,
                current: self.current.subscribe(),
                views: Arc::clone(&self.views),
            };
            let (unbound_ports, draining) = (self.unbound_ports.clone(), self.draining.clone());
            let serving =
                http_server::serve_tcp(LISTENER_NAME, address, routes, unbound_ports, draining);
            self.listener_tasks
                .insert(address, self.tasks.spawn(serving));
        }
    }

    /// Publishes the Services whose port is not served on every address, each with the reason.
    fn publish(&self, unbound_ports: &BTreeMap<String, String>) {
        let current = Arc::clone(&self.current.borrow());
        let HealthCheckListeners { owners, losers } = &current.listeners;
        let unbound = owners.iter().filter_map(|(address, owner)| {
            let why = unbound_ports.get(&listener_name(address))?;
            Some((
                owner,
                format!("health check port {}: {why}", address.port()),
            ))
        });
        let owned_by_others = losers.iter().filter_map(|(loser, owner)| {
            let port = current.checks.services.get(loser)?.port;
            Some((
                loser,
                format!("health check port {port} belongs to {owner}"),
            ))
        });
        let unserved: BTreeMap<_, _> = unbound.chain(owned_by_others).collect();
        let warnings = unserved.iter().map(|(service, note)| ObjectWarning {
            regarding: ObjectId {
                kind: Kind::Service,
                name: (*service).clone(),
            },
            uid: current
                .checks
                .services
                .get(*service)
                .and_then(|check| check.uid.clone()),
            reason: Reason::HealthPortInUse,
            note: note.clone(),
        });
        publish::publish_if_changed(&self.warnings, warnings.collect());
        self.views.health_checks.send_modify(|view| {
            let unserved = unserved.into_iter();
            let unserved: BTreeMap<_, _> = unserved
                .map(|(service, note)| (service.to_string(), note))
                .collect();
            for (service, note) in &unserved {
                if view.unserved.get(service) != Some(note) {
                    warn!(%service, note, "{}", Reason::HealthPortInUse.meaning());
                    view.ports_in_use_total += 1;
                }
            }
            view.services = current.checks.services.len();
            view.unserved = unserved;
        });
    }
}

/// Returns a listener's name, built in the same way as in [`http_server::serve_tcp`].
fn listener_name(address: &SocketAddr) -> String {
    format!("{LISTENER_NAME} {address}")
}

/// The HTTP routes of one listener.
struct HealthCheckRoutes {
    address: SocketAddr,
    current: watch::Receiver<Arc<CurrentChecks>>,
    views: Arc<NodeViews>,
}

impl Routes for HealthCheckRoutes {
    const MAX_CONNECTIONS: usize = 16;
    // Many load balancers send requests, but each of them does so only rarely.
    const KEEPS_ALIVE: bool = false;
    const ONE_FAMILY: bool = true;
    const ACCEPTS_ANY_METHOD: bool = true;

    async fn respond(&self, _path: &str, _query: &str) -> Option<Response<ResponseBody>> {
        let current = Arc::clone(&self.current.borrow());
        let family = Family::of(self.address.ip());
        let served = current
            .listeners
            .owners
            .get(&self.address)
            .and_then(|owner| {
                let check = current.checks.services.get(owner)?;
                Some((owner, *check.ready_endpoints.get(&family)?))
            });
        let Some((service, local)) = served else {
            let body = "no Service has this port any more\n".to_owned();
            return Some(text(StatusCode::SERVICE_UNAVAILABLE, body));
        };
        let is_healthy = healthz::response(&self.views, false).healthy;
        Some(health_response(service, local, is_healthy))
    }
}

/// Builds the response to a load balancer. It is byte-for-byte identical to kube-proxy's.
fn health_response(service: &ObjectName, local: usize, is_healthy: bool) -> Response<ResponseBody> {
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{}\",\n\t\t\"name\": \"{}\"\n\t}},\n\
         \t\"localEndpoints\": {local},\n\t\"serviceProxyHealthy\": {is_healthy}\n}}",
        service.namespace, service.name
    );
    let code = super::node_routes::status_code(local > 0 && is_healthy);
    let mut response = respond(code, "application/json", body.into());
    response
        .headers_mut()
        .insert(WEIGHT_HEADER, HeaderValue::from(local));
    response
}

#[cfg(test)]
mod tests;
