//! The monotonic clock that the parts of the daemon share.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Now, on the monotonic clock.
#[must_use]
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default()
}
