//! The task that reconciles: waits for changes, writes them into the maps, and publishes the result.

use std::{collections::BTreeSet, future, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval_at, sleep_until},
};
use tracing::{error, info, warn};

use super::{
    access::{MapReader, MapWriter, SteeringMaps},
    background::BrokeOff,
    grace::{Entry, Grace, Retired, Waiting},
    listener_poll::{Found, ListenerPoll},
    observe::{Published, Stats},
    reconciler::Reconciler,
    steering::Steering,
    sync::Canary,
};
use crate::{
    clock::{monotonic, since_boot},
    drain, latest,
    model::{Concern, Update},
    plan::HealthChecks,
};

/// The delay before the first retry of failed writes. It doubles with each retry.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The longest delay before a retry of failed writes.
const LAST_RETRY: Duration = Duration::from_secs(30);
/// The delay before an incomplete sync of steering is retried.
const STEERING_RETRY: Duration = Duration::from_secs(5);
/// The interval for polling removed backends with open connections.
const OCCUPIED_LOOK: Duration = Duration::from_secs(5);

/// The changes of all sources, collected until the loop takes them.
pub trait Updates: Send {
    /// Waits for changes, and takes all of them. Returns `None` once every source has ended. Cancel safe.
    fn update(&mut self) -> impl Future<Output = Option<Update>> + Send;
}

/// The reconcile loop, with the channels on which it publishes its state.
pub struct Loop<M, S, G> {
    reconciler: Reconciler<M>,
    steering: Steering<S>,
    waiting: Waiting<G>,
    listener_poll: ListenerPoll,
    audit_every: Duration,
    due: Due,
    stats: watch::Sender<Stats>,
    concerns: watch::Sender<Arc<[Concern]>>,
    /// Incremented whenever backends were removed and no program can still choose one of them.
    gone: watch::Sender<u64>,
    health: watch::Sender<Arc<HealthChecks>>,
}

/// The times of work that no event triggers.
#[derive(Default)]
struct Due {
    /// The delay before failed writes are retried.
    pause: Duration,
    /// The time of the next retry of failed writes.
    retry: Option<Instant>,
    /// The time of the next sync of steering, if the last one was incomplete.
    steer: Option<Instant>,
    /// The time of the next poll of removed backends with open connections.
    occupied: Option<Instant>,
}

