//! What the daemon tells of itself: status, metrics, health. It reads views that it was given and
//! changes nothing.
//!
//! - `status`: the status as a whole
//! - `metrics`: counts and sizes for Prometheus
//! - `health`: what load balancers and probes ask
//! - `server`: HTTP on the admin socket and the two ports
//! - `client`: the command line's end of the admin socket

mod client;
mod health;
mod metrics;
mod server;
mod status;

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::{mpsc, watch};
use tunnel_common::reason::Reason;

pub use self::{
    client::{AskError, ask},
    server::{Endpoint, SocketError, serve, serve_socket},
    status::{Maps, Setup, Status},
};
use crate::{
    net::View,
    reconcile::{Query, Stats},
    source::Report,
};

/// Reads the kernel's counters.
pub type Counters = dyn Fn() -> Result<Vec<(Reason, u64)>, String> + Send + Sync;

/// What is shown, as the parts of the daemon publish it.
pub struct Views {
    /// What does not change while the daemon runs.
    pub setup: Setup,
    /// Whether the data path is as it should be: why not, or nothing.
    pub ready: watch::Receiver<Option<String>>,
    /// The owner of the maps.
    pub stats: watch::Receiver<Stats>,
    /// The network as steering needs it; empty where steering is off.
    pub network: watch::Receiver<View>,
    /// Questions to the owner of the maps.
    pub queries: mpsc::Sender<Query>,
    /// The source.
    pub source: watch::Receiver<Arc<Report>>,
    /// The kernel's counters.
    pub counters: Box<Counters>,
    /// Ports that are not ours yet, and why.
    pub listening: watch::Sender<BTreeMap<String, String>>,
}
