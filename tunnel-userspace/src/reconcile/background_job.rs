use std::future;

use tokio::task::{JoinHandle, spawn_blocking};

/// A background thread panicked.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a background thread of the reconcile loop panicked")]
pub struct ThreadPanicked;

/// A slot for at most one job, which runs on its own thread while the reconcile loop continues.
#[derive(Debug)]
pub(super) struct BackgroundJob<R>(Option<JoinHandle<R>>);

impl<R: Send + 'static> BackgroundJob<R> {
    pub(super) const fn idle() -> Self {
        Self(None)
    }

    pub(super) fn start(&mut self, work: impl FnOnce() -> R + Send + 'static) {
        self.0 = Some(spawn_blocking(work));
    }

    pub(super) const fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// Waits for the running job and returns its result, or `None` if its thread panicked. Waits forever if
    /// no job is running.
    pub(super) async fn wait(&mut self) -> Option<R> {
        let Some(running) = &mut self.0 else {
            return future::pending().await;
        };
        let ended = running.await;
        self.0 = None;
        let log = |error: &_| tracing::error!(%error, "a background thread of the reconcile loop panicked");
        ended.inspect_err(log).ok()
    }
}
