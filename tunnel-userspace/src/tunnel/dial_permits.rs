//! Permits for connection attempts to targets. Their number is limited, and no target may take them all.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};

/// The permits for connection attempts that may be in progress at the same time.
#[derive(Debug)]
pub(super) struct DialPermits {
    max: usize,
    /// The number of attempts in progress for each target.
    pending: Mutex<HashMap<SocketAddr, usize>>,
    released: Notify,
}

/// A permit for one connection attempt, released on drop.
#[derive(Debug)]
pub(super) struct DialPermit<'a> {
    permits: &'a DialPermits,
    target: SocketAddr,
}

impl DialPermits {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            pending: Mutex::default(),
            released: Notify::new(),
        }
    }

    /// Waits at most `limit` for a permit to dial `target`.
    pub(super) async fn acquire(
        &self,
        target: SocketAddr,
        limit: Duration,
    ) -> Option<DialPermit<'_>> {
        let acquired = async {
            loop {
                // Created before the check, so that no release in between is missed.
                let released = self.released.notified();
                if let Some(permit) = self.try_acquire(target) {
                    return permit;
                }
                released.await;
            }
        };
        timeout(limit, acquired).await.ok()
    }

    /// Takes a permit unless the target already has half of those that the other targets leave free. One
    /// permit is enough for a target.
    fn try_acquire(&self, target: SocketAddr) -> Option<DialPermit<'_>> {
        let mut pending = self.pending.lock();
        let total: usize = pending.values().sum();
        let own = pending.get(&target).copied().unwrap_or(0);
        let free = self.max.saturating_sub(total - own);
        if own >= free.div_ceil(2) {
            return None;
        }
        pending.insert(target, own + 1);
        Some(DialPermit {
            permits: self,
            target,
        })
    }
}

impl Drop for DialPermit<'_> {
    fn drop(&mut self) {
        let mut pending = self.permits.pending.lock();
        if let Some(own) = pending.get_mut(&self.target) {
            *own -= 1;
            if *own == 0 {
                pending.remove(&self.target);
            }
        }
        drop(pending);
        self.permits.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[test]
    fn a_target_gets_half_of_what_the_others_leave_free() {
        let permits = DialPermits::new(64);
        let take_all = |port| std::iter::from_fn(move || Some(port));
        let mut held = Vec::new();
        let mut take = |port| {
            let taken = take_all(port).map_while(|port| permits.try_acquire(target(port)));
            let before = held.len();
            held.extend(taken);
            held.len() - before
        };

        assert_eq!(
            [1, 2, 3, 4, 5, 6, 7].map(&mut take),
            [32, 16, 8, 4, 2, 1, 1]
        );
        assert_eq!(take(8), 0, "none is left");
        held.clear();
        assert!(permits.pending.lock().is_empty());
        assert!(DialPermits::new(1).try_acquire(target(1)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dial_waits_for_a_permit_and_gives_up_in_time() {
        let permits = DialPermits::new(2);
        let second = Duration::from_secs(1);
        let first = permits.acquire(target(1), second).await.expect("one");

        assert!(permits.acquire(target(1), second).await.is_none());
        let (waited, ()) = tokio::join!(permits.acquire(target(1), second), async {
            tokio::time::sleep(second / 2).await;
            drop(first);
        });
        assert!(waited.is_some());
    }
}
