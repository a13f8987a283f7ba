//! When and how local listeners on addresses of Services are looked for.

use std::{collections::BTreeSet, fmt, future, io, time::Duration};

use tokio::time::Instant;
use tracing::warn;
use tunnel_common::service::FrontKey;

use super::{aside::Aside, owner::Reconciler};

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

/// A look that has ended: the fronts it was at, and those where something listens.
pub(super) type Looked = (BTreeSet<FrontKey>, Result<BTreeSet<FrontKey>, LookError>);

/// The place where a look is made.
enum Way {
    /// By the owner, which waits for it: before its loop runs.
    Here(Found),
    /// By a thread of its own. Meanwhile the owner writes everything but Services with fronts that no
    /// look was at yet.
    Aside(Aside<BTreeSet<FrontKey>, Looked>),
}

pub(super) struct Looks {
    way: Way,
    every: Duration,
    /// When the next look is due; never where this node has no address of a Service, or while one is
    /// being made.
    at: Option<Instant>,
    is_asked: bool,
    is_failing: bool,
}

impl fmt::Debug for Looks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Looks")
            .field("every", &self.every)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl Looks {
    pub(super) const fn new(find: Found, every: Duration) -> Self {
        Self {
            way: Way::Here(find),
            every,
            at: None,
            is_asked: false,
            is_failing: false,
        }
    }

    /// The same with a thread of its own.
    pub(super) fn aside<M>(self, reconciler: &mut Reconciler<M>) -> io::Result<Self> {
        let way = match self.way {
            Way::Here(mut find) => Way::Aside(Aside::start("listeners", move |fronts| {
                let found = find(&fronts);
                Some((fronts, found))
            })?),
            Way::Aside(aside) => Way::Aside(aside),
        };
        reconciler.hold_back();
        Ok(Self { way, ..self })
    }

    /// When the next look is due, if one is.
    pub(super) const fn at(&self) -> Option<Instant> {
        self.at
    }

    /// The next look that has ended; nothing if there will be none.
    pub(super) async fn ended(&mut self) -> Option<Looked> {
        match &mut self.way {
            Way::Here(_) => future::pending().await,
            Way::Aside(aside) => aside.done.recv().await,
        }
    }

    /// Looks if the fronts of this node's own addresses are others than at the last look, or if the
    /// time has come.
    pub(super) fn look<M>(&mut self, reconciler: &mut Reconciler<M>) {
        if self.is_asked {
            return;
        }
        let is_new = reconciler.listeners().take_new();
        let is_due = self.at.is_some_and(|at| at <= Instant::now());
        if !is_new && !is_due {
            return;
        }
        let local = reconciler.listeners().local();
        if local.is_empty() {
            self.at = None;
            reconciler.set_listeners(BTreeSet::new());
            return;
        }
        match &mut self.way {
            Way::Here(find) => {
                let found = find(&local);
                self.end((local, found), reconciler);
            }
            Way::Aside(aside) => {
                self.at = None;
                self.is_asked = aside.send.try_send(local).is_ok();
            }
        }
    }

    /// Takes a look that has ended.
    pub(super) fn end<M>(&mut self, looked: Looked, reconciler: &mut Reconciler<M>) {
        let (local, found) = looked;
        self.is_asked = false;
        self.at = Some(Instant::now() + self.every);
        reconciler.listeners().set_looked(local);
        match found {
            Ok(found) => {
                self.is_failing = false;
                reconciler.set_listeners(found);
            }
            Err(error) => {
                // Without a chance it is tried again when something is new.
                self.at = self.at.filter(|_| error.is_retryable);
                if !std::mem::replace(&mut self.is_failing, true) {
                    let error = &error as &dyn std::error::Error;
                    warn!(
                        error,
                        "what is known of listeners on addresses of Services stays"
                    );
                }
                let known = reconciler.listeners().found().clone();
                reconciler.set_listeners(known);
            }
        }
    }
}
