//! The response of `/status` of a node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tunnel_common::table::MapSize;

use super::{
    HealthChecksView, NodeViews,
    readiness::{self, Readiness},
};
use crate::{
    bpf::KernelLog, identity::CertificateState, net::NetworkView, reconcile::ReconcileStats,
    sockets::TerminatorView, tunnel::NodeView,
};

/// Values that stay constant while the daemon runs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSetup {
    /// The version of the daemon.
    pub version: String,
    /// The process ID.
    pub pid: u32,
    /// The name of the node.
    pub node: String,
    /// The start time, RFC 3339.
    pub started: String,
    /// The cgroup whose sockets are translated.
    pub cgroup: String,
    /// The directory of pinned maps and programs.
    pub pins: String,
    /// The layout version of the maps.
    pub layout: u32,
    /// The method to set the error of a refused connect: `bpf_set_retval`, or `rewrite` on older kernels.
    pub refusal_method: String,
    /// The identity of a client for session affinity and source ranges: its `address`, or its `network
    /// namespace` if the kernel programs can't read the address.
    pub client_identity: String,
    /// The capacities of the maps in entries, by config key.
    pub maps: BTreeMap<String, u32>,
}

/// Returns the number of entries in use of each map that the reconciler tracks.
pub fn used_entries(stats: &ReconcileStats) -> impl Iterator<Item = (MapSize, usize)> + Clone {
    let count = |entries: u32| usize::try_from(entries).unwrap_or(usize::MAX);
    MapSize::ALL.into_iter().filter_map(move |size| {
        let used = match size {
            MapSize::Frontends => stats.frontends,
            MapSize::Slots => count(stats.slots),
            MapSize::Backends => count(stats.backends),
            MapSize::SourceRanges => count(stats.source_ranges),
            // Steering has its own section of the status. Only the kernel programs write the affinity map.
            MapSize::Steering | MapSize::Affinity => return None,
        };
        Some((size, used))
    })
}

/// The durations of the steps of the start, in seconds; `None` for a step that is not finished.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartTimes {
    /// The time to load programs and maps, and to read the content of the maps.
    pub load: Option<f64>,
    /// The time from the end of `load` until every source had delivered its first complete list.
    pub sync: Option<f64>,
    /// The time from the end of `sync` until the maps had these objects.
    pub write: Option<f64>,
    /// The time from the end of `write` until the programs were attached and the probe had succeeded.
    pub attach: Option<f64>,
}

/// The response of `/status` of a node.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// True if all Services are programmed.
    pub ready: bool,
    /// The reasons why the node is not ready.
    pub not_ready: Option<String>,
    /// A message if no Node object has the name of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_missing: Option<String>,
    /// Values that stay constant while the daemon runs.
    #[serde(flatten)]
    pub setup: NodeSetup,
    /// The durations of the steps of the start.
    #[serde(default)]
    pub startup: StartTimes,
    /// The kernel program whose events are logged, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_log: Option<KernelLog>,
    /// The statistics of the reconciler.
    pub programmed: ReconcileStats,
    /// The guarded uplinks and routes of steering; empty if steering is off.
    pub network: NetworkView,
    /// The state of the task that ends sockets of removed backends.
    #[serde(default)]
    pub sockets: TerminatorView,
    /// The edge nodes that the gateway knows.
    pub nodes: Vec<NodeView>,
    /// The state of the gateway's certificate.
    pub identity: Option<CertificateState>,
    /// The objects that the sources have read, and the invalid ones.
    pub source: serde_json::Value,
    /// The counters of the kernel programs, by reason, since the maps were created.
    pub reasons: BTreeMap<String, u64>,
    /// The number of open sockets that are connected to a backend, as counted by the kernel programs.
    #[serde(default)]
    pub open_connections: u64,
    /// Ports that could not be bound yet, with the error.
    pub not_listening: BTreeMap<String, String>,
    /// The state of the health check node ports of Services.
    #[serde(default)]
    pub health_checks: HealthChecksView,
}

impl NodeStatus {
    /// Returns the current status.
    pub(super) fn of(views: &NodeViews) -> Self {
        let readiness = Readiness::of(views);
        let counts = (views.kernel_counters)().into_iter();
        let reasons = counts.map(|(reason, n)| (reason.label().to_owned(), n));
        let source = serde_json::to_value((views.source_report)());
        let tunnel = (views.tunnel)();
        Self {
            ready: readiness.ready,
            not_ready: readiness.summary(),
            node_missing: readiness::missing_node(views),
            setup: views.setup.clone(),
            startup: *views.start_times.borrow(),
            kernel_log: views.kernel_log.borrow().clone(),
            programmed: views.stats.borrow().clone(),
            network: views.network.borrow().clone(),
            sockets: views.sockets.borrow().clone(),
            nodes: tunnel.nodes,
            identity: tunnel.identity,
            source: source.unwrap_or_default(),
            reasons: reasons.collect(),
            open_connections: (views.open_connections)(),
            not_listening: views.unbound_ports.borrow().clone(),
            health_checks: views.health_checks.borrow().clone(),
        }
    }
}
