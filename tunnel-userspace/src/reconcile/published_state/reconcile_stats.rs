//! The reconcile loop's statistics, for the status and metrics.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::sync_metrics::SyncMetrics;
use crate::reconcile::{desired_plans::DesiredPlans, map_sync::MapSync, steering::SteeringView};

/// The maximum number of namespaces that are reported because they have used up their share of the maps.
const MAX_NAMESPACES: usize = 100;

/// The statistics that the reconcile loop publishes after each sync.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcileStats {
    /// True if every source has delivered its first complete list.
    pub synced: bool,
    /// True if, as of the last sync, at least one source had not responded since startup.
    #[serde(default)]
    pub stale: bool,
    /// The number of Services that have a plan.
    pub services: usize,
    /// The number of frontends in the maps.
    pub frontends: usize,
    /// The number of slots in use.
    pub slots: u32,
    /// The number of backends in use.
    pub backends: u32,
    /// The number of source ranges in use.
    #[serde(default)]
    pub source_ranges: u32,
    /// The number of removed backends that still have open connections, so that their indices are not reused
    /// yet.
    #[serde(default)]
    pub draining_backends: usize,
    /// The number of service ports that are not programmed as planned, by reason.
    pub problems: BTreeMap<String, usize>,
    /// The number of service ports that did not fit into the share of their namespace, by namespace. Contains
    /// at most 100 namespaces.
    #[serde(default)]
    pub namespaces_beyond_share: BTreeMap<String, usize>,
    /// The number of problems that have occurred since this process started, by reason.
    pub counts: BTreeMap<String, u64>,
    /// The number of syncs so far.
    pub syncs: u64,
    /// The duration of the last sync, in seconds.
    pub last_sync_seconds: f64,
    /// The total duration of all syncs, in seconds.
    pub total_sync_seconds: f64,
    /// The time from receiving the oldest change in the last update until it was written to the maps, in
    /// seconds.
    pub programming_latency_seconds: f64,
    /// The time at which the last sync ended.
    pub last_sync_at: Option<Timestamp>,
    /// The time at which a sync last ended with nothing left to write.
    #[serde(default)]
    pub last_complete_sync_at: Option<Timestamp>,
    /// The time since which syncs have been unable to write everything, or `None` if the last sync wrote
    /// everything.
    pub failing_since: Option<Timestamp>,
    /// The same time by the monotonic clock, which no change of the wall clock affects.
    #[serde(skip)]
    pub failing_from: Option<Duration>,
    /// True if the Node object allows load balancers to send traffic to this node. Also true until the Node
    /// object is first received, but false once it has been deleted.
    pub node_eligible: bool,
    /// True if this node's Node object exists.
    #[serde(default)]
    pub node_known: bool,
    /// The number of differences found by audits, plus the number of invalid entries found at startup.
    pub drift: u64,
    /// The reason why the last test connection to the daemon's own frontend failed, if it did.
    #[serde(default)]
    pub probe_problem: Option<String>,
    /// The state of steering.
    pub steering: SteeringView,
    /// The metrics that kube-proxy also exports. They are not part of the status.
    #[serde(skip)]
    pub sync: SyncMetrics,
}

impl ReconcileStats {
    /// Fills in the numbers that come from the plans and from the contents of the maps.
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
        let problems = sync.ports_with_problems().into_iter();
        self.problems = problems
            .map(|(reason, ports)| (reason.label().to_owned(), ports))
            .collect();
        let beyond_share = sync.problems.ports_beyond_share().iter();
        self.namespaces_beyond_share = beyond_share
            .take(MAX_NAMESPACES)
            .map(|(namespace, ports)| (namespace.to_string(), *ports))
            .collect();
        let counted = |(reason, count): (&Reason, &u64)| (reason.label().to_owned(), *count);
        self.counts = sync.problems.reason_counts.iter().map(counted).collect();
    }
}
