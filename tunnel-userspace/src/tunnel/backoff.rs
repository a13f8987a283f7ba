//! The delay before a gateway is redialled.

use std::time::Duration;

use tokio::time::Instant;

/// The upper bound for the first delays.
const FIRST: Duration = Duration::from_millis(500);
/// The number of delays with this bound, during which a gateway that was killed has usually been restarted.
const FIRST_DELAYS: u32 = 3;
/// The upper bound for all delays.
const MAX: Duration = Duration::from_secs(30);
/// A connection that has been up for this long resets the failure count. A connection that the gateway
/// accepts and then closes immediately never lasts this long.
const MIN_UPTIME: Duration = Duration::from_secs(10);
/// A connection must have been up for at least this long to be replaced without delay when its gateway drains.
const MIN_LIFETIME: Duration = Duration::from_secs(1);
/// The time after a gateway has drained during which the next process is expected on the same address.
const RESTART_TIME: Duration = Duration::from_secs(10);
/// The bounds for the delays during [`RESTART_TIME`].
const RESTART_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(250)];

/// An exponential backoff, based on the number of consecutive failures. While a gateway restarts, the delays are
/// short.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    /// The time until which the gateway is expected to restart.
    restarts_until: Option<Instant>,
}

impl Backoff {
    /// Resets the failure count if the connection was up for at least [`MIN_UPTIME`].
    pub(super) fn record_uptime(&mut self, time: Duration) {
        if time >= MIN_UPTIME {
            self.failures = 0;
        }
    }

    /// Records that the gateway has drained, and so is probably being restarted. Returns true if the connection was
    /// up for long enough to be replaced without delay.
    pub(super) fn record_drain(&mut self, uptime: Duration) -> bool {
        // Without this limit, the agent would dial a gateway that drains at once without pause.
        let has_lasted = uptime >= MIN_LIFETIME;
        if has_lasted {
            self.restarts_until = Some(Instant::now() + RESTART_TIME);
        }
        has_lasted
    }

    /// Returns the next delay, with full jitter, so that agents that lost their gateway at the same time
    /// don't all reconnect at the same time. `chance` is a random number between 0 and 1.
    pub(super) fn next_delay(&mut self, chance: f64) -> Duration {
        let chance = chance.clamp(0.0, 1.0);
        if self
            .restarts_until
            .is_some_and(|until| Instant::now() < until)
        {
            let [min, max] = RESTART_DELAYS;
            return min + (max - min).mul_f64(chance);
        }
        let doublings = (self.failures + 1).saturating_sub(FIRST_DELAYS);
        let max = (FIRST * (1 << doublings)).min(MAX);
        self.failures = (self.failures + 1).min(16);
        max.mul_f64(chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_half_a_minute() {
        let mut backoff = Backoff::default();

        let delays: Vec<_> = (0..11)
            .map(|_| backoff.next_delay(1.0).as_millis())
            .collect();

        assert_eq!(
            delays,
            [
                500, 500, 500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000
            ]
        );
        for _ in 0..100 {
            assert_eq!(backoff.next_delay(1.0), MAX);
        }
        assert_eq!(backoff.next_delay(0.0), Duration::ZERO);
    }

    #[test]
    fn only_a_connection_that_stayed_up_resets_the_delay() {
        let mut backoff = Backoff::default();
        for _ in 0..11 {
            backoff.next_delay(1.0);
        }

        backoff.record_uptime(Duration::from_secs(9));
        assert_eq!(backoff.next_delay(1.0), MAX);

        backoff.record_uptime(MIN_UPTIME);
        assert_eq!(backoff.next_delay(1.0), FIRST);
    }

    #[tokio::test(start_paused = true)]
    async fn delays_are_short_while_a_gateway_restarts() {
        let mut backoff = Backoff::default();
        assert!(!backoff.record_drain(Duration::from_millis(900)));
        assert_eq!(backoff.next_delay(1.0), FIRST, "the gateway drains at once");
        backoff.record_uptime(MIN_UPTIME);
        assert!(backoff.record_drain(MIN_LIFETIME));

        let [min, max] = RESTART_DELAYS;
        for _ in 0..100 {
            assert_eq!(backoff.next_delay(1.0), max);
            assert_eq!(backoff.next_delay(0.0), min);
        }
        tokio::time::advance(RESTART_TIME).await;
        assert_eq!(
            backoff.next_delay(1.0),
            FIRST,
            "the attempts were not counted"
        );
    }
}
