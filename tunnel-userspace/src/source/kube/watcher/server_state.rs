//! The backoff between requests, and the last seen version of the server's data.

use tokio::time::{Duration, Instant};

/// The first backoff after a failure; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(250);

/// The number of failures and the last seen version, over all lists and watches of one kind.
#[derive(Debug)]
pub(super) struct ServerState {
    max_backoff: Duration,
    /// The time for which older lists are refused.
    max_lag: Duration,
    failures: u32,
    /// The last seen version; `None` if it is not a number. Since Kubernetes 1.35, versions are numbers
    /// that may be compared.
    last_version: Option<u64>,
    /// The time of the first of the successive lists that were older than `seen`.
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

    /// Returns true if a version is older than the last seen one.
    pub(super) fn is_older(&self, version: &str) -> bool {
        let version = version.parse::<u64>().ok();
        version
            .zip(self.last_version)
            .is_some_and(|(version, seen)| version < seen)
    }

    /// Returns true if a list of this version must be refused, since deleted objects may be in it. A server
    /// that lags catches up. One that doesn't was restored from a backup, so its lists are accepted after
    /// some time.
    pub(super) fn is_behind(&mut self, version: &str) -> bool {
        if !self.is_older(version) {
            return false;
        }
        let since = *self.older_since.get_or_insert_with(Instant::now);
        since.elapsed() < self.max_lag
    }

    /// Records the version of an accepted list. Returns the last seen version if that is newer.
    pub(super) fn record_list(&mut self, version: &str) -> Option<u64> {
        let ahead = self.last_version.filter(|_| self.is_older(version));
        self.last_version = version.parse().ok();
        self.older_since = None;
        ahead
    }

    /// Records the version of a watch event. Returns true if it is newer than all earlier ones.
    pub(super) fn record_event(&mut self, version: &str) -> bool {
        let version = version.parse().ok();
        let is_ahead = version.is_none() || version > self.last_version;
        self.last_version = self.last_version.max(version);
        is_ahead
    }

    /// Returns the last seen version, or 0.
    pub(super) fn last_version(&self) -> u64 {
        self.last_version.unwrap_or(0)
    }

    /// Resets the backoff after a success.
    pub(super) const fn reset_backoff(&mut self) {
        self.failures = 0;
    }

    /// Returns the number of backoffs since the last success.
    pub(super) const fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns the next backoff: twice the previous one, half of it random, so that not all nodes retry at
    /// once.
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
        // A newer list in between restarts the time.
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
