use std::future;

use tokio::task::{JoinHandle, spawn_blocking};

/// The error of a background thread that panicked.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("work beside the owner of the maps broke off")]
pub struct BrokeOff;

/// A job in a thread of its own, concurrent to the owner of the maps.
#[derive(Debug)]
pub(super) struct Background<R>(Option<JoinHandle<R>>);

impl<R: Send + 'static> Background<R> {
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) fn start(&mut self, work: impl FnOnce() -> R + Send + 'static) {
        self.0 = Some(spawn_blocking(work));
    }

    pub(super) const fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// Waits for the result; returns none if the thread panicked.
    pub(super) async fn ended(&mut self) -> Option<R> {
        let Some(running) = &mut self.0 else {
            return future::pending().await;
        };
        let ended = running.await;
        self.0 = None;
        let log =
            |error: &_| tracing::error!(%error, "work beside the owner of the maps broke off");
        ended.inspect_err(log).ok()
    }
}
