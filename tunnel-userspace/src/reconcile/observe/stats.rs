use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::measures::SyncStats;
use crate::reconcile::{desired::Desired, steering::SteeringView, sync::MapSync};

/// The state of the loop, for metrics and status. Published after each sync.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// True if a first complete sync was made.
    pub synced: bool,
    /// True if a source has not answered since the start, as of the last sync.
    #[serde(default)]
    pub stale: bool,
    /// The number of Services that were read.
    pub services: usize,
    /// The number of frontends that are programmed.
    pub frontends: usize,
    /// The number of slots in use.
    pub slots: u32,
    /// The number of backends in use.
    pub backends: u32,
    /// The number of ranges of clients in use.
    #[serde(default)]
    pub source_ranges: u32,
    /// The number of removed backends with open connections, whose indices cannot be reused yet.
    #[serde(default)]
    pub draining_backends: usize,
    /// The number of service ports that are not programmed as planned, by reason.
    pub problems: BTreeMap<String, usize>,
    /// The counter of each reason in this process.
    pub counts: BTreeMap<String, u64>,
    /// The number of syncs.
    pub syncs: u64,
    /// The duration of the last sync, in seconds.
    pub last_sync_seconds: f64,
    /// The duration of all syncs, in seconds.
    pub total_sync_seconds: f64,
    /// The time from the notice of a change to its last write, in seconds, in the last sync.
    pub programming_latency_seconds: f64,
    /// The end of the last sync.
    pub last_sync_at: Option<Timestamp>,
    /// The end of the last sync that left nothing to be written.
    #[serde(default)]
    pub last_complete_sync_at: Option<Timestamp>,
    /// The time since which writes fail; none if they don't.
    pub failing_since: Option<Timestamp>,
    /// True if load balancers may send traffic to this node, by its Node object. True for a node that
    /// never had one, false for one whose object was deleted.
    pub node_eligible: bool,
    /// True if there is a Node of this node's name.
    #[serde(default)]
    pub node_known: bool,
    /// The number of differences found between the maps and their known content.
    pub drift: u64,
    /// The state of steering.
    pub steering: SteeringView,
    /// The metrics that kube-proxy has, too; for metrics only.
    #[serde(skip)]
    pub sync: SyncStats,
}

impl Stats {
    /// Sets the numbers of the planned and programmed state.
    pub(in crate::reconcile) fn describe<M>(&mut self, desired: &Desired, sync: &MapSync<M>) {
        let usage = sync.ports.actual.usage();
        self.synced = sync.is_synced();
        self.services = desired.plans.len();
        self.frontends = usage.fronts;
        self.slots = usage.slots;
        self.backends = usage.backends;
        self.source_ranges = usage.sources;
        self.draining_backends = sync.ports.actual.occupied.len();
        self.drift = sync.drift;
        self.node_eligible = desired.node_eligible;
        self.node_known = desired.node_known;
        self.problems = BTreeMap::new();
        for problem in sync.problems() {
            let label = problem.reason.label().to_owned();
            *self.problems.entry(label).or_default() += 1;
        }
        let counted = |(reason, count): (&Reason, &u64)| (reason.label().to_owned(), *count);
        self.counts = sync.faults.counts.iter().map(counted).collect();
    }
}
