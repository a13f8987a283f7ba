//! The delay before a failed scan is retried.

use std::{future::pending, time::Duration};

use tokio::time::sleep;

/// The first delay. Each subsequent delay is twice as long.
const FIRST: Duration = Duration::from_millis(100);
/// The maximum number of retries. After that, there is no scan until another backend is removed.
const MAX_RETRIES: u32 = 8;

/// An exponential backoff, based on the number of failed scans since a backend was last removed.
#[derive(Debug, Default)]
pub(super) struct Retry {
    failures: u32,
}

impl Retry {
    /// Resets the delay, because another backend has been removed.
    pub(super) const fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the delay before the scan is retried, or `None` after a success or too many failures.
    pub(super) fn next_delay(&mut self, has_failed: bool) -> Option<Duration> {
        if !has_failed {
            self.failures = 0;
            return None;
        }
        (self.failures < MAX_RETRIES).then(|| {
            let delay = FIRST * (1 << self.failures);
            self.failures += 1;
            delay
        })
    }
}

/// Waits for the given delay, or forever if there is none.
pub(super) async fn wait(delay: Option<Duration>) {
    match delay {
        Some(delay) => sleep(delay).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_and_retries_end() {
        let mut retry = Retry::default();

        let delays: Vec<_> = (0..9).map(|_| retry.next_delay(true)).collect();

        let millis = |delay: &Option<Duration>| delay.map(|delay| delay.as_millis());
        let delays: Vec<_> = delays.iter().map(millis).collect();
        let expected = [100, 200, 400, 800, 1600, 3200, 6400, 12_800].map(Some);
        assert_eq!(delays[..8], expected);
        assert_eq!(delays[8], None);
    }

    #[test]
    fn a_successful_scan_and_another_removed_backend_reset_the_delay() {
        let mut retry = Retry::default();
        for _ in 0..20 {
            retry.next_delay(true);
        }
        retry.reset();
        assert_eq!(retry.next_delay(true), Some(FIRST));
        assert_eq!(retry.next_delay(false), None);
        assert_eq!(retry.next_delay(true), Some(FIRST));
    }
}
