//! The delay before a gateway is dialled again.

use std::time::Duration;

/// The upper bound of the first delay.
const FIRST: Duration = Duration::from_millis(500);
/// The upper bound of every delay.
const LONGEST: Duration = Duration::from_secs(30);
/// A connection that was up for this long resets the failure count. A connection that a gateway accepts
/// and then closes at once is always shorter.
const SETTLED: Duration = Duration::from_secs(10);

/// An exponential backoff, by the number of consecutive failures.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the failure count if the connection was up for at least [`SETTLED`].
    pub(super) fn lived(&mut self, time: Duration) {
        if time >= SETTLED {
            self.failures = 0;
        }
    }

    /// Returns the next delay, with full jitter, so that agents that lost their gateway together don't
    /// reconnect together. `chance` is a random number from 0 to 1.
    pub(super) fn pause(&mut self, chance: f64) -> Duration {
        let most = (FIRST * (1 << self.failures)).min(LONGEST);
        self.failures = (self.failures + 1).min(16);
        most.mul_f64(chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_half_a_minute() {
        let mut backoff = Backoff::default();

        let pauses: Vec<_> = (0..9).map(|_| backoff.pause(1.0).as_millis()).collect();

        assert_eq!(
            pauses,
            [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]
        );
        for _ in 0..100 {
            assert_eq!(backoff.pause(1.0), LONGEST);
        }
        assert_eq!(backoff.pause(0.0), Duration::ZERO);
    }

    #[test]
    fn only_a_connection_that_settled_starts_them_anew() {
        let mut backoff = Backoff::default();
        for _ in 0..9 {
            backoff.pause(1.0);
        }

        backoff.lived(Duration::from_secs(9));
        assert_eq!(backoff.pause(1.0), LONGEST);

        backoff.lived(SETTLED);
        assert_eq!(backoff.pause(1.0), FIRST);
    }
}
