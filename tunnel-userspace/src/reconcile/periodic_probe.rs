//! The daemon's test connections while it runs: from time to time, the daemon dials a frontend of its own.

use std::time::Duration;

use tokio::time::Instant;

use super::map_sync::ProbeFrontend;

/// A function that dials the probe's frontend, and describes a failure.
pub type DialProbe = Box<dyn FnMut() -> Result<(), String> + Send>;

/// The frontend to dial from time to time, and the time of the next connection.
pub(super) struct PeriodicProbe {
    pub(super) frontend: ProbeFrontend,
    pub(super) dial: DialProbe,
    every: Duration,
    pub(super) next_at: Instant,
}

impl PeriodicProbe {
    pub(super) fn new(frontend: ProbeFrontend, dial: DialProbe, every: Duration) -> Self {
        Self {
            frontend,
            dial,
            every,
            next_at: Instant::now() + every,
        }
    }

    /// Schedules the next connection: after a failure, it comes sooner.
    pub(super) fn schedule(&mut self, has_failed: bool) {
        let delay = if has_failed {
            self.every / 5
        } else {
            self.every
        };
        self.next_at = Instant::now() + delay;
    }
}
