//! Polls for processes on this node that listen on a Service's address.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;
use tracing::warn;
use tunnel_common::service::FrontendKey;

use super::{background_job::BackgroundJob, reconciler::Reconciler};

/// The frontends on which a process on this node is listening, each with the ids of the users who own the
/// listening sockets.
pub type ListeningUsers = BTreeMap<FrontendKey, BTreeSet<u32>>;

/// A function that takes a set of frontends and returns the ones on which a process on this node is
/// listening.
pub type FindListeners =
    Box<dyn FnMut(&BTreeSet<FrontendKey>) -> Result<ListeningUsers, ListenerPollError> + Send>;

/// An error that occurred while listing the listening sockets on this node.
#[derive(Debug, thiserror::Error)]
#[error("cannot list the listening sockets of this node")]
pub struct ListenerPollError {
    /// True if a retry may succeed.
    pub is_retryable: bool,
    /// The underlying error.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The result of a poll: the poller, the frontends it covered, and those that have a listener.
pub(super) type PollResult = (
    FindListeners,
    BTreeSet<FrontendKey>,
    Result<ListeningUsers, ListenerPollError>,
);

/// Polls for listeners in the background. Meanwhile, the reconcile loop writes all Services except those with
/// frontends that no poll has covered yet.
pub(super) struct ListenerPoll {
    /// The poller, or `None` while a poll is running or if polling is off.
    find_listeners: Option<FindListeners>,
    running: BackgroundJob<PollResult>,
    interval: Duration,
    /// The time of the next poll, or `None` while a poll is running or if this node has none of the Services'
    /// addresses.
    pub(super) next_at: Option<Instant>,
    is_failing: bool,
}

impl ListenerPoll {
    pub(super) const fn new(find_listeners: Option<FindListeners>, interval: Duration) -> Self {
        Self {
            find_listeners,
            running: BackgroundJob::idle(),
            interval,
            next_at: None,
            is_failing: false,
        }
    }

    /// Starts a poll if one is due or if the frontends on this node's addresses have changed since the last
    /// poll. Returns true if a poll is running.
    pub(super) fn start_if_due<M>(&mut self, reconciler: &mut Reconciler<M>) -> bool {
        if self.running.is_running() {
            return true;
        }
        let listeners = &mut reconciler.desired.listeners;
        let is_due = self.next_at.is_some_and(|at| at <= Instant::now());
        if !std::mem::take(&mut listeners.has_changed) && !is_due {
            return false;
        }
        self.next_at = None;
        let local = listeners.frontends();
        if local.is_empty() {
            reconciler.set_listeners(ListeningUsers::new());
        } else if let Some(mut find) = self.find_listeners.take() {
            self.running.start(move || {
                let found = find(&local);
                (find, local, found)
            });
        }
        self.running.is_running()
    }

    /// Waits for the running poll and returns its result, or `None` if its thread panicked.
    pub(super) async fn wait(&mut self) -> Option<PollResult> {
        self.running.wait().await
    }

    /// Applies the result of a poll.
    pub(super) fn apply_result<M>(&mut self, result: PollResult, reconciler: &mut Reconciler<M>) {
        let (find_listeners, local, found) = result;
        self.find_listeners = Some(find_listeners);
        self.next_at = Some(Instant::now() + self.interval);
        let listeners = &mut reconciler.desired.listeners;
        listeners.polled = local;
        let was_failing = std::mem::replace(&mut self.is_failing, found.is_err());
        let found = found.unwrap_or_else(|error| {
            // If a retry would also fail, wait until the frontends change before polling again.
            self.next_at = self.next_at.filter(|_| error.is_retryable);
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
