//! Named background tasks: the owner learns when one ends, and stops all of them on drain.

use std::{future::Future, time::Duration};

use tokio::{sync::watch, task::JoinSet, time::timeout};
use tracing::{Instrument as _, Span, error, info_span, warn};

/// A role's running tasks, and the signal that makes them drain.
#[derive(Default)]
pub struct Tasks {
    set: JoinSet<&'static str>,
    drain: watch::Sender<bool>,
}

impl Tasks {
    /// Starts a task in a tracing span that carries its name.
    pub fn start(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let named = async move {
            task.await;
            name
        };
        self.set.spawn(named.instrument(span(name)));
    }

    /// Returns a receiver whose value is false until [`Self::finish`] begins the drain.
    #[must_use]
    pub fn draining(&self) -> watch::Receiver<bool> {
        self.drain.subscribe()
    }

    /// Waits until a task ends, and returns its name or its panic message. No task should end before the
    /// drain.
    pub async fn ended(&mut self) -> String {
        match self.set.join_next().await {
            Some(Ok(name)) => name.to_owned(),
            Some(Err(panic)) => panic.to_string(),
            None => std::future::pending().await,
        }
    }

    /// Begins the drain and waits up to `limit` for all tasks to end; then aborts those that have not.
    pub async fn finish(mut self, limit: Duration) {
        self.drain.send_replace(true);
        let all = async {
            while let Some(ended) = self.set.join_next().await {
                if let Err(panic) = ended {
                    error!(%panic, "a task panicked while draining");
                }
            }
        };
        if timeout(limit, all).await.is_err() {
            warn!(
                seconds = limit.as_secs(),
                "aborted tasks that did not stop in time"
            );
        }
    }
}

/// Returns the tracing span for a task. The field is not called `name`, because a span's JSON already has a
/// key of that name.
pub(crate) fn span(task: &'static str) -> Span {
    info_span!("run", task)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_stop_is_aborted_at_the_limit() {
        let mut tasks = Tasks::default();
        tasks.start("stuck", std::future::pending());

        timeout(Duration::from_secs(6), tasks.finish(Duration::from_secs(5)))
            .await
            .expect("finished at the limit");
    }

    #[tokio::test]
    async fn ended_returns_the_name_of_the_task() {
        let mut tasks = Tasks::default();
        tasks.start("short", std::future::ready(()));

        assert_eq!(tasks.ended().await, "short");
    }
}
