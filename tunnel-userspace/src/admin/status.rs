use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tunnel_common::table::Size;

use super::{
    ChecksView, Views,
    readiness::{self, Readiness},
};
use crate::{
    bpf::KernelLog, identity::State, net::View, reconcile::Stats, sockets::View as SocketsView,
    tunnel::NodeView,
};

/// What does not change while the daemon runs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Setup {
    /// The version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// The node it serves.
    pub node: String,
    /// When it started, RFC 3339.
    pub started: String,
    /// The cgroup whose sockets are translated.
    pub cgroup: String,
    /// The folder of pins.
    pub pins: String,
    /// The layout of the maps.
    pub layout: u32,
    /// How a refused connect gets its error: `bpf_set_retval`, or `rewrite` on older kernels.
    pub refusing: String,
    /// What a client is known by: its `address`, or its `network namespace` where the kernel doesn't
    /// show that.
    pub clients: String,
    /// The sizes of the maps, by their words in the config.
    pub maps: BTreeMap<String, u32>,
}

/// What is in use of each size that the owner of the maps keeps, with its size.
pub fn used(stats: &Stats) -> impl Iterator<Item = (Size, usize)> + Clone {
    let count = |entries: u32| usize::try_from(entries).unwrap_or(usize::MAX);
    Size::ALL.into_iter().filter_map(move |size| {
        let used = match size {
            Size::Fronts => stats.fronts,
            Size::Slots => count(stats.slots),
            Size::Backends => count(stats.backends),
            Size::Sources => count(stats.sources),
            // What is steered is told by itself, and only the kernel knows which clients keep a backend.
            Size::Steering | Size::Affinity => return None,
        };
        Some((size, used))
    })
}

/// How long the steps of the start took, in seconds; nothing for one that isn't done yet.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartTimes {
    /// Loading programs and maps, and reading what the maps hold.
    pub load: Option<f64>,
    /// From there until every source had told its first whole list.
    pub read: Option<f64>,
    /// From there until the maps held what it says.
    pub write: Option<f64>,
    /// From there until the programs were attached and had seen a connect of the daemon's own.
    pub attach: Option<f64>,
}

/// The status as a whole.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Whether Services are translated as they should be.
    pub ready: bool,
    /// Why not.
    pub not_ready: Option<String>,
    /// Why the name of this node is that of no Node, where there should be one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nameless: Option<String>,
    /// What does not change while the daemon runs.
    #[serde(flatten)]
    pub setup: Setup,
    /// How long the steps of the start took.
    #[serde(default)]
    pub start: StartTimes,
    /// The kernel program whose events are logged, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_log: Option<KernelLog>,
    /// What the owner of the maps did.
    pub programmed: Stats,
    /// The network as steering needs it; empty where steering is off.
    pub network: View,
    /// The ending of sockets whose backend is gone.
    #[serde(default)]
    pub sockets: SocketsView,
    /// The nodes that the tunnel knows.
    pub nodes: Vec<NodeView>,
    /// The certificate of the gateway.
    pub identity: Option<State>,
    /// What the source read, and what it refused.
    pub source: serde_json::Value,
    /// How often the kernel met each reason since the maps were made.
    pub reasons: BTreeMap<String, u64>,
    /// How many open sockets were sent to a backend, by the kernel's count.
    #[serde(default)]
    pub connections: u64,
    /// Ports that are not ours yet, and why.
    pub not_listening: BTreeMap<String, String>,
    /// Health check ports of Services.
    #[serde(default)]
    pub health_checks: ChecksView,
}

impl Status {
    /// The status now.
    pub(super) fn of(views: &Views) -> Self {
        let readiness = Readiness::of(views);
        let counts = (views.counters)().into_iter();
        let reasons = counts.map(|(reason, n)| (reason.label().to_owned(), n));
        let source = serde_json::to_value((views.source)());
        let tunnel = (views.tunnel)();
        Self {
            ready: readiness.ready,
            not_ready: readiness.summary(),
            nameless: readiness::nameless(views),
            setup: views.setup.clone(),
            start: *views.start.borrow(),
            kernel_log: views.kernel_log.borrow().clone(),
            programmed: views.stats.borrow().clone(),
            network: views.network.borrow().clone(),
            sockets: views.sockets.borrow().clone(),
            nodes: tunnel.nodes,
            identity: tunnel.identity,
            source: source.unwrap_or_default(),
            reasons: reasons.collect(),
            connections: (views.connections)(),
            not_listening: views.listening.borrow().clone(),
            health_checks: views.checks.borrow().clone(),
        }
    }
}
