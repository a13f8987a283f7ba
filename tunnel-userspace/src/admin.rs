//! What the daemon tells of itself: status, metrics, health. It reads views that it was given and
//! changes nothing.
//!
//! - `status`: the status as a whole
//! - `metrics`: counts and sizes for Prometheus
//! - `ready`: the one answer to the question if the node is ready
//! - `health`: what load balancers and probes ask
//! - `checks`: what load balancers ask of a Service
//! - `server`: HTTP on sockets and ports, for a site
//! - `node`, `agent`: the sites of those roles
//! - `client`: the command line's end of the admin socket
//! - `fixture`: views for tests

mod agent;
mod checks;
mod client;
#[cfg(test)]
mod fixture;
mod health;
mod metrics;
mod node;
mod ready;
mod server;
mod status;

use std::collections::BTreeMap;

use tokio::sync::watch;
use tracing::warn;
use tunnel_common::reason::Reason;

pub use self::{
    agent::{AgentSetup, AgentStatus, AgentViews},
    checks::{Checks, ChecksView},
    client::{AskError, ask},
    node::{Answers, Endpoint, Node},
    ready::log_readiness,
    server::{Site, SocketError, Span, serve_path, serve_port},
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

/// Reads the kernel's counters.
pub type Counters = dyn Fn() -> Result<Vec<(Reason, u64)>, String> + Send + Sync;

/// Shows the Services of a name, or all.
pub type Services = dyn Fn(Option<&str>) -> Vec<ServiceView> + Send + Sync;

/// What the sources have read, and what of it can't be used.
pub type Sources = dyn Fn() -> Report + Send + Sync;

/// What is shown of the tunnel of a node; nothing where it is off.
pub struct TunnelViews {
    /// Every node that has, had or was asked for a session, or is steered.
    pub nodes: Box<dyn Fn() -> Vec<NodeView> + Send + Sync>,
    /// How often each reason was met.
    pub counts: Box<dyn Fn() -> BTreeMap<Reason, u64> + Send + Sync>,
    /// The certificate of the gateway.
    pub identity: Box<dyn Fn() -> Option<State> + Send + Sync>,
}

impl Default for TunnelViews {
    fn default() -> Self {
        Self {
            nodes: Box::new(Vec::new),
            counts: Box::new(BTreeMap::new),
            identity: Box::new(|| None),
        }
    }
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
    /// Of how many Service ports there are metrics of their own.
    pub service_metrics: usize,
    /// Services of a name, or all, and what is programmed of them.
    pub services: Box<Services>,
    /// What was counted of so many service ports.
    pub counted: Box<dyn Fn(usize) -> Counted + Send + Sync>,
    /// The tunnel.
    pub tunnel: TunnelViews,
    /// What the sources have read.
    pub source: Box<Sources>,
    /// The kernel's counters.
    pub counters: Box<Counters>,
    /// How many open sockets were sent to a backend, by the kernel's count.
    pub connections: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Ports that are not ours yet, and why.
    pub listening: Waiting,
    /// Health check ports of Services.
    pub checks: watch::Sender<ChecksView>,
}

impl Views {
    /// The kernel's counters; none where they can't be read, which is logged.
    fn kernel_counts(&self) -> Vec<(Reason, u64)> {
        (self.counters)().unwrap_or_else(|error| {
            warn!(%error, "cannot read the kernel's counters");
            Vec::new()
        })
    }
}
