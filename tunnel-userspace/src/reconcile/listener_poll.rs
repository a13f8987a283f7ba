//! Polls for processes of this node that listen on the address of a Service.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;
use tracing::warn;
use tunnel_common::service::FrontKey;

use super::{background::Background, reconciler::Reconciler};

/// A function that returns those of the given frontends on which a process of this node listens.
pub type Found =
    Box<dyn FnMut(&BTreeSet<FrontKey>) -> Result<BTreeSet<FrontKey>, LookError> + Send>;

/// The sockets of this node can't be listed.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the listening sockets of this node")]
pub struct LookError {
    /// True if another poll may succeed.
    pub is_retryable: bool,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The result of a poll: the poller, the frontends that it covered, and those with a listener.
pub(super) type Looked = (
    Found,
    BTreeSet<FrontKey>,
    Result<BTreeSet<FrontKey>, LookError>,
);

/// Polls for listeners in the background. Meanwhile the reconcile loop writes every Service except those
/// with frontends that no poll has covered yet.
pub(super) struct ListenerPoll {
    /// The poller; `None` during a poll, or if polling is off.
    find: Option<Found>,
    running: Background<Looked>,
    every: Duration,
    /// The time of the next poll; `None` during a poll, or if no address of a Service is on this node.
    pub(super) at: Option<Instant>,
    is_failing: bool,
}

impl ListenerPoll {
    pub(super) const fn new(find: Option<Found>, every: Duration) -> Self {
        Self {
            find,
            running: Background::none(),
            every,
            at: None,
            is_failing: false,
        }
    }

    /// Starts a poll if it is due, or if the frontends on addresses of this node changed since the last
    /// one. Returns true if a poll is running.
    pub(super) fn look<M>(&mut self, reconciler: &mut Reconciler<M>) -> bool {
        if self.running.is_running() {
            return true;
        }
        let listeners = &mut reconciler.desired.listeners;
        let is_due = self.at.is_some_and(|at| at <= Instant::now());
        if !std::mem::take(&mut listeners.is_new) && !is_due {
            return false;
        }
        self.at = None;
        let local = listeners.local();
        if local.is_empty() {
            reconciler.set_listeners(BTreeSet::new());
        } else if let Some(mut find) = self.find.take() {
            self.running.start(move || {
                let found = find(&local);
                (find, local, found)
            });
        }
        self.running.is_running()
    }

    /// Waits for the running poll; returns `None` if its thread panicked.
    pub(super) async fn ended(&mut self) -> Option<Looked> {
        self.running.ended().await
    }

    /// Applies the result of a poll.
    pub(super) fn end<M>(&mut self, looked: Looked, reconciler: &mut Reconciler<M>) {
        let (find, local, found) = looked;
        self.find = Some(find);
        self.at = Some(Instant::now() + self.every);
        let listeners = &mut reconciler.desired.listeners;
        listeners.looked = local;
        let was_failing = std::mem::replace(&mut self.is_failing, found.is_err());
        let found = found.unwrap_or_else(|error| {
            // If a retry would fail, too, the next poll starts when the frontends change.
            self.at = self.at.filter(|_| error.is_retryable);
            if !was_failing {
                let error = &error as &dyn std::error::Error;
                warn!(
                    error,
                    "cannot poll for listeners on addresses of Services, using the last result"
                );
            }
            listeners.found.clone()
        });
        reconciler.set_listeners(found);
    }
}
