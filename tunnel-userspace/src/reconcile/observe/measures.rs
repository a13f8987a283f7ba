//! The metrics of syncs that kube-proxy has, too (kube-proxy `pkg/proxy/metrics/metrics.go`).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;

use super::histogram::Histogram;
use crate::{
    model::{ByFamily, EndpointSlice, Family, ObjectName, ServiceState},
    plan::Gaps,
};

/// The maximum number of changes to one Service's endpoints that wait to be measured.
const MOST_WAITING: usize = 64;

/// The metrics of syncs and changes.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncStats {
    /// The durations of all syncs.
    pub all: Histogram,
    /// The durations of syncs that covered every Service.
    pub full: Histogram,
    /// The durations of the other syncs.
    pub partial: Histogram,
    /// The time from the change of a Pod or Service, as given in the slices, to its last write here.
    pub programming: ByFamily<Histogram>,
    /// The number of changes of Services.
    pub service_changes: u64,
    /// The number of changes of EndpointSlices.
    pub endpoint_changes: ByFamily<u64>,
    /// The number of Services that changed and are not yet written.
    pub pending_services: usize,
    /// The number of Services whose endpoints changed and are not yet written.
    pub pending_endpoints: ByFamily<usize>,
    /// The number of times that a Service was planned: once per change of it or its slices, and once for
    /// every Service per change of the node.
    pub planned: u64,
    /// The time of the last change.
    pub last_queued_at: Option<Timestamp>,
    /// The numbers of service ports with a policy Local but no endpoint on this node.
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

/// The names noted since the last sync, with duplicates, and the names that stayed before it.
#[derive(Debug, Default)]
struct Names(Vec<ObjectName>);

impl Names {
    fn note(&mut self, name: &ObjectName) {
        self.0.push(name.clone());
    }

    /// Removes all names but those that stay; returns the number left.
    fn keep(&mut self, stays: impl Fn(&ObjectName) -> bool) -> usize {
        self.0.retain(stays);
        self.0.sort_unstable();
        self.0.dedup();
        self.0.len()
    }
}

/// The changes since the last sync, and those that are not yet written.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Measures {
    pub(in crate::reconcile) stats: SyncStats,
    services: Names,
    endpoints: ByFamily<Names>,
    /// The times of the changes to each Service's endpoints.
    triggers: BTreeMap<ObjectName, Vec<(Family, Timestamp)>>,
    /// The end of the first sync; earlier changes are not measured.
    since: Option<Timestamp>,
    /// True if every Service was planned again since the last sync.
    pub(in crate::reconcile) is_full: bool,
}

impl Measures {
    /// Counts the changes of a Service and its slices.
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
            // A deleted slice has the time of its last change, not of its deletion.
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

    /// Measures a sync that has just ended. Changes that are still open are measured later.
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

/// Returns the slice with the name of another.
fn named<'a>(
    slices: &'a [Arc<EndpointSlice>],
    other: &EndpointSlice,
) -> Option<&'a Arc<EndpointSlice>> {
    slices.iter().find(|slice| slice.name == other.name)
}

#[cfg(test)]
mod tests;
