//! A rate limit for repeated log messages: one per interval, with the number of suppressed repetitions.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_common::reason::Reason;

/// The minimum interval between two log messages with the same subject and reason.
const EVERY: Duration = Duration::from_secs(30);
/// The maximum number of pairs of subject and reason that are tracked.
const MOST: usize = 4096;

#[derive(Debug)]
struct Said {
    at: Instant,
    kept_back: u64,
}

/// The time of the last log message, by subject and reason.
#[derive(Debug, Default)]
pub(super) struct LogLimit {
    said: Mutex<HashMap<(Arc<str>, Reason), Said>>,
}

impl LogLimit {
    /// Returns the number of messages suppressed since the last logged one, or none if this message must be
    /// suppressed, too.
    pub(super) fn may_log(&self, whom: &Arc<str>, reason: Reason) -> Option<u64> {
        let now = Instant::now();
        let mut said = self.said.lock();
        if said.len() >= MOST {
            said.retain(|_, said| now.duration_since(said.at) < EVERY);
        }
        let key = (Arc::clone(whom), reason);
        if let Some(last) = said.get_mut(&key) {
            if now.duration_since(last.at) < EVERY {
                last.kept_back += 1;
                return None;
            }
            last.at = now;
            return Some(std::mem::take(&mut last.kept_back));
        }
        if said.len() >= MOST {
            return None;
        }
        let (at, kept_back) = (now, 0);
        said.insert(key, Said { at, kept_back });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thing_is_said_once_and_then_counted_for_a_while() {
        let (limit, node) = (LogLimit::default(), Arc::from("edge-7"));

        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), Some(0));
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
        assert_eq!(limit.may_log(&node, Reason::DialRefused), Some(0));

        tokio::time::advance(EVERY).await;
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), Some(2));
        assert_eq!(limit.may_log(&node, Reason::AgentNotConnected), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let limit = LogLimit::default();
        for node in 0..2 * MOST {
            limit.may_log(&Arc::from(node.to_string()), Reason::DialRefused);
        }

        assert_eq!(limit.said.lock().len(), MOST);
        tokio::time::advance(EVERY).await;
        assert!(
            limit
                .may_log(&Arc::from("new"), Reason::DialRefused)
                .is_some()
        );
    }
}
