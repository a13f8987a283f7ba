//! The loop around the owner of the maps.

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

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// The delay before steering that failed is retried.
const STEERING_RETRY: Duration = Duration::from_secs(5);
/// The interval at which indices that open connections keep are polled.
const OCCUPIED_LOOK: Duration = Duration::from_secs(5);

/// The collected changes of all sources.
pub trait Updates: Send {
    /// Waits for changes, and takes all of them; none once every source has ended. Cancel safe.
    fn update(&mut self) -> impl Future<Output = Option<Update>> + Send;
}

/// The loop, with the channels on which it publishes its state.
pub struct Loop<M, S, G> {
    reconciler: Reconciler<M>,
    steering: Steering<S>,
    waiting: Waiting<G>,
    listener_poll: ListenerPoll,
    audit_every: Duration,
    due: Due,
    stats: watch::Sender<Stats>,
    concerns: watch::Sender<Arc<[Concern]>>,
    /// The number of times that backends were removed and can no longer be chosen by a program.
    gone: watch::Sender<u64>,
    health: watch::Sender<Arc<HealthChecks>>,
}

/// The times of work without an event.
#[derive(Default)]
struct Due {
    /// The delay before failed writes are retried.
    pause: Duration,
    /// The time of the next retry of failed writes.
    retry: Option<Instant>,
    /// The time of the next retry of steering.
    steer: Option<Instant>,
    /// The time of the next poll of indices that open connections keep.
    occupied: Option<Instant>,
}

impl<M: MapReader + MapWriter, S: SteeringMaps, G: Grace + 'static> Loop<M, S, G> {
    /// Returns the loop of a reconciler.
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

    /// Returns a receiver of the state.
    pub fn stats(&self) -> watch::Receiver<Stats> {
        self.stats.subscribe()
    }

    /// Returns a receiver of the problems that an operator must act on.
    pub fn concerns(&self) -> watch::Receiver<Arc<[Concern]>> {
        self.concerns.subscribe()
    }

    /// Returns a receiver that changes whenever backends were removed and can no longer be chosen by a
    /// program.
    pub fn gone(&self) -> watch::Receiver<u64> {
        self.gone.subscribe()
    }

    /// Returns a receiver of the Services' health checks, once the Services are programmed.
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

    /// Returns true if the content of the maps is unknown, so that nothing is written.
    pub fn is_in_doubt(&self) -> bool {
        self.reconciler.sync.is_in_doubt()
    }

    /// Replaces the addresses of this node, for plans from now on.
    pub fn set_addresses(&mut self, addresses: &Arc<BTreeSet<IpAddr>>) {
        self.reconciler.set_addresses(BTreeSet::clone(addresses));
    }

    /// Enables polling, at this interval, for listeners at frontends of this node's own addresses, where
    /// sockets are then left alone.
    pub fn look_for_listeners(&mut self, find: Found, every: Duration) {
        self.listener_poll = ListenerPoll::new(Some(find), every);
        self.reconciler.held_back.get_or_insert_default();
    }

    /// Applies one update and writes it, before the loop runs.
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

    /// Waits until all retired entries are freed, and writes the changes that waited for room: for
    /// updates that are applied before the loop runs.
    ///
    /// # Errors
    ///
    /// The kernel offers no grace period: the next start finds the free entries.
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

    /// Runs until the drain begins or every source has ended. The maps stay as they are.
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
                    // Not from a source, so the published delay of the last update stays.
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
                // In this task, since freed indices are then written. It reads at most one batch.
                () = at(self.due.occupied) => self.reconciler.sync.look_at_occupied(),
                _ = audits.tick() => is_due = self.audit(),
            }
            self.follow_up(is_due, heard);
        }
        info!("the owner of the maps stops; what is programmed stays");
    }

    /// Starts a poll for listeners if it is due, and writes the changes, if any.
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

    /// Frees a batch. Changes that waited for room become dirty.
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

    /// Compares the maps with their known content. Reading must not be concurrent to writes, since a
    /// reader would take a half-written change for a difference. It takes as long as at a start, once an
    /// hour. Returns true if there were differences, which are to be written.
    fn audit(&mut self) -> bool {
        match self.reconciler.audit(&*self.waiting.grace) {
            Ok(0) => {}
            Ok(differences) => {
                warn!(
                    differences,
                    "the maps were not as they were left, writing them anew"
                );
                // Backends may have been among them, and their grace period is over.
                self.tell_gone();
                return true;
            }
            Err(error) => error!(
                error = &error as &dyn std::error::Error,
                "cannot check the maps"
            ),
        }
        false
    }

    /// Writes the changes. If the first sync was partly refused, reads the maps again and writes the
    /// rest.
    fn write(&mut self) -> Retired {
        let retired = self.reconciler.pass();
        if !self.is_in_doubt() {
            return retired;
        }
        if let Err(error) = self.reconciler.sync.begin_anew(&*self.waiting.grace) {
            let error = &error as &dyn std::error::Error;
            error!(error, "cannot begin anew");
            return retired;
        }
        self.tell_gone();
        self.reconciler.pass()
    }

    /// Writes the steering maps, with retries of its own, so that Services never wait for steering.
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

/// Waits until a time; for ever without one.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => future::pending().await,
    }
}
