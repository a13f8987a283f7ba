//! The delay before a failed scan is repeated.

use std::{future::pending, time::Duration};

use tokio::time::sleep;

/// The first delay; each further one is twice as long.
const FIRST: Duration = Duration::from_millis(100);
/// The maximum number of retries; after that, the next scan is when another backend is removed.
const MOST: u32 = 8;

/// An exponential backoff, by the number of failed scans since a backend was removed.
#[derive(Debug, Default)]
pub(super) struct Retry {
    failures: u32,
}

impl Retry {
    /// Resets the delay, since another backend was removed.
    pub(super) const fn begin_anew(&mut self) {
        self.failures = 0;
    }

    /// Returns the delay before the scan is repeated; none after a success, and after too many failures.
    pub(super) fn after(&mut self, has_failed: bool) -> Option<Duration> {
        if !has_failed {
            self.failures = 0;
            return None;
        }
        (self.failures < MOST).then(|| {
            let pause = FIRST * (1 << self.failures);
            self.failures += 1;
            pause
        })
    }
}

/// Waits for the delay; forever without one.
pub(super) async fn pause(pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_become_rarer_and_end() {
        let mut retry = Retry::default();

        let pauses: Vec<_> = (0..9).map(|_| retry.after(true)).collect();

        let millis = |pause: &Option<Duration>| pause.map(|pause| pause.as_millis());
        let pauses: Vec<_> = pauses.iter().map(millis).collect();
        let expected = [100, 200, 400, 800, 1600, 3200, 6400, 12_800].map(Some);
        assert_eq!(pauses[..8], expected);
        assert_eq!(pauses[8], None);
    }

    #[test]
    fn a_look_that_succeeds_and_another_backend_that_goes_begin_anew() {
        let mut retry = Retry::default();
        for _ in 0..20 {
            retry.after(true);
        }
        retry.begin_anew();
        assert_eq!(retry.after(true), Some(FIRST));
        assert_eq!(retry.after(false), None);
        assert_eq!(retry.after(true), Some(FIRST));
    }
}
