//! The HTTP endpoints for status, metrics and health. This module only reads what other modules publish.
//!
//! - `node_routes`: the paths of `culvert node`, by port
//! - `agent_routes`: the paths of `culvert agent`
//! - `status`: `/status`
//! - `metrics`: `/metrics`
//! - `readiness`: `/readyz`; status, metrics and the log use the same function
//! - `healthz`: `/healthz` and `/livez`, compatible with kube-proxy
//! - `health_check_node_ports`: the health check node ports of Services
//! - `http_server`: the HTTP server on TCP ports and on the admin socket
//! - `http_client`: the HTTP client of the command line
//! - `fixture`: helpers for tests

mod agent_routes;
#[cfg(test)]
mod fixture;
mod health_check_node_ports;
mod healthz;
mod http_client;
mod http_server;
mod metrics;
mod node_routes;
mod readiness;
mod status;

use std::collections::BTreeMap;

use tokio::sync::watch;
use tunnel_common::reason::Reason;

pub use self::{
    agent_routes::{AgentSetup, AgentStatus, AgentViews},
    health_check_node_ports::{HealthCheckServer, HealthChecksView},
    http_client::{RequestError, request},
    http_server::{Routes, SocketError, serve_tcp, serve_unix},
    node_routes::{NodeListener, NodeRoutes},
    readiness::log_readiness,
    status::{NodeSetup, NodeStatus, StartTimes, used_entries},
};
use crate::{
    bpf::KernelLog,
    identity::CertificateState,
    listen::UnboundPorts,
    net::NetworkView,
    reconcile::{PortCounterList, ReconcileStats, ServiceView},
    sockets::TerminatorView,
    source::SourceReport,
    tunnel::NodeView,
};

/// A function that returns a current value.
pub type Getter<T> = Box<dyn Fn() -> T + Send + Sync>;

/// A function that calls a callback for each Service, or for each Service with the given name.
pub type ForEachService = dyn Fn(Option<&str>, &mut dyn FnMut(ServiceView)) + Send + Sync;

/// The number of health responses, by path and status code.
pub type HealthResponses = BTreeMap<(&'static str, u16), u64>;

/// The state of a node's gateway and ingress; empty if the tunnel is off.
#[derive(Clone, Debug, Default)]
pub struct TunnelView {
    /// Nodes that have or had a session, to which a stream was requested, or that have steered ports.
    pub nodes: Vec<NodeView>,
    /// The number of streams that ended for each reason.
    pub counts: BTreeMap<Reason, u64>,
    /// The state of the gateway's certificate.
    pub identity: Option<CertificateState>,
}

/// The state of `culvert node`, as its modules publish it.
pub struct NodeViews {
    /// Values that stay constant while the daemon runs.
    pub setup: NodeSetup,
    /// The effective config, in the format of `/configz`.
    pub config: serde_json::Value,
    /// The current step of the start or stop, for example `waiting for the sources`; `None` in between.
    pub starting: watch::Receiver<Option<String>>,
    /// The durations of the steps of the start.
    pub start_times: watch::Receiver<StartTimes>,
    /// The statistics of the reconciler.
    pub stats: watch::Receiver<ReconcileStats>,
    /// The kernel program whose events are logged, if any.
    pub kernel_log: watch::Receiver<Option<KernelLog>>,
    /// The guarded uplinks and routes of steering; empty if steering is off.
    pub network: watch::Receiver<NetworkView>,
    /// The state of the task that ends sockets.
    pub sockets: watch::Receiver<TerminatorView>,
    /// Calls a callback with the programmed state of each Service, or of each Service with the given name.
    pub for_each_service: Box<ForEachService>,
    /// The counts of the Service ports that have metrics of their own.
    pub port_counts: Getter<PortCounterList>,
    /// The state of the gateway and the ingress.
    pub tunnel: Getter<TunnelView>,
    /// The objects that the sources have read, and the invalid ones.
    pub source_report: Getter<SourceReport>,
    /// The counters of the kernel programs; empty if they can't be read.
    pub kernel_counters: Getter<Vec<(Reason, u64)>>,
    /// The number of open sockets that are connected to a backend, as counted by the kernel programs.
    pub open_connections: Getter<u64>,
    /// Ports that could not be bound yet, with the error.
    pub unbound_ports: UnboundPorts,
    /// The state of the health check node ports of Services.
    pub health_checks: watch::Sender<HealthChecksView>,
    /// The number of health responses, by path and status code.
    pub health_responses: watch::Sender<HealthResponses>,
}