impl<M: MapReader + MapWriter, S: SteeringMaps, G: Grace + 'static> Loop<M, S, G> {
    /// Returns a loop for a reconciler.
    pub fn new(
        reconciler: Reconciler<M>,
        steering: Steering<S>,
        grace: G,
        audit_every: Duration,
    ) -> Self {
        Self {
            reconciler,
            steering,
            waiting: Waiting::new(grace),
            listener_poll: ListenerPoll::new(None, Duration::MAX),
            audit_every,
            due: Due {
                pause: FIRST_RETRY,
                ..Due::default()
            },
            stats: watch::Sender::default(),
            concerns: watch::Sender::new(Arc::default()),
            gone: watch::Sender::default(),
            health: watch::Sender::default(),
        }
    }

    /// Returns the owner of the steering maps.
    pub const fn steering(&mut self) -> &mut Steering<S> {
        &mut self.steering
    }

    /// Returns a receiver for the statistics.
    pub fn stats(&self) -> watch::Receiver<Stats> {
        self.stats.subscribe()
    }

    /// Returns a receiver for the problems that an operator must act on.
    pub fn concerns(&self) -> watch::Receiver<Arc<[Concern]>> {
        self.concerns.subscribe()
    }

    /// Returns a receiver that changes whenever backends were removed and no program can still choose one
    /// of them.
    pub fn gone(&self) -> watch::Receiver<u64> {
        self.gone.subscribe()
    }

    /// Returns a receiver for the health checks of Services; they are published after the first sync.
    pub fn health_checks(&self) -> watch::Receiver<Arc<HealthChecks>> {
        self.health.subscribe()
    }

    /// Returns the published Services.
    pub const fn published(&self) -> &Published {
        self.reconciler.published()
    }

    /// Writes the probe's frontend, dials it and removes it. Returns none if there is no room for it, or
    /// its frontend is a Service's.
    pub fn dial_canary<R>(&mut self, canary: &Canary, dial: impl FnOnce() -> R) -> Option<R> {
        let sync = &mut self.reconciler.sync;
        let dialled = sync.dial_canary(canary, dial);
        self.waiting.add(sync.ports.take_retired());
        dialled
    }

    /// Returns true if the content of the maps is unknown, so that nothing may be written.
    pub fn is_in_doubt(&self) -> bool {
        self.reconciler.sync.is_in_doubt()
    }

    /// Replaces the addresses of this node. Writes nothing.
    pub fn set_addresses(&mut self, addresses: &Arc<BTreeSet<IpAddr>>) {
        self.reconciler.set_addresses(BTreeSet::clone(addresses));
    }

    /// Enables polling, at this interval, for local listeners on frontends with an address of this node.
    /// Sockets are not translated there.
    pub fn look_for_listeners(&mut self, find: Found, every: Duration) {
        self.listener_poll = ListenerPoll::new(Some(find), every);
        self.reconciler.held_back.get_or_insert_default();
    }

    /// Applies and writes one update, before the loop runs.
    ///
    /// # Errors
    ///
    /// The thread of a poll for listeners panicked.
    pub async fn apply(&mut self, update: Update) -> Result<(), BrokeOff> {
        let since = self.update(update);
        while self.listener_poll.look(&mut self.reconciler) {
            let looked = self.listener_poll.ended().await.ok_or(BrokeOff)?;
            self.listener_poll.end(looked, &mut self.reconciler);
        }
        self.follow_up(true, Some(since));
        Ok(())
    }

    /// Waits until all retired entries are freed, and writes the changes that waited for free entries. To
    /// be called after [`Self::apply`], before the loop runs.
    ///
    /// # Errors
    ///
    /// The kernel refused to wait for a grace period. The entries stay allocated until the next start of
    /// the daemon reads the maps.
    pub async fn settle(&mut self) -> Result<(), BrokeOff> {
        while self.waiting.is_running() {
            let freed = self.waiting.freed().await.ok_or(BrokeOff)?;
            self.take_back(&freed);
            self.follow_up(false, None);
        }
        Ok(())
    }

    fn update(&mut self, update: Update) -> Duration {
        let since = update.since;
        self.steering.update(&update);
        self.reconciler.update(update);
        since
    }

    /// Runs until the drain begins or every source has ended. The maps keep their content.
    pub async fn run(
        mut self,
        mut updates: impl Updates,
        mut addresses: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
        mut draining: watch::Receiver<bool>,
    ) {
        let mut audits = interval_at(Instant::now() + self.audit_every, self.audit_every);
        audits.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let look_at = self.listener_poll.at;
            let (mut is_due, mut heard) = (false, None);
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                freed = self.waiting.freed() => {
                    let Some(freed) = freed else { return };
                    self.take_back(&freed);
                }
                update = updates.update() => {
                    let Some(update) = update else { break };
                    (is_due, heard) = (true, Some(self.update(update)));
                }
                Ok(()) = addresses.changed() => {
                    self.set_addresses(&addresses.borrow_and_update());
                    // This isn't an update of a source, so the published latency doesn't change.
                    is_due = true;
                }
                looked = self.listener_poll.ended() => {
                    let Some(looked) = looked else { return };
                    self.listener_poll.end(looked, &mut self.reconciler);
                }
                () = at(self.due.retry) => {
                    self.due.pause = (self.due.pause * 2).min(LAST_RETRY);
                }
                () = at(self.due.steer) => {
                    self.steer();
                    continue;
                }
                () = at(look_at) => {}
                // Not in the background, since waiting Services may then be written. One poll reads a
                // bounded number of counters.
                () = at(self.due.occupied) => self.reconciler.sync.look_at_occupied(),
                _ = audits.tick() => is_due = self.audit(),
            }
            self.follow_up(is_due, heard);
        }
        info!("the reconcile loop ends; the maps keep their content");
    }

    /// Starts a poll for listeners if one is due, writes the changes, and sets the times of the next retry
    /// and poll. Syncs even without a change if `is_due`.
    fn follow_up(&mut self, is_due: bool, heard: Option<Duration>) {
        self.listener_poll.look(&mut self.reconciler);
        if is_due || self.reconciler.is_dirty() {
            self.pass(heard);
        } else {
            self.waiting.add(Retired::default());
        }
        let now = Instant::now();
        let is_dirty = self.reconciler.is_dirty();
        if !is_dirty {
            self.due.pause = FIRST_RETRY;
        }
        self.due.retry = is_dirty.then(|| now + self.due.pause);
        let occupied = self.reconciler.sync.ports.actual.occupied.len();
        let planned = self.due.occupied.filter(|at| *at > now);
        self.due.occupied = (occupied > 0).then(|| planned.unwrap_or(now + OCCUPIED_LOOK));
        self.stats.send_if_modified(|stats| {
            std::mem::replace(&mut stats.draining_backends, occupied) != occupied
        });
    }

    /// Frees a batch of retired entries. Services that waited for free entries become dirty.
    fn take_back(&mut self, freed: &Retired) {
        let is_backend = |entry: &Entry| matches!(entry, Entry::Backend(_));
        if freed.0.iter().any(is_backend) {
            self.tell_gone();
        }
        let has_more = self.waiting.has_more();
        self.reconciler.sync.free(freed, has_more);
    }

    fn tell_gone(&self) {
        self.gone.send_modify(|times| *times += 1);
    }

    /// Compares the maps with their tracked content. This must not run during a write, since a half-written
    /// change would be a difference; the loop is blocked for as long as at the start of the daemon. Returns
    /// true if there were differences, which must then be written.
    fn audit(&mut self) -> bool {
        match self.reconciler.audit(&*self.waiting.grace) {
            Ok(0) => {}
            Ok(differences) => {
                warn!(
                    differences,
                    "the maps were changed by another program, writing them again"
                );
                // Removed backends may be among the differences, and their grace period is over.
                self.tell_gone();
                return true;
            }
            Err(error) => error!(
                error = &error as &dyn std::error::Error,
                "cannot audit the maps"
            ),
        }
        false
    }

    /// Writes the changes. If a write of the first sync was refused, reads the maps again and writes the
    /// rest.
    fn write(&mut self) -> Retired {
        let retired = self.reconciler.pass();
        if !self.is_in_doubt() {
            return retired;
        }
        if let Err(error) = self.reconciler.sync.begin_anew(&*self.waiting.grace) {
            let error = &error as &dyn std::error::Error;
            error!(
                error,
                "cannot read the maps again after a refused write, so nothing is written until a retry succeeds"
            );
            return retired;
        }
        self.tell_gone();
        self.reconciler.pass()
    }

    /// Syncs the steering maps. Steering has its own retries, so that Services never wait for it.
    fn steer(&mut self) {
        self.steering.pass(since_boot());
        let is_incomplete = self.steering.is_incomplete();
        self.due.steer = is_incomplete.then(|| Instant::now() + STEERING_RETRY);
        let view = self.steering.view();
        self.stats.send_modify(|stats| stats.steering = view);
        self.publish_concerns();
    }

    fn pass(&mut self, heard: Option<Duration>) {
        let start = monotonic();
        let retired = self.write();
        self.waiting.add(retired);
        if self.steering.has_changed() {
            self.steer();
        }
        let end = monotonic();
        let took = end - start;
        self.stats.send_modify(|stats| {
            self.reconciler.describe(stats, took);
            for (reason, count) in &self.steering.counts {
                *stats.counts.entry(reason.label().to_owned()).or_default() += count;
            }
            stats.syncs += 1;
            stats.last_sync_seconds = took.as_secs_f64();
            stats.total_sync_seconds += stats.last_sync_seconds;
            if let Some(heard) = heard {
                stats.programming_latency_seconds = (end - heard).as_secs_f64();
            }
            let now = Timestamp::now();
            stats.last_sync_at = Some(now);
            let failing = self.reconciler.is_dirty().then_some(now);
            if failing.is_none() && stats.synced {
                stats.last_complete_sync_at = Some(now);
            }
            stats.failing_since = failing.map(|now| stats.failing_since.unwrap_or(now));
        });
        self.publish_concerns();
        if let Some(checks) = self.reconciler.health() {
            self.health.send_if_modified(|last| {
                let is_new = !Arc::ptr_eq(last, checks);
                *last = Arc::clone(checks);
                is_new
            });
        }
    }

    fn publish_concerns(&self) {
        let concerns = self.reconciler.concerns(&self.steering.known);
        latest::put(&self.concerns, concerns.into());
    }
}

/// Waits until a time, or for ever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => future::pending().await,
    }
}
