//! The clock of measurements and paced loads; no other module reads real time.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "latencies of real sockets are measured against real time, and an open load is paced by it"
)]

use std::time::Duration;

/// A point in real time.
pub type Instant = std::time::Instant;

/// Sleeps in real time: between two attempts of a paced load, or two checks of a condition.
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}
