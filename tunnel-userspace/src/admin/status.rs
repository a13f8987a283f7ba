//! A node's response to `/status`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tunnel_common::table::MapSize;

use super::{
    HealthChecksView, NodeViews,
    readiness::{self, Readiness},
};
use crate::{
    bpf::{AttachmentView, KernelLog},
    flows::FlowsView,
    identity::{CertificateState, DenyListState},
    net::{NetworkView, PacketsView},
    reconcile::ReconcileStats,
    sockets::TerminatorView,
    tunnel::NodeView,
};

/// Values that never change while the daemon runs.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSetup {
    /// The daemon's version.
    pub version: String,
    /// The process ID.
    pub pid: u32,
    /// The node's name.
    pub node: String,
    /// The start time, in RFC 3339 format.
    pub started: String,
    /// The cgroup whose sockets are translated.
    pub cgroup: String,
    /// The directory in which the maps and programs are pinned.
    pub pins: String,
    /// The version of the maps' layout.
    pub layout: u32,
    /// The way in which a refused connect() gets its error: `bpf_set_retval`, or `rewrite` on older kernels.
    pub refusal_method: String,
    /// The property that identifies a client for session affinity and source ranges: its `address`, or its
    /// `network namespace` if the kernel programs can't read the address.
    pub client_identity: String,
    /// The capacity of each map in entries, by config key.
    pub maps: BTreeMap<String, u32>,
    /// The reason why the state directory can't be used completely, if there is one.
    #[serde(default)]
    pub state_dir_problem: Option<String>,
    /// A warning if the config allows more connections than the limit on open files.
    #[serde(default)]
    pub descriptor_problem: Option<String>,
}

/// Returns how many entries are in use in each map that the reconciler tracks.
pub fn used_entries(stats: &ReconcileStats) -> impl Iterator<Item = (MapSize, usize)> + Clone {
    let count = |entries: u32| usize::try_from(entries).unwrap_or(usize::MAX);
    MapSize::ALL.into_iter().filter_map(move |size| {
        let used = match size {
            MapSize::Frontends => stats.frontends,
            MapSize::Slots => count(stats.slots),
            MapSize::Backends => count(stats.backends),
            MapSize::SourceRanges => count(stats.source_ranges),
            // The steering maps have their own section in the status, and only the kernel programs write the
            // affinity map.
            MapSize::Steering
            | MapSize::Affinity
            | MapSize::SharedTranslations
            | MapSize::Flows
            | MapSize::Fragments => return None,
        };
        Some((size, used))
    })
}

/// The duration of each startup step in seconds; `None` for a step that has not finished.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartTimes {
    /// The time taken to load the programs and maps, and to read the maps' content.
    pub load: Option<f64>,
    /// The time from the end of `load` until every source delivered its first complete list.
    pub sync: Option<f64>,
    /// The time from the end of `sync` until the objects in these lists were written to the maps.
    pub write: Option<f64>,
    /// The time from the end of `write` until the programs were attached and the probe succeeded.
    pub attach: Option<f64>,
}

/// A node's response to `/status`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// True if the node is ready, as in `/readyz`.
    pub ready: bool,
    /// The reasons why the node is not ready; `None` if it is ready.
    pub not_ready: Option<String>,
    /// A message if no Node object has this node's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_missing: Option<String>,
    /// Values that never change while the daemon runs.
    #[serde(flatten)]
    pub setup: NodeSetup,
    /// The time that each startup step took.
    #[serde(default)]
    pub startup: StartTimes,
    /// The state of the attached programs.
    #[serde(default)]
    pub programs: AttachmentView,
    /// The kernel program whose events are logged, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_log: Option<KernelLog>,
    /// The reconciler's statistics.
    pub programmed: ReconcileStats,
    /// The guarded uplinks and the steering routes; empty if steering is off.
    pub network: NetworkView,
    /// The uplinks whose packets are translated.
    #[serde(default)]
    pub packets: PacketsView,
    /// The flows of translated packets.
    #[serde(default)]
    pub flows: FlowsView,
    /// The state of the task that terminates the sockets of removed backends.
    #[serde(default)]
    pub sockets: TerminatorView,
    /// The edge nodes that the gateway knows.
    pub nodes: Vec<NodeView>,
    /// The state of the gateway's certificate; `None` if this node runs no gateway.
    pub identity: Option<CertificateState>,
    /// The state of the gateway's deny list; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny_list: Option<DenyListState>,
    /// The number of objects that the sources have read, and the problems found in them.
    pub source: serde_json::Value,
    /// The kernel programs' counters since the maps were created, and the tunnel's since the daemon started, by
    /// reason.
    pub reasons: BTreeMap<String, u64>,
    /// The number of open sockets connected to a backend, as counted by the kernel programs.
    #[serde(default)]
    pub open_connections: u64,
    /// The ports that are not bound yet, each with the error from the last attempt.
    pub not_listening: BTreeMap<String, String>,
    /// The state of the Services' health check node ports.
    #[serde(default)]
    pub health_checks: HealthChecksView,
}

impl NodeStatus {
    /// Returns the node's current status.
    pub(super) fn of(views: &NodeViews) -> Self {
        let readiness = Readiness::of(views);
        let tunnel = (views.tunnel)();
        let counts = (views.kernel_counters)().into_iter().chain(tunnel.counts);
        let reasons = counts.map(|(reason, n)| (reason.label().to_owned(), n));
        let source = serde_json::to_value((views.source_report)());
        Self {
            ready: readiness.ready,
            not_ready: readiness.summary(),
            node_missing: readiness::missing_node(views),
            setup: views.setup.clone(),
            startup: *views.start_times.borrow(),
            programs: views.attachment.borrow().clone(),
            kernel_log: views.kernel_log.borrow().clone(),
            programmed: views.stats.borrow().clone(),
            network: views.network.borrow().clone(),
            packets: views.packets.borrow().clone(),
            flows: views.flows.borrow().clone(),
            sockets: views.sockets.borrow().clone(),
            nodes: tunnel.nodes,
            identity: tunnel.identity,
            deny_list: tunnel.deny_list,
            source: source.unwrap_or_default(),
            reasons: reasons.collect(),
            open_connections: (views.open_connections)(),
            not_listening: views.unbound_ports.borrow().clone(),
            health_checks: views.health_checks.borrow().clone(),
        }
    }
}
