//! Tasks with an owner: each has a name, none ends unnoticed.

use std::{future::Future, time::Duration};

use tokio::{sync::watch, task::JoinSet, time::timeout};
use tracing::{Instrument as _, Span, error, info_span, warn};

/// The tasks of a role, and their drain.
#[derive(Default)]
pub struct Tasks {
    set: JoinSet<&'static str>,
    drain: watch::Sender<bool>,
}

impl Tasks {
    /// Starts a task under a span of its name.
    pub fn start(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let named = async move {
            task.await;
            name
        };
        self.set.spawn(named.instrument(span(name)));
    }

    /// Follows the drain: the value is false until [`Self::finish`].
    #[must_use]
    pub fn draining(&self) -> watch::Receiver<bool> {
        self.drain.subscribe()
    }

    /// Waits until a task ends, and returns its name; before the drain none should end.
    pub async fn ended(&mut self) -> String {
        match self.set.join_next().await {
            Some(Ok(name)) => name.to_owned(),
            Some(Err(panic)) => panic.to_string(),
            None => std::future::pending().await,
        }
    }

    /// Begins the drain and waits for every task, up to `limit`; then aborts the remaining ones.
    pub async fn finish(mut self, limit: Duration) {
        self.drain.send_replace(true);
        let all = async {
            while let Some(ended) = self.set.join_next().await {
                if let Err(panic) = ended {
                    error!(%panic, "a task failed");
                }
            }
        };
        if timeout(limit, all).await.is_err() {
            warn!(
                seconds = limit.as_secs(),
                "tasks were ended that did not stop in time"
            );
        }
    }
}

/// Returns the span of a task. Its field is not called `name`, which would repeat a key in the JSON of
/// the span.
pub(crate) fn span(task: &'static str) -> Span {
    info_span!("run", task)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_stop_is_ended_at_the_limit() {
        let mut tasks = Tasks::default();
        tasks.start("stuck", std::future::pending());

        timeout(Duration::from_secs(6), tasks.finish(Duration::from_secs(5)))
            .await
            .expect("the limit holds");
    }

    #[tokio::test]
    async fn the_end_of_a_task_is_noticed_by_its_name() {
        let mut tasks = Tasks::default();
        tasks.start("short", std::future::ready(()));

        assert_eq!(tasks.ended().await, "short");
    }
}
