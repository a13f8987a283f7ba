//! The loop around the owner of the maps.

use std::{
    collections::BTreeSet,
    future, io,
    net::IpAddr,
    sync::{Arc, mpsc::TrySendError},
    time::Duration,
};

use jiff::Timestamp;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval_at, sleep_until},
};
use tracing::{error, info, warn};

use super::{
    access::{MapReader, MapWriter, SteeringMaps},
    grace::{self, Grace, Retired, Waiter},
    looks::{Found, Looked, Looks},
    observe::{Published, Stats},
    owner::Reconciler,
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
/// How long until what could not be steered is tried again.
const STEERING_RETRY: Duration = Duration::from_secs(5);
/// How long until indices that open connections keep are looked at again.
const OCCUPIED_LOOK: Duration = Duration::from_secs(5);
/// How many more updates one pass takes, so that a busy source can't keep it from writing.
const MOST_UPDATES: usize = 64;

/// The loop, and its ends for others.
pub struct Loop<M, S, G> {
    reconciler: Reconciler<M>,
    steering: Steering<S>,
    waiter: Waiter,
    audit_grace: G,
    audit_every: Duration,
    held: Retired,
    is_waiting: bool,
    retry: Duration,
    /// When what could not be written is tried again.
    retry_at: Option<Instant>,
    /// When what could not be steered is tried again.
    steer_at: Option<Instant>,
    /// How it is looked for listeners on addresses of Services.
    looks: Option<Looks>,
    /// When indices that open connections keep are looked at again.
    occupied_at: Option<Instant>,
    stats: watch::Sender<Stats>,
    concerns: watch::Sender<Arc<[Concern]>>,
    /// How often backends went that no program can give to a socket any more.
    gone: watch::Sender<u64>,
    health: watch::Sender<Arc<HealthChecks>>,
}

/// Makes the loop of a reconciler; the second value follows what it does. The first grace belongs
/// to the thread that frees, the second to the audit.
///
/// # Errors
///
/// The thread that waits for grace periods can't be started.
pub fn start<M: MapReader + MapWriter, S: SteeringMaps, G: Grace + 'static>(
    reconciler: Reconciler<M>,
    steering: Steering<S>,
    grace: (G, G),
    audit_every: Duration,
) -> io::Result<(Loop<M, S, G>, watch::Receiver<Stats>)> {
    let (stats, follower) = watch::channel(Stats::default());
    let (free_grace, audit_grace) = grace;
    let looped = Loop {
        reconciler,
        steering,
        waiter: grace::start(free_grace)?,
        audit_grace,
        audit_every,
        held: Retired::default(),
        is_waiting: false,
        retry: FIRST_RETRY,
        retry_at: None,
        steer_at: None,
        looks: None,
        occupied_at: None,
        stats,
        concerns: watch::Sender::new(Arc::default()),
        gone: watch::Sender::default(),
        health: watch::Sender::default(),
    };
    Ok((looped, follower))
}

impl<M: MapReader + MapWriter, S: SteeringMaps, G: Grace> Loop<M, S, G> {
    /// The owner of the steering maps.
    pub const fn steering(&mut self) -> &mut Steering<S> {
        &mut self.steering
    }

    /// What of it an operator must act on.
    pub fn concerns(&self) -> watch::Receiver<Arc<[Concern]>> {
        self.concerns.subscribe()
    }

    /// Changes each time that backends have gone, when no program can give them to a socket any more.
    pub fn gone(&self) -> watch::Receiver<u64> {
        self.gone.subscribe()
    }

    /// What load balancers are told of Services, once it is programmed.
    pub fn health_checks(&self) -> watch::Receiver<Arc<HealthChecks>> {
        self.health.subscribe()
    }

    /// What is shown of Services, for others to read.
    pub const fn published(&self) -> &Published {
        self.reconciler.published()
    }

    /// Writes the canary, dials it and removes it. Gives nothing where there is no room for it, or its
    /// front is a Service's.
    pub fn dial_canary<R>(&mut self, canary: &Canary, dial: impl FnOnce() -> R) -> Option<R> {
        let (dialled, retired) = self.reconciler.dial_canary(canary, dial);
        self.hand_over(retired);
        dialled
    }

    /// Whether it is not known what the maps hold, and nothing is written.
    pub fn is_in_doubt(&self) -> bool {
        self.reconciler.is_in_doubt()
    }

    /// Takes the addresses that this node has now, for what is planned from here on.
    pub fn set_addresses(&mut self, addresses: &Arc<BTreeSet<IpAddr>>) {
        self.reconciler.set_addresses(BTreeSet::clone(addresses));
    }

