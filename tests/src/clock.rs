//! Real time, for measurements and for pacing loads. No other module reads the clock.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "measurements and paced loads need real time"
)]

use std::time::Duration;

/// A point in real time.
pub type Instant = std::time::Instant;

/// Sleeps in real time. Used only between the attempts of a paced load and between checks of a condition.
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}
