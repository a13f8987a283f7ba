//! The durations of the steps of a start.

use std::time::Duration;

use tokio::sync::watch;

use crate::{admin::StartTimes, clock::monotonic};

/// A timer of consecutive steps.
#[derive(Debug)]
pub(super) struct Steps {
    /// The end of the last step.
    since: Duration,
    times: watch::Sender<StartTimes>,
}

impl Steps {
    /// Begins the first step.
    pub(super) fn begin() -> Self {
        Self {
            since: monotonic(),
            times: watch::Sender::default(),
        }
    }

    /// Follows the measured durations.
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
