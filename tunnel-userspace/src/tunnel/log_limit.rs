//! A rate limit for log messages that a peer can provoke. Each message is logged once per interval, and there
//! is a limit on all messages of one kind. A logged message includes how many messages were suppressed.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

/// The minimum interval between two log messages with the same kind, subject and cause.
const INTERVAL: Duration = Duration::from_secs(30);
/// The maximum number of different messages to keep track of.
const MAX_TRACKED: usize = 4096;
/// The maximum number of messages of one kind per [`WINDOW`].
const MAX_PER_WINDOW: u32 = 5;
const WINDOW: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Logged {
    at: Instant,
    suppressed: u64,
}

/// The messages of one kind in the current window.
#[derive(Debug)]
struct Window {
    since: Instant,
    logged: u32,
    suppressed: u64,
}

/// The times of recent log messages.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    state: Mutex<State>,
    hasher: RandomState,
}

#[derive(Debug, Default)]
struct State {
    messages: HashMap<(&'static str, Arc<str>, u64), Logged>,
    windows: HashMap<&'static str, Window>,
}

impl LogLimit {
    /// Returns the number of messages suppressed since the last logged one, or `None` if this message must be
    /// suppressed, too. `kind` is one of a few constants. Messages with the same subject and different causes
    /// don't suppress each other.
    pub(super) fn may_log(
        &self,
        kind: &'static str,
        subject: &Arc<str>,
        cause: &str,
    ) -> Option<u64> {
        let now = Instant::now();
        let key = (kind, Arc::clone(subject), self.hasher.hash_one(cause));
        let state = &mut *self.state.lock();
        if state.messages.len() >= MAX_TRACKED {
            let is_recent = |logged: &Logged| now.duration_since(logged.at) < INTERVAL;
            state.messages.retain(|_, logged| is_recent(logged));
        }
        let is_full = state.messages.len() >= MAX_TRACKED;
        let window = state
            .windows
            .entry(kind)
            .or_insert_with(|| Window::new(now));
        if let Some(last) = state.messages.get_mut(&key) {
            if now.duration_since(last.at) < INTERVAL {
                last.suppressed += 1;
                return None;
            }
            let suppressed = window.take(now)?;
            last.at = now;
            return Some(suppressed + std::mem::take(&mut last.suppressed));
        }
        if is_full {
            window.suppressed += 1;
            return None;
        }
        let suppressed = window.take(now)?;
        let (at, none) = (now, 0);
        state.messages.insert(
            key,
            Logged {
                at,
                suppressed: none,
            },
        );
        Some(suppressed)
    }
}

impl Window {
    const fn new(since: Instant) -> Self {
        Self {
            since,
            logged: 0,
            suppressed: 0,
        }
    }

    /// Takes a message from the window, or counts it as suppressed. Returns the number of messages that were
    /// suppressed since the last logged one.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.since) >= WINDOW {
            (self.since, self.logged) = (now, 0);
        }
        if self.logged >= MAX_PER_WINDOW {
            self.suppressed += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_message_is_logged_once_per_interval_with_the_number_suppressed() {
        let (limit, node) = (LogLimit::default(), Arc::from("edge-7"));
        let may_log = |cause| limit.may_log("dial_refused", &node, cause);

        assert_eq!(may_log("a"), Some(0));
        assert_eq!(may_log("a"), None);
        assert_eq!(may_log("a"), None);
        assert_eq!(may_log("b"), Some(0), "another cause");
        assert_eq!(limit.may_log("draining", &node, "a"), Some(0));

        tokio::time::advance(INTERVAL).await;
        assert_eq!(may_log("a"), Some(2));
        assert_eq!(may_log("a"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn all_messages_of_a_kind_are_limited() {
        let limit = LogLimit::default();
        let may_log = |number: u32| limit.may_log("failed", &Arc::from(number.to_string()), "");
        let logged = (0..1000).filter(|number| may_log(*number).is_some());
        assert_eq!(logged.count(), 5);
        assert_eq!(limit.may_log("other", &Arc::from("1"), ""), Some(0));

        tokio::time::advance(WINDOW).await;
        assert_eq!(may_log(1000), Some(995));
        assert_eq!(may_log(1001), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_tracked_messages_is_bounded() {
        let limit = LogLimit::default();
        for window in 0..MAX_TRACKED {
            // Only a logged message is tracked.
            for node in 0..MAX_PER_WINDOW {
                let subject = Arc::from(format!("{window} {node}"));
                limit.may_log(Box::leak(window.to_string().into_boxed_str()), &subject, "");
            }
        }

        assert_eq!(limit.state.lock().messages.len(), MAX_TRACKED);
        tokio::time::advance(INTERVAL).await;
        assert!(limit.may_log("new", &Arc::from("new"), "").is_some());
    }
}
