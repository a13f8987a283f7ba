//! The reconcile loop: a task that waits for changes, writes them to the maps and publishes the result.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval_at},
};
use tracing::{error, info, warn};

use super::{
    background_job::ThreadPanicked,
    cluster_addresses::ClusterAddresses,
    grace_period::{GracePeriod, RetiredEntries, RetiredEntry, RetiredQueue},
    listener_poll::{FindListeners, ListenerPoll},
    map_access::{MapReader, MapWriter, SteeringMaps},
    map_sync::ProbeFrontend,
    periodic_probe::{DialProbe, PeriodicProbe},
    published_state::{PublishedServices, ReconcileStats},
    reconciler::Reconciler,
    steering::SteeringReconciler,
    timers::{Timers, next_networks, sleep_until_some},
};
use crate::{
    clock::{monotonic, since_boot},
    drain,
    model::{ClusterUpdate, LinkNetworks, ObjectWarning, OwnNode},
    plan::HealthChecks,
    publish,
};

/// The delay before failed writes are first retried. It doubles with each retry.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The maximum delay before failed writes are retried.
const LAST_RETRY: Duration = Duration::from_secs(30);
/// The delay before an incomplete sync of the steering maps is retried.
const STEERING_RETRY: Duration = Duration::from_secs(5);
/// The delay before many Services that did not fit into the maps are tried again.
const REFUSED_RETRY: Duration = Duration::from_secs(1);
/// The interval at which an idle loop gives a heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// The interval at which removed backends that still have open connections are polled.
const DRAINING_POLL: Duration = Duration::from_secs(5);

/// The changes from all sources, collected until the loop takes them.
pub trait Updates: Send {
    /// Waits for changes and takes all of them. Returns `None` once every source has ended. This method is
    /// cancel safe.
    fn update(&mut self) -> impl Future<Output = Option<ClusterUpdate>> + Send;
}

/// The reconcile loop, along with the channels on which it publishes its state.
pub struct ReconcileLoop<M, S, G> {
    reconciler: Reconciler<M>,
    steering: SteeringReconciler<S>,
    /// The cluster IPs, if packets are translated.
    addresses: Option<ClusterAddresses>,
    retired: RetiredQueue<G>,
    listener_poll: ListenerPoll,
    probe: Option<PeriodicProbe>,
    /// The networks that this node has routes to, if it steers connections.
    networks: Option<watch::Receiver<Arc<LinkNetworks>>>,
    audit_every: Duration,
    timers: Timers,
    stats: watch::Sender<ReconcileStats>,
    warnings: watch::Sender<Arc<[ObjectWarning]>>,
    /// Incremented after backends have been removed, once no program can choose them any more.
    backend_removals: watch::Sender<u64>,
    health: watch::Sender<Arc<HealthChecks>>,
    /// The time of the monotonic clock at which the loop last waited for events; `None` before it runs.
    heartbeat: watch::Sender<Option<Duration>>,
    own_node: watch::Sender<Arc<OwnNode>>,
}

