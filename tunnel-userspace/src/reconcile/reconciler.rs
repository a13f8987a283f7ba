use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tunnel_common::{reason::Reason, table::MapSizes};

use super::{
    desired_plans::{DesiredPlans, PlanChanges, PlanSettings, served},
    grace_period::{GracePeriod, RetiredEntries},
    listener_log::ListenerLog,
    listener_poll::ListeningUsers,
    map_access::{AdoptError, MapReader, MapWriter},
    map_sync::MapSync,
    published_state::{
        MetricsRecorder, PublishedServices, ReconcileStats, SyncMetrics, programmed_health,
        publish_services, warnings,
    },
};
use crate::{
    clock::monotonic,
    model::{ClusterUpdate, ObjectName, ObjectWarning},
    plan::{HealthChecks, SteeringProblem},
};

/// Owns the service maps and keeps their contents in line with the plans.
pub struct Reconciler<M> {
    pub(super) desired: DesiredPlans,
    pub(super) sync: MapSync<M>,
    pub(super) recorder: MetricsRecorder,
    /// The Services as published to other tasks.
    published: PublishedServices,
    /// True if at least one source has not responded since startup.
    stale: bool,
    /// The Services with frontends that no poll for listeners has covered yet. They are not written until one
    /// has. `None` if polling is off.
    pub(super) waiting_for_poll: Option<BTreeSet<ObjectName>>,
    listener_log: ListenerLog,
}

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Takes over the maps with their current contents.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps can't be read, if invalid entries can't be removed, or if the wait for a
    /// grace period fails.
    pub fn adopt(
        maps: M,
        sizes: MapSizes,
        grace: &impl GracePeriod,
        settings: PlanSettings,
    ) -> Result<Self, AdoptError> {
        Ok(Self {
            sync: MapSync::adopt(maps, (sizes, settings.namespace_share), grace)?,
            desired: DesiredPlans::new(settings),
            recorder: MetricsRecorder::default(),
            published: PublishedServices::default(),
            stale: false,
            waiting_for_poll: None,
            listener_log: ListenerLog::default(),
        })
    }

    /// Writes the Services that have changed. Those that can't be written stay dirty. Returns the entries
    /// that are no longer in use, which may be freed after a grace period.
    pub fn write_changes(&mut self) -> RetiredEntries {
        if let Some(waiting) = &mut self.waiting_for_poll {
            let listeners = &self.desired.listeners;
            let is_waiting = |service: &ObjectName| listeners.has_unpolled(service);
            waiting.extend(self.sync.dirty.extract_if(.., is_waiting));
        }
        let services = self.sync.write_changes(&self.desired);
        publish_services(services, &self.desired, &self.sync, &self.published);
        self.sync.tracked.take_retired()
    }

    /// Re-reads the maps and compares them with their tracked contents. If they differ, the contents just
    /// read become the tracked contents, and every Service is marked dirty. Returns the number of
    /// differences.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Self::adopt`]. On error, the tracked contents are left unchanged.
    pub fn audit(&mut self, grace: &impl GracePeriod) -> Result<u64, AdoptError> {
        let differences = self.sync.audit(&self.desired, grace)?;
        self.recorder.is_full |= differences > 0;
        Ok(differences)
    }
}

impl<M> Reconciler<M> {
    /// Returns the maps.
    #[must_use]
    pub const fn maps(&self) -> &M {
        &self.sync.tracked.maps
    }

    /// Returns the published Services.
    #[must_use]
    pub const fn published(&self) -> &PublishedServices {
        &self.published
    }

    /// Returns the name of this node's Node object.
    #[must_use]
    pub(super) fn node_name(&self) -> &str {
        &self.desired.rules.node_info.name
    }

    /// Plans the changes in an update. Doesn't write to the maps.
    pub fn update(&mut self, update: ClusterUpdate) {
        self.stale = update.stale;
        self.recorder.metrics.last_queued_at = Some(Timestamp::now());
        for (name, state) in &update.services {
            self.sync.orphans.stop_keeping(name);
            let before = self.desired.states.get(name);
            self.recorder
                .record_change(name, before, served(state.as_ref()));
        }
        let (synced, complete) = (update.synced, update.complete);
        let changed = self.desired.apply(update.nodes, update.services);
        self.sync.set_source_state(synced, complete);
        self.mark_dirty(changed);
    }

    /// Replaces the set of this node's addresses. Doesn't write to the maps.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        let changed = self.desired.set_addresses(addresses);
        self.mark_dirty(changed);
    }

    /// Replaces the set of frontends that have a local listener. Ignores frontends whose address is not one
    /// of this node's. Doesn't write to the maps.
    pub fn set_listeners(&mut self, found: ListeningUsers) {
        let (changed, ignored) = self.desired.set_listeners(found);
        for _ in ignored.iter().filter(|it| it.user.is_some()) {
            self.sync.problems.count(Reason::ListenerIgnored);
        }
        self.listener_log.log(&ignored, monotonic());
        self.mark_dirty(changed);
        if let Some(waiting) = &mut self.waiting_for_poll {
            self.sync.dirty.append(waiting);
        }
    }

    fn mark_dirty(&mut self, mut changed: PlanChanges) {
        self.recorder.is_full |= changed.all_replanned;
        self.sync.dirty.append(&mut changed.services);
    }

    /// Returns the Services' health checks, limited to the endpoints that are in the maps, or `None` before the
    /// first sync.
    #[must_use]
    pub fn health(&self) -> Option<Arc<HealthChecks>> {
        let is_synced = self.sync.is_synced();
        is_synced.then(|| programmed_health(&self.desired, &self.sync))
    }

    /// Returns true if a change is waiting to be written.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.sync.is_dirty()
    }

    /// Returns the problems that an operator must act on.
    pub(super) fn warnings(&self, steering: &BTreeSet<SteeringProblem>) -> Vec<ObjectWarning> {
        warnings(&self.desired, &self.sync, steering)
    }

    /// Fills in the statistics for a sync that has just finished.
    pub(super) fn fill_stats(&mut self, stats: &mut ReconcileStats, took: Duration) {
        stats.stale = self.stale;
        stats.fill_from(&self.desired, &self.sync);
        if self.sync.is_synced() {
            let (dirty, waiting_for_entries) = (&self.sync.dirty, &self.sync.waiting_for_entries);
            let is_pending =
                |name: &ObjectName| dirty.contains(name) || waiting_for_entries.contains(name);
            self.recorder
                .record_sync(took, Timestamp::now(), is_pending);
            stats.sync = SyncMetrics {
                no_local_endpoints: self.desired.no_local_endpoints,
                plans_computed: self.desired.plans_computed,
                ..self.recorder.metrics.clone()
            };
        }
    }
}
