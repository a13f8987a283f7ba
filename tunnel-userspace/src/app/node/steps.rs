//! How long the steps of a start take.

use std::time::Duration;

use tokio::sync::watch;

use crate::{admin::StartTimes, clock::monotonic};

/// Times steps, one after another.
#[derive(Debug)]
pub(super) struct Steps {
    /// When the last one ended.
    since: Duration,
    times: watch::Sender<StartTimes>,
}

impl Steps {
    /// The first step begins now.
    pub(super) fn begin() -> Self {
        Self {
            since: monotonic(),
            times: watch::Sender::default(),
        }
    }

    /// What was timed so far.
    pub(super) fn times(&self) -> watch::Receiver<StartTimes> {
        self.times.subscribe()
    }

    /// Ends a step, and begins the next one.
    pub(super) fn done(&mut self, step: impl FnOnce(&mut StartTimes) -> &mut Option<f64>) {
        let now = monotonic();
        let took = (now - self.since).as_secs_f64();
        self.since = now;
        self.times.send_modify(|times| *step(times) = Some(took));
    }
}
