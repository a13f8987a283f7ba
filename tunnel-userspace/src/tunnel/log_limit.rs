//! A rate limit for repeated log messages: one message per interval, which includes how many repetitions have
//! been suppressed since the previous one.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_common::reason::Reason;

/// The minimum interval between two log messages with the same subject and reason.
const INTERVAL: Duration = Duration::from_secs(30);
/// The maximum number of (subject, reason) pairs to keep track of.
const MAX_TRACKED: usize = 4096;

#[derive(Debug)]
struct Logged {
    at: Instant,
    suppressed: u64,
}

/// The time of the last log message for each subject and reason.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    last_logged: Mutex<HashMap<(Arc<str>, Reason), Logged>>,
}

impl LogLimit {
    /// Returns the number of messages suppressed since the last logged one, or `None` if this message must be
    /// suppressed, too.
    pub(super) fn may_log(&self, subject: &Arc<str>, reason: Reason) -> Option<u64> {
        let now = Instant::now();
        let mut logged = self.last_logged.lock();
        if logged.len() >= MAX_TRACKED {
            logged.retain(|_, logged| now.duration_since(logged.at) < INTERVAL);
        }
        let key = (Arc::clone(subject), reason);
        if let Some(last) = logged.get_mut(&key) {
            if now.duration_since(last.at) < INTERVAL {
                last.suppressed += 1;
                return None;
            }
            last.at = now;
            return Some(std::mem::take(&mut last.suppressed));
        }
        if logged.len() >= MAX_TRACKED {
            return None;
        }
        let (at, suppressed) = (now, 0);
        logged.insert(key, Logged { at, suppressed });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_message_is_logged_once_per_interval_with_the_number_suppressed() {
        let (limit, node) = (LogLimit::default(), Arc::from("edge-7"));

        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), Some(0));
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
        assert_eq!(limit.may_log(&node, Reason::DialRefused), Some(0));

        tokio::time::advance(INTERVAL).await;
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), Some(2));
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_tracked_messages_is_bounded() {
        let limit = LogLimit::default();
        for node in 0..2 * MAX_TRACKED {
            limit.may_log(&Arc::from(node.to_string()), Reason::DialRefused);
        }

        assert_eq!(limit.last_logged.lock().len(), MAX_TRACKED);
        tokio::time::advance(INTERVAL).await;
        assert!(
            limit
                .may_log(&Arc::from("new"), Reason::DialRefused)
                .is_some()
        );
    }
}
