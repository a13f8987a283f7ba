//! Measures how long each startup step takes.

use std::time::Duration;

use tokio::sync::watch;

use crate::{admin::StartTimes, clock::monotonic};

/// Measures how long each of several consecutive steps takes.
#[derive(Debug)]
pub(super) struct StartTimer {
    /// The time at which the current step started.
    step_started_at: Duration,
    times: watch::Sender<StartTimes>,
}

impl StartTimer {
    /// Starts timing the first step.
    pub(super) fn start() -> Self {
        Self {
            step_started_at: monotonic(),
            times: watch::Sender::default(),
        }
    }

    /// Returns a receiver for the durations measured so far.
    pub(super) fn times(&self) -> watch::Receiver<StartTimes> {
        self.times.subscribe()
    }

    /// Records how long a step took, and starts timing the next one.
    pub(super) fn finish_step(&mut self, step: impl FnOnce(&mut StartTimes) -> &mut Option<f64>) {
        let now = monotonic();
        let took = (now - self.step_started_at).as_secs_f64();
        self.step_started_at = now;
        self.times.send_modify(|times| *step(times) = Some(took));
    }
}
