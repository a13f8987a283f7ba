//! The pause before a gateway is dialled again.

use std::time::Duration;

/// The upper bound of the first pause.
const FIRST: Duration = Duration::from_millis(500);
/// The upper bound of every pause.
const LONGEST: Duration = Duration::from_secs(30);
/// A connection that lived this long resets the failure count. It is longer than the life of a
/// connection that a gateway accepts and refuses at once.
const SETTLED: Duration = Duration::from_secs(10);

/// The number of consecutive failures.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the failure count if the connection lived for at least [`SETTLED`].
    pub(super) fn lived(&mut self, time: Duration) {
        if time >= SETTLED {
            self.failures = 0;
        }
    }

    /// Returns the next pause: full jitter, so that agents that were cut off together don't reconnect
    /// together. `chance` is from 0 to 1.
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