impl<M: MapReader + MapWriter, S: SteeringMaps, G: GracePeriod + 'static> ReconcileLoop<M, S, G> {
    /// Creates a loop that drives the given reconcilers.
    pub fn new(
        reconciler: Reconciler<M>,
        steering: SteeringReconciler<S>,
        grace: G,
        audit_every: Duration,
    ) -> Self {
        Self {
            reconciler,
            steering,
            addresses: None,
            retired: RetiredQueue::new(grace),
            listener_poll: ListenerPoll::new(None, Duration::MAX),
            probe: None,
            networks: None,
            audit_every,
            timers: Timers::new(FIRST_RETRY),
            stats: watch::Sender::default(),
            warnings: watch::Sender::new(Arc::default()),
            backend_removals: watch::Sender::default(),
            health: watch::Sender::default(),
            heartbeat: watch::Sender::default(),
            own_node: watch::Sender::default(),
        }
    }

    /// Returns the reconciler for the steering maps.
    pub const fn steering(&mut self) -> &mut SteeringReconciler<S> {
        &mut self.steering
    }

    /// Returns a receiver for the statistics.
    pub fn stats(&self) -> watch::Receiver<ReconcileStats> {
        self.stats.subscribe()
    }

    /// Returns a receiver for the problems that an operator must act on.
    pub fn warnings(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.warnings.subscribe()
    }

    /// Returns a receiver that is notified after backends have been removed, once no program can choose them
    /// any more.
    pub fn backend_removals(&self) -> watch::Receiver<u64> {
        self.backend_removals.subscribe()
    }

    /// Returns a receiver for the Services' health checks, which are first published after the first sync.
    pub fn health_checks(&self) -> watch::Receiver<Arc<HealthChecks>> {
        self.health.subscribe()
    }

    /// Returns a receiver for the time of the monotonic clock at which the loop last waited for events. The loop
    /// publishes this time at least every 5 s, unless it hangs. The time is `None` before the loop runs.
    pub fn heartbeat(&self) -> watch::Receiver<Option<Duration>> {
        self.heartbeat.subscribe()
    }

    /// Returns a receiver for the addresses in this node's Node object. If the object is deleted, they stay in use.
    pub fn own_node(&self) -> watch::Receiver<Arc<OwnNode>> {
        self.own_node.subscribe()
    }

    /// Returns the published Services.
    pub const fn published(&self) -> &PublishedServices {
        self.reconciler.published()
    }

    /// Writes the probe's frontend, calls `dial`, and removes the frontend again. Returns `None` without
    /// calling `dial` if a Service already owns the frontend or if it can't be written, for example because a
    /// map is full.
    pub fn dial_probe<R>(&mut self, probe: &ProbeFrontend, dial: impl FnOnce() -> R) -> Option<R> {
        let sync = &mut self.reconciler.sync;
        let result = sync.dial_probe(probe, dial);
        self.retired.add(sync.tracked.take_retired());
        result
    }

    /// Returns true if the contents of the maps are unknown, in which case nothing may be written.
    pub fn is_content_unknown(&self) -> bool {
        self.reconciler.sync.is_content_unknown()
    }

    /// Replaces the set of this node's addresses. Doesn't write to the maps.
    pub fn set_addresses(&mut self, addresses: &Arc<BTreeSet<IpAddr>>) {
        self.reconciler.set_addresses(BTreeSet::clone(addresses));
        self.steering.set_own_addresses(Arc::clone(addresses));
        if let Some(known) = &mut self.addresses {
            known.set_own_addresses(Arc::clone(addresses));
        }
    }

    /// Makes the loop write which addresses are cluster IPs.
    pub fn write_cluster_addresses(&mut self, addresses: ClusterAddresses) {
        self.addresses = Some(addresses);
    }

    /// Follows the networks that this node has routes to, which edge nodes must not claim.
    pub fn follow_networks(&mut self, networks: watch::Receiver<Arc<LinkNetworks>>) {
        self.steering.set_networks(&networks.borrow());
        self.networks = Some(networks);
    }

    /// Enables polling, at the given interval, for local listeners on frontends that have one of this node's
    /// addresses. Sockets that connect to a frontend with such a listener are not translated.
    pub fn enable_listener_poll(&mut self, find: FindListeners, interval: Duration) {
        self.listener_poll = ListenerPoll::new(Some(find), interval);
        self.reconciler.waiting_for_poll.get_or_insert_default();
    }

    /// Makes the loop write the probe's frontend, call `dial`, and remove the frontend again, at the given
    /// interval. A failure is published in the statistics.
    pub fn enable_probe(&mut self, frontend: ProbeFrontend, dial: DialProbe, interval: Duration) {
        self.probe = Some(PeriodicProbe::new(frontend, dial, interval));
    }

    /// Applies one update and writes it to the maps, before the loop runs.
    ///
    /// # Errors
    ///
    /// Returns an error if the thread that polls for listeners panics.
    pub async fn apply(&mut self, update: ClusterUpdate) -> Result<(), ThreadPanicked> {
        let noticed_at = self.update(update);
        while self.listener_poll.start_if_due(&mut self.reconciler) {
            let result = self.listener_poll.wait().await.ok_or(ThreadPanicked)?;
            self.listener_poll
                .apply_result(result, &mut self.reconciler);
        }
        self.write_and_schedule(true, Some(noticed_at));
        Ok(())
    }

    /// Waits until all retired entries have been freed, and writes the changes that were waiting for free
    /// entries. Must be called after [`Self::apply`] and before the loop runs.
    ///
    /// # Errors
    ///
    /// Returns an error if the wait for a grace period fails or its thread panics. The entries then stay
    /// allocated until the daemon restarts and reads the maps again.
    pub async fn free_retired(&mut self) -> Result<(), ThreadPanicked> {
        while self.retired.is_running() {
            let freed = self.retired.wait_for_batch().await.ok_or(ThreadPanicked)?;
            self.free_batch(&freed);
            self.write_and_schedule(false, None);
        }
        Ok(())
    }

    fn update(&mut self, update: ClusterUpdate) -> Duration {
        let since = update.noticed_at;
        for node in update.nodes.iter().filter_map(|(_, node)| node.as_deref()) {
            if *node.name.name == *self.reconciler.node_name() {
                publish::publish_if_changed(&self.own_node, Arc::new(OwnNode::of(node)));
            }
        }
        self.steering.update(&update);
        self.addresses
            .iter_mut()
            .for_each(|known| known.update(&update));
        self.reconciler.update(update);
        since
    }

    /// Runs until the drain begins, every source has ended, or a background job fails. The maps keep their
    /// contents.
    pub async fn run(
        mut self,
        mut updates: impl Updates,
        mut addresses: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
        mut draining: watch::Receiver<bool>,
    ) {
        let mut audits = interval_at(Instant::now() + self.audit_every, self.audit_every);
        audits.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heartbeats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.heartbeat.send_replace(Some(monotonic()));
            let poll_at = self.listener_poll.next_at;
            let probe_at = self.probe.as_ref().map(|probe| probe.next_at);
            let (mut is_due, mut changed_at) = (false, None);
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                freed = self.retired.wait_for_batch() => {
                    let Some(freed) = freed else { return };
                    self.free_batch(&freed);
                }
                update = updates.update() => {
                    let Some(update) = update else { break };
                    (is_due, changed_at) = (true, Some(self.update(update)));
                }
                Ok(()) = addresses.changed() => {
                    self.set_addresses(&addresses.borrow_and_update());
                    // This isn't an update from a source, so it doesn't affect the published latency.
                    is_due = true;
                }
                networks = next_networks(&mut self.networks) => {
                    self.steering.set_networks(&networks);
                    is_due = self.steering.has_changed();
                }
                result = self.listener_poll.wait() => {
                    let Some(result) = result else { return };
                    self.listener_poll.apply_result(result, &mut self.reconciler);
                }
                () = sleep_until_some(self.timers.retry_at) => {
                    self.timers.retry_delay = (self.timers.retry_delay * 2).min(LAST_RETRY);
                }
                () = sleep_until_some(self.timers.steering_at) => {
                    self.sync_steering();
                    continue;
                }
                () = sleep_until_some(self.timers.refused_at) => {
                    self.timers.refused_at = None;
                    self.reconciler.sync.retry_refused();
                }
                () = sleep_until_some(poll_at) => {}
                () = sleep_until_some(probe_at) => self.run_probe(),
                // Polling doesn't need to run in the background, since each poll reads a bounded number of
                // counters. Afterwards, the loop may be able to write Services that didn't fit into the maps.
                () = sleep_until_some(self.timers.draining_at) => self.reconciler.sync.poll_draining(),
                _ = audits.tick() => is_due = self.audit(),
                _ = heartbeats.tick() => continue,
            }
            self.write_and_schedule(is_due, changed_at);
        }
        info!("the reconcile loop ends; the maps keep their content");
    }

    /// Starts a poll for listeners if one is due, writes the changes, and schedules the next retry and poll.
    /// If `is_due` is true, syncs even if nothing has changed.
    fn write_and_schedule(&mut self, is_due: bool, changed_at: Option<Duration>) {
        self.listener_poll.start_if_due(&mut self.reconciler);
        if is_due || self.is_dirty() {
            self.sync(changed_at);
        } else {
            self.retired.add(RetiredEntries::default());
        }
        let now = Instant::now();
        let is_dirty = self.is_dirty();
        if !is_dirty {
            self.timers.retry_delay = FIRST_RETRY;
        }
        self.timers.retry_at = is_dirty.then(|| now + self.timers.retry_delay);
        if self.reconciler.sync.has_refused_to_retry() {
            self.timers.refused_at.get_or_insert(now + REFUSED_RETRY);
        }
        let draining = self.reconciler.sync.tracked.actual.draining.len();
        let planned = self.timers.draining_at.filter(|at| *at > now);
        self.timers.draining_at = (draining > 0).then(|| planned.unwrap_or(now + DRAINING_POLL));
        self.stats.send_if_modified(|stats| {
            std::mem::replace(&mut stats.draining_backends, draining) != draining
        });
    }

    /// Returns true if something that has changed is not in the maps yet.
    fn is_dirty(&self) -> bool {
        let addresses = self.addresses.as_ref();
        self.reconciler.is_dirty() || addresses.is_some_and(ClusterAddresses::is_incomplete)
    }

    /// Dials the probe's frontend, and checks the cookie of the host's network namespace.
    fn run_probe(&mut self) {
        let Some(mut probe) = self.probe.take() else {
            return;
        };
        let dialled = if self.is_content_unknown() {
            None
        } else {
            self.dial_probe(&probe.frontend, &mut probe.dial)
        };
        // Without a result, the frontend could not be written. The last result stays.
        let problem = dialled.map(Result::err);
        probe.schedule(problem.as_ref().is_some_and(Option::is_some));
        self.probe = Some(probe);
        if let Some(problem) = problem {
            self.stats.send_if_modified(|stats| {
                let is_new = stats.probe_problem != problem;
                stats.probe_problem = problem;
                is_new
            });
        }
        match self.steering.repair_host_namespace() {
            Ok(false) => {}
            Ok(true) => {
                self.reconciler.sync.drift += 1;
                warn!("the map host had the cookie of another network namespace, and was repaired");
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                error!(
                    error,
                    "cannot check the cookie of the host's network namespace"
                );
            }
        }
    }

    /// Frees a batch of retired entries. Services that were waiting for free entries become dirty.
    fn free_batch(&mut self, freed: &RetiredEntries) {
        let is_backend = |entry: &RetiredEntry| matches!(entry, RetiredEntry::Backend(_));
        if freed.0.iter().any(is_backend) {
            self.publish_removal();
        }
        let has_more = self.retired.has_next();
        self.reconciler.sync.free(freed, has_more);
    }

    fn publish_removal(&self) {
        self.backend_removals.send_modify(|times| *times += 1);
    }

    /// Compares the maps with their tracked contents. Returns true if they differ, in which case the
    /// differences must be written. This must not run during a write, since a half-written change would count
    /// as a difference. It therefore blocks the loop, for about as long as reading the maps takes at startup.
    fn audit(&mut self) -> bool {
        let addresses_differ = self.addresses.as_mut().is_some_and(ClusterAddresses::audit);
        match self.reconciler.audit(&*self.retired.grace_period) {
            Ok(0) => {}
            Ok(differences) => {
                warn!(
                    differences,
                    "the maps differ from their last written content, repairing them"
                );
                // The differences may include removed backends, whose grace period has ended.
                self.publish_removal();
                return true;
            }
            Err(error) => error!(
                error = &error as &dyn std::error::Error,
                "cannot audit the maps"
            ),
        }
        addresses_differ
    }

    /// Writes the changes. If a batch is refused during the first sync, re-reads the maps and writes the
    /// rest.
    fn write_changes(&mut self) -> RetiredEntries {
        let retired = self.reconciler.write_changes();
        if !self.is_content_unknown() {
            return retired;
        }
        if let Err(error) = self.reconciler.sync.read_again(&*self.retired.grace_period) {
            let error = &error as &dyn std::error::Error;
            error!(
                error,
                "cannot read the maps again after a refused write, so nothing is written until a retry succeeds"
            );
            return retired;
        }
        self.publish_removal();
        self.reconciler.write_changes()
    }

    /// Syncs the steering maps. Steering is retried separately, so that Services never have to wait for it.
    fn sync_steering(&mut self) {
        self.steering.sync(since_boot());
        let is_incomplete = self.steering.is_incomplete();
        self.timers.steering_at = is_incomplete.then(|| Instant::now() + STEERING_RETRY);
        let view = self.steering.view();
        self.stats.send_modify(|stats| stats.steering = view);
        self.publish_warnings();
    }

    fn sync(&mut self, changed_at: Option<Duration>) {
        let start = monotonic();
        self.addresses
            .iter_mut()
            .for_each(ClusterAddresses::sync_left_alone);
        let retired = self.write_changes();
        self.retired.add(retired);
        if let Some(addresses) = &mut self.addresses
            && self.reconciler.sync.is_synced()
        {
            addresses.sync();
        }
        if self.steering.has_changed() {
            self.sync_steering();
        }
        let end = monotonic();
        let took = end - start;
        self.stats.send_modify(|stats| {
            self.reconciler.fill_stats(stats, took);
            for (reason, count) in &self.steering.reason_counts {
                *stats.counts.entry(reason.label().to_owned()).or_default() += count;
            }
            stats.syncs += 1;
            stats.last_sync_seconds = took.as_secs_f64();
            stats.total_sync_seconds += stats.last_sync_seconds;
            if let Some(heard) = changed_at {
                stats.programming_latency_seconds = (end - heard).as_secs_f64();
            }
            let now = Timestamp::now();
            stats.last_sync_at = Some(now);
            let failing = self.reconciler.is_dirty().then_some(now);
            if failing.is_none() && stats.synced {
                stats.last_complete_sync_at = Some(now);
            }
            stats.failing_since = failing.map(|now| stats.failing_since.unwrap_or(now));
            stats.failing_from = failing.map(|_| stats.failing_from.unwrap_or(end));
        });
        self.publish_warnings();
        if let Some(checks) = self.reconciler.health() {
            self.health.send_if_modified(|last| {
                let is_new = !Arc::ptr_eq(last, &checks) && *last != checks;
                *last = checks;
                is_new
            });
        }
    }

    fn publish_warnings(&self) {
        let warnings = self.reconciler.warnings(&self.steering.known_problems);
        publish::publish_if_changed(&self.warnings, warnings.into());
    }
}
