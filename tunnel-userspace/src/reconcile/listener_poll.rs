//! The polls for local listeners on addresses of Services.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;
use tracing::warn;
use tunnel_common::service::FrontKey;

use super::{background::Background, reconciler::Reconciler};

/// Returns those frontends at which a process of this node listens.
pub type Found =
    Box<dyn FnMut(&BTreeSet<FrontKey>) -> Result<BTreeSet<FrontKey>, LookError> + Send>;

/// The error of a poll.
#[derive(Debug, thiserror::Error)]
#[error("cannot look for listeners")]
pub struct LookError {
    /// True if the poll may succeed if repeated.
    pub is_retryable: bool,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// A completed poll: the poller, the frontends covered, and those with a listener.
pub(super) type Looked = (
    Found,
    BTreeSet<FrontKey>,
    Result<BTreeSet<FrontKey>, LookError>,
);

/// The polls, in the background. Meanwhile the owner of the maps writes everything except Services with
/// frontends that no poll has covered yet.
pub(super) struct ListenerPoll {
    /// The poller; none during a poll, or if polling is off.
    find: Option<Found>,
    running: Background<Looked>,
    every: Duration,
    /// The time of the next poll; none if this node has no address of a Service, or during a poll.
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

    /// Starts a poll if the frontends at this node's own addresses changed since the last one, or if it
    /// is due. Returns true if a poll is running.
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

    /// Waits for the poll; returns none if its thread panicked.
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
            // If a retry is useless, the next poll waits for a change of the frontends.
            self.at = self.at.filter(|_| error.is_retryable);
            if !was_failing {
                let error = &error as &dyn std::error::Error;
                warn!(
                    error,
                    "what is known of listeners on addresses of Services stays"
                );
            }
            listeners.found.clone()
        });
        reconciler.set_listeners(found);
    }
}
