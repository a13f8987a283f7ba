//! A time limit for streams on which no byte moves.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep};

/// The number of checks within the time limit.
const CHECKS: u32 = 4;

/// Checks a stream's byte count at intervals. A stream that moves bytes therefore neither reads the clock nor sets a
/// timer. An idle stream is noticed between the limit and a quarter more.
pub(super) struct IdleTimer {
    next_check: Pin<Box<Sleep>>,
    interval: Duration,
    last_count: u64,
    idle_checks: u32,
}

impl IdleTimer {
    /// Creates a timer, unless the limit is zero, which means that there is none.
    pub(super) fn new(limit: Duration) -> Option<Self> {
        if limit.is_zero() {
            return None;
        }
        let interval = limit / CHECKS;
        Some(Self {
            next_check: Box::pin(sleep(interval)),
            interval,
            last_count: 0,
            idle_checks: 0,
        })
    }

    /// Waits until the stream has been idle for the limit. `count` is the number of bytes that the stream has moved.
    pub(super) fn poll(&mut self, count: u64, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.next_check.as_mut().poll(cx));
            if count == self.last_count {
                self.idle_checks += 1;
            } else {
                (self.last_count, self.idle_checks) = (count, 0);
            }
            if self.idle_checks >= CHECKS {
                return Poll::Ready(());
            }
            self.next_check
                .as_mut()
                .reset(Instant::now() + self.interval);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::timeout;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn expires_within(timer: &mut IdleTimer, count: u64, time: Duration) -> bool {
        timeout(time, poll_fn(|cx| timer.poll(count, cx)))
            .await
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_stream_that_has_been_idle_for_the_limit_expires() {
        let mut timer = IdleTimer::new(8 * SECOND).expect("a timer");
        for count in 1..20 {
            assert!(!expires_within(&mut timer, count, 7 * SECOND).await);
        }
        let start = Instant::now();
        assert!(expires_within(&mut timer, 19, 60 * SECOND).await);
        let total = 7 * SECOND + start.elapsed();
        assert!((8 * SECOND..=10 * SECOND).contains(&total), "{total:?}");

        assert!(IdleTimer::new(Duration::ZERO).is_none());
    }
}
