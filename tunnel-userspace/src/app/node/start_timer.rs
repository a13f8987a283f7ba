//! Measures the steps of the start.

use std::time::Duration;

use tokio::sync::watch;

use crate::{admin::StartTimes, clock::monotonic};

/// Measures the durations of consecutive steps.
#[derive(Debug)]
pub(super) struct StartTimer {
    /// The time when the last step ended.
    step_started_at: Duration,
    times: watch::Sender<StartTimes>,
}

impl StartTimer {
    /// Starts the timer of the first step.
    pub(super) fn start() -> Self {
        Self {
            step_started_at: monotonic(),
            times: watch::Sender::default(),
        }
    }

    /// Returns a receiver of the durations measured so far.
    pub(super) fn times(&self) -> watch::Receiver<StartTimes> {
        self.times.subscribe()
    }

    /// Stores the duration of a step, and starts the timer of the next one.
    pub(super) fn finish_step(&mut self, step: impl FnOnce(&mut StartTimes) -> &mut Option<f64>) {
        let now = monotonic();
        let took = (now - self.step_started_at).as_secs_f64();
        self.step_started_at = now;
        self.times.send_modify(|times| *step(times) = Some(took));
    }
}
