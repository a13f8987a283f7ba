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
/// How long until what could not be steered is tried again.
const STEERING_RETRY: Duration = Duration::from_secs(5);
/// How long until indices that open connections keep are looked at again.
const OCCUPIED_LOOK: Duration = Duration::from_secs(5);

/// The place where what the sources say is gathered.
pub trait Updates: Send {
    /// Waits for changes, and takes all there are; nothing once every source is gone. Loses none if it
    /// is given up.
    fn update(&mut self) -> impl Future<Output = Option<Update>> + Send;
}

/// The loop, and its ends for others.
pub struct Loop<M, S, G> {
    reconciler: Reconciler<M>,
    steering: Steering<S>,
    waiting: Waiting<G>,
    listener_poll: ListenerPoll,
    audit_every: Duration,
    due: Due,
    stats: watch::Sender<Stats>,
    concerns: watch::Sender<Arc<[Concern]>>,
    /// How often backends went that no program can give to a socket any more.
    gone: watch::Sender<u64>,
    health: watch::Sender<Arc<HealthChecks>>,
}

/// When something is done though nothing was heard.
#[derive(Default)]
struct Due {
    /// How long what could not be written waits.
    pause: Duration,
    /// When what could not be written is tried again.
    retry: Option<Instant>,
    /// When what could not be steered is tried again.
    steer: Option<Instant>,
    /// When indices that open connections keep are looked at again.
    occupied: Option<Instant>,
}

impl<M: MapReader + MapWriter, S: SteeringMaps, G: Grace + 'static> Loop<M, S, G> {
    /// Makes the loop of a reconciler.
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

    /// The owner of the steering maps.
    pub const fn steering(&mut self) -> &mut Steering<S> {
        &mut self.steering
    }

    /// Follows what it does.
    pub fn stats(&self) -> watch::Receiver<Stats> {
        self.stats.subscribe()
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
        let sync = &mut self.reconciler.sync;
        let dialled = sync.dial_canary(canary, dial);
        self.waiting.add(sync.ports.take_retired());
        dialled
    }

    /// Whether it is not known what the maps hold, and nothing is written.
    pub fn is_in_doubt(&self) -> bool {
        self.reconciler.sync.is_in_doubt()
    }

    /// Takes the addresses that this node has now, for what is planned from here on.
    pub fn set_addresses(&mut self, addresses: &Arc<BTreeSet<IpAddr>>) {
        self.reconciler.set_addresses(BTreeSet::clone(addresses));
    }

    /// Leaves sockets alone from here on at fronts of this node's own addresses where something
    /// listens itself. That is polled at this interval while there are such fronts.
    pub fn look_for_listeners(&mut self, find: Found, every: Duration) {
        self.listener_poll = ListenerPoll::new(Some(find), every);
        self.reconciler.held_back.get_or_insert_default();
    }

    /// Takes one update and writes it, before the loop runs.
    ///
    /// # Errors
    ///
    /// A look for listeners broke off.
    pub async fn apply(&mut self, update: Update) -> Result<(), BrokeOff> {
        let since = self.update(update);
        while self.listener_poll.look(&mut self.reconciler) {
            let looked = self.listener_poll.ended().await.ok_or(BrokeOff)?;
            self.listener_poll.end(looked, &mut self.reconciler);
        }
        self.follow_up(true, Some(since));
        Ok(())
    }

    /// Waits until everything that went so far is free again, and writes what waited for that: for
    /// updates that are applied before the loop runs.
    ///
    /// # Errors
    ///
    /// No grace period is to be had: the next start finds what is free.
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

    /// Runs until the drain begins or every source is gone. What is programmed stays.
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
                    // No source told of it: the delay of the last update stays what is shown.
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
                // Read here, as what is free then is written: a batch at most.
                () = at(self.due.occupied) => self.reconciler.sync.look_at_occupied(),
                _ = audits.tick() => is_due = self.audit(),
            }
            self.follow_up(is_due, heard);
        }
        info!("the owner of the maps stops; what is programmed stays");
    }

    /// Looks for listeners if it is time, and writes what was heard then, or waits.
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
            std::mem::replace(&mut stats.occupied_backends, occupied) != occupied
        });
    }

    /// Frees a batch. What waited for room is to be written then.
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

    /// Compares the maps with what is known of them. They are read here, and not beside: while something
    /// is written, a reader sees some of it and not the rest, which is no difference. It is once an hour,
    /// as a start reads them. Returns true for differences, which are to be written.
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

    /// Writes what changed. What a first pass may have left undone is found out, and written.
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

    /// Writes the steering maps. It has a pace of its own: Services must not wait for it.
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
            stats.passes += 1;
            stats.last_pass_seconds = took.as_secs_f64();
            stats.all_passes_seconds += stats.last_pass_seconds;
            if let Some(heard) = heard {
                stats.last_delay_seconds = (end - heard).as_secs_f64();
            }
            let now = Timestamp::now();
            stats.last_pass_at = Some(now);
            let failing = self.reconciler.is_dirty().then_some(now);
            if failing.is_none() && stats.synced {
                stats.last_whole_pass_at = Some(now);
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

/// Waits until it is that time; for ever where there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => future::pending().await,
    }
}
