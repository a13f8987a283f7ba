//! The clock of measurements and paced loads; nothing else here reads it.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "latencies of real sockets are measured against real time, and an open load is paced by it"
)]

use std::time::Duration;

/// A moment of real time.
pub type Instant = std::time::Instant;

/// Lets real time pass: between two attempts of a paced load, or two looks at a condition.
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}
