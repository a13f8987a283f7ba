//! How long the steps of a start take.

use std::time::Duration;

use tokio::sync::watch;

use crate::{admin::StartTimes, clock::monotonic};

/// A step of the start.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    Load,
    Read,
    Write,
    Attach,
}

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

    /// A step ends, and the next one begins.
    pub(super) fn done(&mut self, step: Step) {
        let now = monotonic();
        let took = Some(now.saturating_sub(self.since).as_secs_f64());
        self.since = now;
        self.times.send_modify(|times| match step {
            Step::Load => times.load = took,
            Step::Read => times.read = took,
            Step::Write => times.write = took,
            Step::Attach => times.attach = took,
        });
    }
}
