//! Clocks that never jump: the time since boot, and the monotonic clock.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time since boot, including time spent suspended.
#[must_use]
pub fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME)
        .map(Duration::from)
        .unwrap_or_default()
}

/// Returns the monotonic clock's current time, which excludes time spent suspended. The kernel programs use this clock.
#[must_use]
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default()
}
