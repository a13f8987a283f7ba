//! When and how local listeners on addresses of Services are looked for.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;
use tracing::warn;
use tunnel_common::service::FrontKey;

use super::{background::Background, reconciler::Reconciler};

/// Says at which of some fronts something of this node listens.
pub type Found =
    Box<dyn FnMut(&BTreeSet<FrontKey>) -> Result<BTreeSet<FrontKey>, LookError> + Send>;

/// Listeners can't be looked for.
#[derive(Debug, thiserror::Error)]
#[error("cannot look for listeners")]
pub struct LookError {
    /// Whether the same may succeed a moment later.
    pub is_retryable: bool,
    /// Why it can't.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// A look that has ended: who looked, the fronts it was at, and those where something listens.
pub(super) type Looked = (
    Found,
    BTreeSet<FrontKey>,
    Result<BTreeSet<FrontKey>, LookError>,
);

/// The looks, beside the owner of the maps. Meanwhile it writes everything but Services with fronts that
/// no look was at yet.
pub(super) struct ListenerPoll {
    /// Nothing during a look, or where nobody looks.
    find: Option<Found>,
    running: Background<Looked>,
    every: Duration,
    /// When the next look is due; never where this node has no address of a Service, or during a look.
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

    /// Begins a look if the fronts of this node's own addresses are others than at the last one, or if
    /// the time has come. Says whether there is one to wait for.
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

    /// The look, once it has ended; nothing if it broke off.
    pub(super) async fn ended(&mut self) -> Option<Looked> {
        self.running.ended().await
    }

    /// Takes a look that has ended.
    pub(super) fn end<M>(&mut self, looked: Looked, reconciler: &mut Reconciler<M>) {
        let (find, local, found) = looked;
        self.find = Some(find);
        self.at = Some(Instant::now() + self.every);
        let listeners = &mut reconciler.desired.listeners;
        listeners.looked = local;
        let was_failing = std::mem::replace(&mut self.is_failing, found.is_err());
        let found = found.unwrap_or_else(|error| {
            // Without a chance it is tried again when something is new.
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
