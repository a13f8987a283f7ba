use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::measures::SyncStats;
use crate::reconcile::{desired::Desired, steering::SteeringView, sync::MapSync};

/// What the loop did, for metrics and status. Published after each pass.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// Whether a first whole pass was made.
    pub synced: bool,
    /// Whether a source was not heard of since the start, as far as what is programmed goes.
    #[serde(default)]
    pub stale: bool,
    /// Services that were read.
    pub services: usize,
    /// Fronts that are programmed.
    pub fronts: usize,
    /// Slots in use.
    pub slots: u32,
    /// Backends in use.
    pub backends: u32,
    /// Ranges of clients in use.
    #[serde(default)]
    pub sources: u32,
    /// Indices of backends that are gone, which open connections keep from being used again.
    #[serde(default)]
    pub occupied_backends: usize,
    /// Service ports that are not programmed as planned, by reason.
    pub problems: BTreeMap<String, usize>,
    /// How often each reason was met by this process.
    pub counts: BTreeMap<String, u64>,
    /// Passes made.
    pub passes: u64,
    /// How long the last pass took, in seconds.
    pub last_pass_seconds: f64,
    /// How long all passes took, in seconds.
    pub all_passes_seconds: f64,
    /// From the notice of a change to its last write, in seconds, of the last pass.
    pub last_delay_seconds: f64,
    /// When the last pass ended.
    pub last_pass_at: Option<Timestamp>,
    /// When the last pass ended that left nothing to be written.
    #[serde(default)]
    pub last_whole_pass_at: Option<Timestamp>,
    /// Since when writes fail; nothing if they don't.
    pub failing_since: Option<Timestamp>,
    /// Whether load balancers may send traffic to this node, as its Node object says. A node that
    /// never had one may; one whose object was deleted may not.
    pub node_eligible: bool,
    /// Whether there is a Node of this node's name.
    #[serde(default)]
    pub node_known: bool,
    /// Differences found between the maps and what was known of them.
    pub drift: u64,
    /// What is steered to the tunnel.
    pub steering: SteeringView,
    /// What kube-proxy measures too; for metrics only.
    #[serde(skip)]
    pub sync: SyncStats,
}

impl Stats {
    /// Takes the numbers of what is planned and programmed.
    pub(in crate::reconcile) fn describe<M>(&mut self, desired: &Desired, sync: &MapSync<M>) {
        let usage = sync.ports.actual.usage();
        self.synced = sync.is_synced();
        self.services = desired.plans.len();
        self.fronts = usage.fronts;
        self.slots = usage.slots;
        self.backends = usage.backends;
        self.sources = usage.sources;
        self.occupied_backends = sync.ports.actual.occupied.len();
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
