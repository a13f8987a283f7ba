//! What the daemon tells of itself: status, metrics, health. It reads views that it was given and
//! changes nothing.
//!
//! - `status`: the status as a whole
//! - `metrics`: counts and sizes for Prometheus
//! - `readiness`: judges if the node is ready; every answer that says so asks it
//! - `proxy_health`: `/healthz` and `/livez`, as kube-proxy answers them
//! - `service_health`: the health check ports of Services
//! - `server`: HTTP on sockets and ports
//! - `node`, `agent`: the routes of those roles
//! - `client`: the command line's end of the admin socket
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

/// Reads a value as it is now.
pub type Query<T> = Box<dyn Fn() -> T + Send + Sync>;

/// Shows the Services of a name, or all.
pub type Services = dyn Fn(Option<&str>) -> Vec<ServiceView> + Send + Sync;

/// Counts of answers about health, by path and code.
pub type Answers = BTreeMap<(&'static str, u16), u64>;

/// The tunnel of a node; empty where it is off.
#[derive(Clone, Debug, Default)]
pub struct TunnelView {
    /// Every node that has, had or was asked for a session, or is steered.
    pub nodes: Vec<NodeView>,
    /// How often each reason was met.
    pub counts: BTreeMap<Reason, u64>,
    /// The certificate of the gateway.
    pub identity: Option<State>,
}

/// What is shown, as the parts of the daemon publish it.
pub struct Views {
    /// What does not change while the daemon runs.
    pub setup: Setup,
    /// The config that the daemon goes by, below the group that it belongs to.
    pub config: serde_json::Value,
    /// What the start waits for, or that the daemon stops; nothing while the owner of the maps runs.
    pub starting: watch::Receiver<Option<String>>,
    /// How long the steps of the start took.
    pub start: watch::Receiver<StartTimes>,
    /// The owner of the maps.
    pub stats: watch::Receiver<Stats>,
    /// The kernel program whose events are logged, if any.
    pub kernel_log: watch::Receiver<Option<KernelLog>>,
    /// The network as steering needs it; empty where steering is off.
    pub network: watch::Receiver<View>,
    /// The ending of sockets.
    pub sockets: watch::Receiver<SocketsView>,
    /// Services of a name, or all, and what is programmed of them.
    pub services: Box<Services>,
    /// The counts of the Service ports that have metrics of their own.
    pub counted: Query<Counted>,
    /// The tunnel.
    pub tunnel: Query<TunnelView>,
    /// What the sources have read, and what of it can't be used.
    pub source: Query<Report>,
    /// The kernel's counters; none where they can't be read.
    pub counters: Query<Vec<(Reason, u64)>>,
    /// How many open sockets were sent to a backend, by the kernel's count.
    pub connections: Query<u64>,
    /// Ports that are not ours yet, and why.
    pub listening: Waiting,
    /// Health check ports of Services.
    pub checks: watch::Sender<ChecksView>,
    /// How often each path about health was answered with each code.
    pub answers: watch::Sender<Answers>,
}
