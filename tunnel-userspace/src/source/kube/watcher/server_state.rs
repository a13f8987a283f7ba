//! Keeps track of the backoff between requests and of the last version seen in the server's data.

use tokio::time::{Duration, Instant};

/// The backoff after the first failure. It doubles with each further failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(250);

/// The failure count and the last version seen, across all lists and watches of one kind.
#[derive(Debug)]
pub(super) struct ServerState {
    max_backoff: Duration,
    /// The time for which older lists are rejected.
    max_lag: Duration,
    failures: u32,
    /// The last version seen; `None` if it was not a number. Since Kubernetes 1.35, versions are guaranteed
    /// to be comparable numbers.
    last_version: Option<u64>,
    /// The time of the first list in the current series of lists older than `last_version`.
    older_since: Option<Instant>,
}

impl ServerState {
    pub(super) const fn new(max_backoff: Duration, lag: Duration) -> Self {
        Self {
            max_backoff,
            max_lag: lag,
            failures: 0,
            last_version: None,
            older_since: None,
        }
    }

    /// Returns true if a version is older than the last version seen.
    pub(super) fn is_older(&self, version: &str) -> bool {
        let version = version.parse::<u64>().ok();
        version
            .zip(self.last_version)
            .is_some_and(|(version, seen)| version < seen)
    }

    /// Returns true if a list with this version must be rejected because it may contain objects that have
    /// since been deleted. A lagging server will catch up. One that doesn't was restored from a backup, so
    /// its lists are accepted after some time.
    pub(super) fn is_behind(&mut self, version: &str) -> bool {
        if !self.is_older(version) {
            return false;
        }
        let since = *self.older_since.get_or_insert_with(Instant::now);
        since.elapsed() < self.max_lag
    }

    /// Records the version of an accepted list. Returns the last version seen before it, if that one was
    /// newer.
    pub(super) fn record_list(&mut self, version: &str) -> Option<u64> {
        let ahead = self.last_version.filter(|_| self.is_older(version));
        self.last_version = version.parse().ok();
        self.older_since = None;
        ahead
    }

    /// Records the version of a watch event. Returns true if it is newer than all versions seen before.
    pub(super) fn record_event(&mut self, version: &str) -> bool {
        let version = version.parse().ok();
        let is_ahead = version.is_none() || version > self.last_version;
        self.last_version = self.last_version.max(version);
        is_ahead
    }

    /// Returns the last version seen, or 0 if there is none.
    pub(super) fn last_version(&self) -> u64 {
        self.last_version.unwrap_or(0)
    }

    /// Resets the backoff after a success.
    pub(super) const fn reset_backoff(&mut self) {
        self.failures = 0;
    }

    /// Returns how many backoffs there have been since the last success.
    pub(super) const fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns the next backoff, which is twice the previous one. Half of it is random, so that nodes do not
    /// all retry at the same time.
    pub(super) fn next_backoff(&mut self) -> Duration {
        let full = FIRST_BACKOFF * (1 << self.failures.min(16));
        let full = full.min(self.max_backoff);
        self.failures += 1;
        full.mul_f64(fastrand::f64().mul_add(0.5, 0.5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> ServerState {
        ServerState::new(Duration::from_secs(30), Duration::from_secs(60))
    }

    #[tokio::test(start_paused = true)]
    async fn older_lists_are_accepted_after_the_maximum_lag() {
        let mut server = server();
        assert_eq!(server.record_list("700"), None);
        assert!(server.record_event("710"));
        assert!(!server.record_event("705"));

        assert!(server.is_behind("709"));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(server.is_behind("600"));
        // A newer list in between restarts the clock.
        assert!(!server.is_behind("710"));
        assert_eq!(server.record_list("710"), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(server.is_behind("600"));
        tokio::time::advance(Duration::from_secs(60)).await;

        assert!(!server.is_behind("600"));
        assert_eq!(server.record_list("600"), Some(710));
        assert!(!server.is_behind("601"));
    }

    #[test]
    fn versions_that_are_not_numbers_are_not_compared() {
        let mut server = server();
        assert_eq!(server.record_list("700"), None);

        assert!(!server.is_behind("a"));
        assert_eq!(server.record_list("a"), None);
        assert!(server.record_event("b"));
        assert!(!server.is_behind("1"));
    }
}