    /// Leaves sockets alone from here on at fronts of this node's own addresses where something
    /// listens itself. That is polled at this interval while there are such fronts, beside the loop
    /// once it runs.
    pub fn look_for_listeners(&mut self, find: Found, every: Duration) {
        self.looks = Some(Looks::new(find, every));
    }

    /// Takes one update and writes it.
    pub fn apply(&mut self, update: Update) {
        let since = update.since;
        self.update(update);
        self.pass(Some(since));
    }

    /// Waits until everything that went so far is free again, and writes what waited for that: for
    /// updates that are applied before the loop runs.
    pub async fn settle(&mut self) {
        while self.is_waiting {
            let Some(freed) = self.waiter.done.recv().await else {
                break;
            };
            self.take_back(&freed);
        }
    }

    fn update(&mut self, update: Update) {
        self.steering.update(&update);
        self.reconciler.update(update);
        let queued = Some(Timestamp::now());
        self.stats.send_if_modified(|stats| {
            stats.sync.last_queued_at = queued;
            false
        });
    }

    /// Runs until the drain begins or every source is gone. What is programmed stays.
    pub async fn run(
        mut self,
        mut updates: mpsc::Receiver<Update>,
        mut addresses: watch::Receiver<Arc<BTreeSet<IpAddr>>>,
        mut draining: watch::Receiver<bool>,
    ) {
        if let Err(error) = self.look_aside() {
            error!(%error, "cannot start a thread to look for listeners");
            return;
        }
        let mut audits = interval_at(Instant::now() + self.audit_every, self.audit_every);
        audits.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (retry_at, steer_at) = (self.retry_at, self.steer_at);
            let look_at = self.looks.as_ref().and_then(Looks::at);
            let occupied_at = self.occupied_at;
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                freed = self.waiter.done.recv() => {
                    let Some(freed) = freed else {
                        error!("the thread that waits for grace periods has ended");
                        return;
                    };
                    self.take_back(&freed);
                }
                update = updates.recv() => {
                    let Some(update) = update else { break };
                    let since = update.since;
                    self.update(update);
                    // What came during the last write goes into this one.
                    for _ in 0..MOST_UPDATES {
                        let Ok(update) = updates.try_recv() else { break };
                        self.update(update);
                    }
                    self.pass(Some(since));
                }
                Ok(()) = addresses.changed() => {
                    self.set_addresses(&addresses.borrow_and_update());
                    self.pass(None);
                }
                looked = ended(&mut self.looks) => {
                    let Some(looked) = looked else {
                        error!("the thread that looks for listeners has ended");
                        return;
                    };
                    self.take_look(looked);
                }
                () = sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => {
                    self.retry = self.retry.saturating_mul(2).min(LAST_RETRY);
                    self.pass(None);
                }
                () = sleep_until(steer_at.unwrap_or_else(Instant::now)), if steer_at.is_some() => {
                    self.steer();
                    let view = self.steering.view();
                    self.stats.send_modify(|stats| stats.steering = view);
                    self.publish_concerns();
                }
                () = sleep_until(look_at.unwrap_or_else(Instant::now)), if look_at.is_some() => {
                    self.look();
                    if self.reconciler.is_dirty() {
                        self.pass(None);
                    }
                }
                () = sleep_until(occupied_at.unwrap_or_else(Instant::now)), if occupied_at.is_some() => {
                    self.look_at_occupied();
                }
                _ = audits.tick() => self.audit(),
            }
        }
        info!("the owner of the maps stops; what is programmed stays");
    }

    /// Frees a batch, and writes what waited for room.
    fn take_back(&mut self, freed: &Retired) {
        self.is_waiting = false;
        if !freed.backends.is_empty() {
            self.tell_gone();
        }
        self.reconciler.free(freed, !self.held.is_empty());
        if self.reconciler.is_dirty() {
            self.pass(None);
        } else {
            self.hand_over(Retired::default());
            self.tell_occupied();
        }
    }

    /// Frees indices that open connections kept, and writes what waited for them.
    fn look_at_occupied(&mut self) {
        self.reconciler.look_at_occupied();
        if self.reconciler.is_dirty() {
            self.pass(None);
        } else {
            self.tell_occupied();
        }
    }

    /// Tells how many indices open connections keep, and plans the next look at them.
    fn tell_occupied(&mut self) {
        let occupied = self.reconciler.occupied();
        self.occupied_at = (occupied > 0).then(|| Instant::now() + OCCUPIED_LOOK);
        self.stats.send_if_modified(|stats| {
            let before = std::mem::replace(&mut stats.occupied_backends, occupied);
            before != occupied
        });
    }

    fn tell_gone(&self) {
        self.gone
            .send_modify(|times| *times = times.wrapping_add(1));
    }

    fn audit(&mut self) {
        match self.reconciler.audit(&mut self.audit_grace) {
            Ok(0) => {}
            Ok(differences) => {
                warn!(
                    differences,
                    "the maps were not as they were left, writing them anew"
                );
                // Backends may have been among them, and their grace period is over.
                self.tell_gone();
                self.pass(None);
            }
            Err(error) => error!(
                error = &error as &dyn std::error::Error,
                "cannot check the maps"
            ),
        }
    }

    /// Writes what changed. What a first pass may have left undone is found out, and written.
    fn write(&mut self) -> Retired {
        let retired = self.reconciler.pass();
        if !self.reconciler.is_in_doubt() {
            return retired;
        }
        if let Err(error) = self.reconciler.begin_anew(&mut self.audit_grace) {
            error!(
                error = &error as &dyn std::error::Error,
                "cannot begin anew"
            );
            return retired;
        }
        self.tell_gone();
        self.reconciler.pass()
    }

    /// Writes the steering maps. It has a pace of its own: Services must not wait for it.
    fn steer(&mut self) {
        self.steering.pass(since_boot());
        self.steer_at = self
            .steering
            .is_incomplete()
            .then(|| Instant::now() + STEERING_RETRY);
    }

    /// Lets a thread look for listeners from here on.
    fn look_aside(&mut self) -> io::Result<()> {
        let looks = self.looks.take();
        let aside = looks.map(|looks| looks.aside(&mut self.reconciler));
        self.looks = aside.transpose()?;
        Ok(())
    }

    /// Takes a look that has ended, and writes what waited for it.
    fn take_look(&mut self, looked: Looked) {
        if let Some(looks) = &mut self.looks {
            looks.end(looked, &mut self.reconciler);
        }
        // The fronts may be others by now.
        self.look();
        if self.reconciler.is_dirty() {
            self.pass(None);
        }
    }

    /// Looks for listeners, if it is time.
    fn look(&mut self) {
        if let Some(looks) = &mut self.looks {
            looks.look(&mut self.reconciler);
        }
    }

    fn pass(&mut self, since: Option<Duration>) {
        let start = monotonic();
        self.look();
        let retired = self.write();
        self.hand_over(retired);
        if self.reconciler.is_dirty() {
            self.retry_at = Some(Instant::now() + self.retry);
        } else {
            self.retry_at = None;
            self.retry = FIRST_RETRY;
        }
        if self.steering.has_changed() {
            self.steer();
        }
        let end = monotonic();
        self.stats.send_modify(|stats| {
            self.reconciler.describe(stats);
            let took = end.saturating_sub(start);
            self.reconciler.measure(&mut stats.sync, took);
            stats.steering = self.steering.view();
            for (reason, count) in self.steering.counts() {
                let total = stats.counts.entry(reason.label().to_owned()).or_default();
                *total = total.saturating_add(*count);
            }
            stats.passes = stats.passes.saturating_add(1);
            stats.last_pass_seconds = end.saturating_sub(start).as_secs_f64();
            stats.all_passes_seconds += stats.last_pass_seconds;
            if let Some(since) = since {
                stats.last_delay_seconds = end.saturating_sub(since).as_secs_f64();
            }
            let now = Timestamp::now();
            stats.last_pass_at = Some(now);
            let failing = self.reconciler.is_dirty().then_some(now);
            if failing.is_none() && stats.synced {
                stats.last_whole_pass_at = Some(now);
            }
            stats.failing_since = failing.map(|now| stats.failing_since.unwrap_or(now));
        });
        self.tell_occupied();
        self.publish_concerns();
        if let Some(checks) = self.reconciler.take_health() {
            self.health.send_replace(checks);
        }
    }

    fn publish_concerns(&self) {
        let concerns = self.reconciler.concerns(&self.steering.known);
        latest::put(&self.concerns, concerns.into());
    }

    /// Hands what was retired to the thread that waits. While it waits for an earlier batch, the
    /// rest is held, and goes as one batch.
    fn hand_over(&mut self, retired: Retired) {
        self.held.merge(retired);
        if self.is_waiting || self.held.is_empty() {
            return;
        }
        match self.waiter.send.try_send(std::mem::take(&mut self.held)) {
            Ok(()) => self.is_waiting = true,
            Err(TrySendError::Full(batch) | TrySendError::Disconnected(batch)) => {
                self.held.merge(batch);
            }
        }
    }
}

/// The next look that has ended, where there are looks.
async fn ended(looks: &mut Option<Looks>) -> Option<Looked> {
    match looks {
        Some(looks) => looks.ended().await,
        None => future::pending().await,
    }
}
