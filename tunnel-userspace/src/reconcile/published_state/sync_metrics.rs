//! Metrics about syncs, the same ones that kube-proxy exports (`pkg/proxy/metrics/metrics.go`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;

use super::histogram::Histogram;
use crate::{
    model::{EndpointSlice, Family, ObjectName, PerFamily, ServiceState},
    plan::NoLocalEndpoints,
};

/// The maximum number of endpoint changes whose times are remembered for a Service until it is written.
const MAX_WAITING: usize = 64;

/// Metrics about syncs and changes.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncMetrics {
    /// The durations of all syncs.
    pub all: Histogram,
    /// The durations of full syncs, that is, those for which every Service was replanned.
    pub full: Histogram,
    /// The durations of all other syncs.
    pub partial: Histogram,
    /// The time from a change to a Pod or Service, as given in its EndpointSlice, until the change is written
    /// to the maps.
    pub programming_latency: PerFamily<Histogram>,
    /// The number of changes to Services.
    pub service_changes: u64,
    /// The number of changes to EndpointSlices.
    pub endpoint_changes: PerFamily<u64>,
    /// The number of changed Services that have not been written yet.
    pub pending_services: usize,
    /// The number of Services with changed endpoints that have not been written yet.
    pub pending_endpoints: PerFamily<usize>,
    /// The number of plans computed so far. A change to a Service or its EndpointSlices requires one plan,
    /// whereas a change to this node requires one for every Service.
    pub plans_computed: u64,
    /// The time at which the last change was received.
    pub last_queued_at: Option<Timestamp>,
    /// The number of service ports that have traffic policy `Local` but no endpoint on this node.
    pub no_local_endpoints: PerFamily<NoLocalEndpoints>,
}

impl Default for SyncMetrics {
    fn default() -> Self {
        let sync_durations = || Histogram::new((0..15).map(|power| 0.001 * 2_f64.powi(power)));
        let programming = || {
            let steps = (1..60).chain((60..120).step_by(5));
            let steps = steps.chain((120..=300).step_by(30)).map(f64::from);
            Histogram::new([0.25, 0.5].into_iter().chain(steps))
        };
        Self {
            all: sync_durations(),
            full: sync_durations(),
            partial: sync_durations(),
            programming_latency: PerFamily {
                v4: programming(),
                v6: programming(),
            },
            service_changes: 0,
            endpoint_changes: PerFamily::default(),
            pending_services: 0,
            pending_endpoints: PerFamily::default(),
            plans_computed: 0,
            last_queued_at: None,
            no_local_endpoints: PerFamily::default(),
        }
    }
}

/// The names of changed objects that have not been written yet. There may be duplicates among the names added
/// since the last sync.
#[derive(Debug, Default)]
struct PendingNames(Vec<ObjectName>);

impl PendingNames {
    fn add(&mut self, name: &ObjectName) {
        self.0.push(name.clone());
    }

    /// Removes duplicates and the names for which `stays` returns false. Returns how many names remain.
    fn retain(&mut self, stays: impl Fn(&ObjectName) -> bool) -> usize {
        self.0.retain(stays);
        self.0.sort_unstable();
        self.0.dedup();
        self.0.len()
    }
}

/// Records changes and syncs, and computes metrics from them.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct MetricsRecorder {
    pub(in crate::reconcile) metrics: SyncMetrics,
    services: PendingNames,
    endpoints: PerFamily<PendingNames>,
    /// The times of endpoint changes that have not been written yet, by Service.
    change_times: BTreeMap<ObjectName, Vec<(Family, Timestamp)>>,
    /// The time at which the first sync ended. The latency of earlier changes is not measured.
    first_sync_at: Option<Timestamp>,
    /// True if every Service has been replanned since the last sync.
    pub(in crate::reconcile) is_full: bool,
}

impl MetricsRecorder {
    /// Records that a Service has changed from one state to another.
    pub(in crate::reconcile) fn record_change(
        &mut self,
        name: &ObjectName,
        before: Option<&ServiceState>,
        now: Option<&ServiceState>,
    ) {
        if before.map(|state| &state.service) != now.map(|state| &state.service) {
            self.metrics.service_changes += 1;
            self.services.add(name);
        }
        let (old, new) = (slices(before), slices(now));
        for slice in old
            .iter()
            .filter(|slice| slice_named_like(new, slice).is_none())
        {
            // The time of a deletion is unknown, since an EndpointSlice contains only the time of its last
            // change.
            self.count_endpoint_change(name, slice.family);
            self.change_times.remove(name);
        }
        for slice in new {
            let is_same = |old: &Arc<EndpointSlice>| Arc::ptr_eq(old, slice) || old == slice;
            if slice_named_like(old, slice).is_some_and(is_same) {
                continue;
            }
            self.count_endpoint_change(name, slice.family);
            let triggered = slice.triggered.zip(self.first_sync_at);
            if let Some((at, _)) = triggered.filter(|(at, since)| at > since) {
                let waiting = self.change_times.entry(name.clone()).or_default();
                if waiting.len() < MAX_WAITING {
                    waiting.push((slice.family, at));
                }
            }
        }
    }

    fn count_endpoint_change(&mut self, name: &ObjectName, family: Family) {
        *self.metrics.endpoint_changes.get_mut(family) += 1;
        self.endpoints.get_mut(family).add(name);
    }

    /// Records a sync that has just finished. Services for which `is_pending` returns true have not been
    /// written yet, so their changes are recorded with a later sync.
    pub(in crate::reconcile) fn record_sync(
        &mut self,
        took: Duration,
        now: Timestamp,
        is_pending: impl Fn(&ObjectName) -> bool,
    ) {
        let metrics = &mut self.metrics;
        let kind = if std::mem::take(&mut self.is_full) || self.first_sync_at.is_none() {
            &mut metrics.full
        } else {
            &mut metrics.partial
        };
        kind.observe(took.as_secs_f64());
        metrics.all.observe(took.as_secs_f64());
        self.first_sync_at.get_or_insert(now);
        let is_written = |name: &ObjectName, _: &mut _| !is_pending(name);
        for (_, times) in self.change_times.extract_if(.., is_written) {
            for (family, at) in times {
                let delay = now.duration_since(at).as_secs_f64().max(0.0);
                metrics.programming_latency.get_mut(family).observe(delay);
            }
        }
        metrics.pending_services = self.services.retain(&is_pending);
        for family in [Family::V4, Family::V6] {
            let endpoints = self.endpoints.get_mut(family);
            *metrics.pending_endpoints.get_mut(family) = endpoints.retain(&is_pending);
        }
    }
}

fn slices(state: Option<&ServiceState>) -> &[Arc<EndpointSlice>] {
    state.map_or(&[], |state| &state.slices)
}

/// Returns the slice that has the same name as `other`.
fn slice_named_like<'a>(
    slices: &'a [Arc<EndpointSlice>],
    other: &EndpointSlice,
) -> Option<&'a Arc<EndpointSlice>> {
    slices.iter().find(|slice| slice.name == other.name)
}

#[cfg(test)]
mod tests;
