//! Says a thing once, and then every so often with how many times it came up.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tunnel_common::reason::Reason;

/// How long a thing that was said is only counted.
const EVERY: Duration = Duration::from_secs(30);
/// How many things are told apart.
const MOST: usize = 4096;

#[derive(Debug)]
struct Said {
    at: Instant,
    kept_back: u64,
}

/// What was said of whom.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    said: Mutex<HashMap<(Arc<str>, Reason), Said>>,
}

impl Quiet {
    /// Whether to say it now, and how many times it was not said since the last time.
    pub(super) fn may_say(&self, whom: &Arc<str>, reason: Reason) -> Option<u64> {
        let now = Instant::now();
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() >= MOST {
            said.retain(|_, said| now.duration_since(said.at) < EVERY);
        }
        let is_full = said.len() >= MOST;
        match said.get_mut(&(Arc::clone(whom), reason)) {
            Some(last) if now.duration_since(last.at) < EVERY => {
                last.kept_back += 1;
                None
            }
            Some(last) => {
                last.at = now;
                Some(std::mem::take(&mut last.kept_back))
            }
            None if is_full => None,
            None => {
                let first = Said {
                    at: now,
                    kept_back: 0,
                };
                said.insert((Arc::clone(whom), reason), first);
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thing_is_said_once_and_then_counted_for_a_while() {
        let (quiet, node) = (Quiet::default(), Arc::from("edge-7"));

        assert_eq!(quiet.may_say(&node, Reason::AgentNotConnected), Some(0));
        assert_eq!(quiet.may_say(&node, Reason::AgentNotConnected), None);
        assert_eq!(quiet.may_say(&node, Reason::AgentNotConnected), None);
        assert_eq!(quiet.may_say(&node, Reason::DialRefused), Some(0));

        tokio::time::advance(EVERY).await;
        assert_eq!(quiet.may_say(&node, Reason::AgentNotConnected), Some(2));
        assert_eq!(quiet.may_say(&node, Reason::AgentNotConnected), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let quiet = Quiet::default();
        for node in 0..2 * MOST {
            quiet.may_say(&Arc::from(node.to_string()), Reason::DialRefused);
        }

        assert_eq!(quiet.said.lock().expect("not poisoned").len(), MOST);
        tokio::time::advance(EVERY).await;
        assert!(
            quiet
                .may_say(&Arc::from("new"), Reason::DialRefused)
                .is_some()
        );
    }
}
