//! The delay before a gateway is redialled.

use std::time::Duration;

/// The upper bound for the first delay.
const FIRST: Duration = Duration::from_millis(500);
/// The upper bound for all delays.
const MAX: Duration = Duration::from_secs(30);
/// A connection that has been up for this long resets the failure count. A connection that the gateway
/// accepts and then closes immediately never lasts this long.
const MIN_UPTIME: Duration = Duration::from_secs(10);

/// An exponential backoff, based on the number of consecutive failures.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the failure count if the connection was up for at least [`MIN_UPTIME`].
    pub(super) fn record_uptime(&mut self, time: Duration) {
        if time >= MIN_UPTIME {
            self.failures = 0;
        }
    }

    /// Returns the next delay, with full jitter, so that agents that lost their gateway at the same time
    /// don't all reconnect at the same time. `chance` is a random number between 0 and 1.
    pub(super) fn next_delay(&mut self, chance: f64) -> Duration {
        let max = (FIRST * (1 << self.failures)).min(MAX);
        self.failures = (self.failures + 1).min(16);
        max.mul_f64(chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_half_a_minute() {
        let mut backoff = Backoff::default();

        let delays: Vec<_> = (0..9)
            .map(|_| backoff.next_delay(1.0).as_millis())
            .collect();

        assert_eq!(
            delays,
            [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]
        );
        for _ in 0..100 {
            assert_eq!(backoff.next_delay(1.0), MAX);
        }
        assert_eq!(backoff.next_delay(0.0), Duration::ZERO);
    }

    #[test]
    fn only_a_connection_that_stayed_up_resets_the_delay() {
        let mut backoff = Backoff::default();
        for _ in 0..9 {
            backoff.next_delay(1.0);
        }

        backoff.record_uptime(Duration::from_secs(9));
        assert_eq!(backoff.next_delay(1.0), MAX);

        backoff.record_uptime(MIN_UPTIME);
        assert_eq!(backoff.next_delay(1.0), FIRST);
    }
}
