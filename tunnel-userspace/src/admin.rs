//! The daemon's status, metrics and health endpoints. This module reads published views and changes
//! nothing.
//!
//! - `status`: the complete status
//! - `metrics`: counts and sizes for Prometheus
//! - `readiness`: the one function that decides if the node is ready; all endpoints call it
//! - `proxy_health`: `/healthz` and `/livez`, compatible with kube-proxy
//! - `service_health`: the health check ports of Services
//! - `server`: HTTP on sockets and ports
//! - `node`, `agent`: the routes of these roles
//! - `client`: the command line's client of the admin socket
//! - `fixture`: views for tests

mod agent;
mod client;
#[cfg(test)]
mod fixture;
mod metrics;
mod node;
mod proxy_health;
mod readiness;
mod server;
mod service_health;
mod status;

use std::collections::BTreeMap;

use tokio::sync::watch;
use tunnel_common::reason::Reason;

pub use self::{
    agent::{AgentSetup, AgentStatus, AgentViews},
    client::{AskError, ask},
    node::{Endpoint, Node},
    readiness::log_readiness,
    server::{Routes, SocketError, serve_path, serve_port},
    service_health::{Checks, ChecksView},
    status::{Setup, StartTimes, Status, used},
};
use crate::{
    bpf::KernelLog,
    identity::State,
    listen::Waiting,
    net::View,
    reconcile::{Counted, ServiceView, Stats},
    sockets::View as SocketsView,
    source::Report,
    tunnel::NodeView,
};

/// Returns the current value.
pub type Query<T> = Box<dyn Fn() -> T + Send + Sync>;

/// Passes the Services of a name, or all, to a function, one after the other.
pub type Services = dyn Fn(Option<&str>, &mut dyn FnMut(ServiceView)) + Send + Sync;

/// Counts of health responses, by path and status code.
pub type Answers = BTreeMap<(&'static str, u16), u64>;

/// The tunnel of a node; empty if it is off.
#[derive(Clone, Debug, Default)]
pub struct TunnelView {
    /// Nodes with a current or past session, with a request for one, or with steered ports.
    pub nodes: Vec<NodeView>,
    /// The number of occurrences of each reason.
    pub counts: BTreeMap<Reason, u64>,
    /// The certificate of the gateway.
    pub identity: Option<State>,
}

/// The published views of the daemon's parts.
pub struct Views {
    /// Facts that stay constant while the daemon runs.
    pub setup: Setup,
    /// The effective config, under the name of its group.
    pub config: serde_json::Value,
    /// The current step of the start, or a note that the daemon stops; `None` while the owner of the
    /// maps runs.
    pub starting: watch::Receiver<Option<String>>,
    /// The duration of each step of the start.
    pub start: watch::Receiver<StartTimes>,
    /// The statistics of the owner of the maps.
    pub stats: watch::Receiver<Stats>,
    /// The kernel program whose events are logged, if any.
    pub kernel_log: watch::Receiver<Option<KernelLog>>,
    /// The view of the network for steering; empty if steering is off.
    pub network: watch::Receiver<View>,
    /// The state of the task that ends sockets.
    pub sockets: watch::Receiver<SocketsView>,
    /// Passes on the Services of a name, or all, with their programmed state, one after the other.
    pub services: Box<Services>,
    /// The counts of the Service ports that have their own metrics.
    pub counted: Query<Counted>,
    /// The tunnel.
    pub tunnel: Query<TunnelView>,
    /// The objects that the sources have read, and the refused ones.
    pub source: Query<Report>,
    /// The kernel's counters; empty if they can't be read.
    pub counters: Query<Vec<(Reason, u64)>>,
    /// The number of open sockets with a backend, as the kernel counts them.
    pub connections: Query<u64>,
    /// Ports that could not be bound yet, with the error.
    pub listening: Waiting,
    /// Health check ports of Services.
    pub checks: watch::Sender<ChecksView>,
    /// The number of responses of each health path, by status code.
    pub answers: watch::Sender<Answers>,
}
