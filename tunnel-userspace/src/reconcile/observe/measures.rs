//! The metrics of syncs, which are those of kube-proxy (`pkg/proxy/metrics/metrics.go`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;

use super::histogram::Histogram;
use crate::{
    model::{ByFamily, EndpointSlice, Family, ObjectName, ServiceState},
    plan::Gaps,
};

/// The maximum number of changes of one Service's endpoints that are remembered until the Service is written.
const MOST_WAITING: usize = 64;

/// The metrics of syncs and changes.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncStats {
    /// The durations of all syncs.
    pub all: Histogram,
    /// The durations of full syncs: those for which every Service was planned again.
    pub full: Histogram,
    /// The durations of all other syncs.
    pub partial: Histogram,
    /// The time from the change of a Pod or Service, as given in its EndpointSlice, until the change is
    /// written into the maps.
    pub programming: ByFamily<Histogram>,
    /// The number of changes of Services.
    pub service_changes: u64,
    /// The number of changes of EndpointSlices.
    pub endpoint_changes: ByFamily<u64>,
    /// The number of Services that changed and are not written yet.
    pub pending_services: usize,
    /// The number of Services with endpoints that changed and are not written yet.
    pub pending_endpoints: ByFamily<usize>,
    /// The number of plans that were computed. A change of a Service or its slices requires one plan, a
    /// change of this node one for every Service.
    pub planned: u64,
    /// The time of the last change.
    pub last_queued_at: Option<Timestamp>,
    /// The number of service ports with a policy Local but no endpoint on this node.
    pub gaps: ByFamily<Gaps>,
}

impl Default for SyncStats {
    fn default() -> Self {
        let pass = || Histogram::new((0..15).map(|power| 0.001 * 2_f64.powi(power)));
        let programming = || {
            let steps = (1..60).chain((60..120).step_by(5));
            let steps = steps.chain((120..=300).step_by(30)).map(f64::from);
            Histogram::new([0.25, 0.5].into_iter().chain(steps))
        };
        Self {
            all: pass(),
            full: pass(),
            partial: pass(),
            programming: ByFamily {
                v4: programming(),
                v6: programming(),
            },
            service_changes: 0,
            endpoint_changes: ByFamily::default(),
            pending_services: 0,
            pending_endpoints: ByFamily::default(),
            planned: 0,
            last_queued_at: None,
            gaps: ByFamily::default(),
        }
    }
}

/// The names of changed objects that are not written yet. Names that were added since the last sync may have
/// duplicates.
#[derive(Debug, Default)]
struct Names(Vec<ObjectName>);

impl Names {
    fn note(&mut self, name: &ObjectName) {
        self.0.push(name.clone());
    }

    /// Removes duplicates, and the names that `stays` refuses. Returns the number of remaining names.
    fn keep(&mut self, stays: impl Fn(&ObjectName) -> bool) -> usize {
        self.0.retain(stays);
        self.0.sort_unstable();
        self.0.dedup();
        self.0.len()
    }
}

/// Records changes and syncs, and computes the metrics.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Measures {
    pub(in crate::reconcile) stats: SyncStats,
    services: Names,
    endpoints: ByFamily<Names>,
    /// The times of endpoint changes that are not written yet, by Service.
    triggers: BTreeMap<ObjectName, Vec<(Family, Timestamp)>>,
    /// The end of the first sync; the latency of earlier changes is not measured.
    since: Option<Timestamp>,
    /// True if every Service was planned again since the last sync.
    pub(in crate::reconcile) is_full: bool,
}

impl Measures {
    /// Records the change of a Service from one state to another.
    pub(in crate::reconcile) fn note(
        &mut self,
        name: &ObjectName,
        before: Option<&ServiceState>,
        now: Option<&ServiceState>,
    ) {
        if before.map(|state| &state.service) != now.map(|state| &state.service) {
            self.stats.service_changes += 1;
            self.services.note(name);
        }
        let (old, new) = (slices(before), slices(now));
        for slice in old.iter().filter(|slice| named(new, slice).is_none()) {
            // The time of a deletion is unknown: a slice only has that of its last change.
            self.count(name, slice.family);
            self.triggers.remove(name);
        }
        for slice in new {
            let is_same = |old: &Arc<EndpointSlice>| Arc::ptr_eq(old, slice) || old == slice;
            if named(old, slice).is_some_and(is_same) {
                continue;
            }
            self.count(name, slice.family);
            let triggered = slice.triggered.zip(self.since);
            if let Some((at, _)) = triggered.filter(|(at, since)| at > since) {
                let waiting = self.triggers.entry(name.clone()).or_default();
                if waiting.len() < MOST_WAITING {
                    waiting.push((slice.family, at));
                }
            }
        }
    }

    fn count(&mut self, name: &ObjectName, family: Family) {
        *self.stats.endpoint_changes.of_mut(family) += 1;
        self.endpoints.of_mut(family).note(name);
    }

    /// Records a sync that has just ended. Services for which `is_open` returns true are not written yet;
    /// their changes are recorded by a later sync.
    pub(in crate::reconcile) fn pass(
        &mut self,
        took: Duration,
        now: Timestamp,
        is_open: impl Fn(&ObjectName) -> bool,
    ) {
        let stats = &mut self.stats;
        let kind = if std::mem::take(&mut self.is_full) || self.since.is_none() {
            &mut stats.full
        } else {
            &mut stats.partial
        };
        kind.observe(took.as_secs_f64());
        stats.all.observe(took.as_secs_f64());
        self.since.get_or_insert(now);
        let written = |name: &ObjectName, _: &mut _| !is_open(name);
        for (_, waited) in self.triggers.extract_if(.., written) {
            for (family, at) in waited {
                let delay = now.duration_since(at).as_secs_f64().max(0.0);
                stats.programming.of_mut(family).observe(delay);
            }
        }
        stats.pending_services = self.services.keep(&is_open);
        for family in [Family::V4, Family::V6] {
            let endpoints = self.endpoints.of_mut(family);
            *stats.pending_endpoints.of_mut(family) = endpoints.keep(&is_open);
        }
    }
}

fn slices(state: Option<&ServiceState>) -> &[Arc<EndpointSlice>] {
    state.map_or(&[], |state| &state.slices)
}

/// Returns the slice with the same name as another.
fn named<'a>(
    slices: &'a [Arc<EndpointSlice>],
    other: &EndpointSlice,
) -> Option<&'a Arc<EndpointSlice>> {
    slices.iter().find(|slice| slice.name == other.name)
}

#[cfg(test)]
mod tests;
