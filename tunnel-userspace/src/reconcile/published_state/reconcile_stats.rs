//! The statistics of the reconcile loop, for status and metrics.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::sync_metrics::SyncMetrics;
use crate::reconcile::{desired_plans::DesiredPlans, map_sync::MapSync, steering::SteeringView};

/// The statistics of the reconcile loop, which publishes them after each sync.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcileStats {
    /// True if every source has delivered its first complete list.
    pub synced: bool,
    /// True if a source has not answered since the start, as of the last sync.
    #[serde(default)]
    pub stale: bool,
    /// The number of Services with a plan.
    pub services: usize,
    /// The number of frontends in the maps.
    pub frontends: usize,
    /// The number of slots in use.
    pub slots: u32,
    /// The number of backends in use.
    pub backends: u32,
    /// The number of ranges of clients in use.
    #[serde(default)]
    pub source_ranges: u32,
    /// The number of removed backends that still have open connections; their indices are not reused yet.
    #[serde(default)]
    pub draining_backends: usize,
    /// The number of service ports that are not programmed as planned, by reason.
    pub problems: BTreeMap<String, usize>,
    /// The number of problems that occurred in this process, by reason.
    pub counts: BTreeMap<String, u64>,
    /// The number of syncs.
    pub syncs: u64,
    /// The duration of the last sync, in seconds.
    pub last_sync_seconds: f64,
    /// The total duration of all syncs, in seconds.
    pub total_sync_seconds: f64,
    /// The time from receiving the oldest change of the last update to its write into the maps, in seconds.
    pub programming_latency_seconds: f64,
    /// The end of the last sync.
    pub last_sync_at: Option<Timestamp>,
    /// The end of the last sync after which nothing was left to write.
    #[serde(default)]
    pub last_complete_sync_at: Option<Timestamp>,
    /// The time since which syncs can't write everything; `None` if the last sync did.
    pub failing_since: Option<Timestamp>,
    /// True if the Node object permits load balancers to send traffic to this node. True before the first
    /// Node object is received, false after it is deleted.
    pub node_eligible: bool,
    /// True if a Node with the name of this node exists.
    #[serde(default)]
    pub node_known: bool,
    /// The number of differences that audits found, and of invalid entries at the start.
    pub drift: u64,
    /// The state of steering.
    pub steering: SteeringView,
    /// The metrics of kube-proxy; not part of the status.
    #[serde(skip)]
    pub sync: SyncMetrics,
}

impl ReconcileStats {
    /// Fills in the numbers that come from the plans and the content of the maps.
    pub(in crate::reconcile) fn fill_from<M>(&mut self, desired: &DesiredPlans, sync: &MapSync<M>) {
        let usage = sync.tracked.actual.usage();
        self.synced = sync.is_synced();
        self.services = desired.plans.len();
        self.frontends = usage.frontends;
        self.slots = usage.slots;
        self.backends = usage.backends;
        self.source_ranges = usage.source_ranges;
        self.draining_backends = sync.tracked.actual.draining.len();
        self.drift = sync.drift;
        self.node_eligible = desired.node_eligible;
        self.node_known = desired.node_known;
        self.problems = BTreeMap::new();
        for problem in sync.all_problems() {
            let label = problem.reason.label().to_owned();
            *self.problems.entry(label).or_default() += 1;
        }
        let counted = |(reason, count): (&Reason, &u64)| (reason.label().to_owned(), *count);
        self.counts = sync.problems.reason_counts.iter().map(counted).collect();
    }
}
