//! The flow-control window of a session's streams, which is reduced while the session buffers too many bytes.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::{SessionLimits, memory_budget::RECOVERY_INTERVAL, traffic::Traffic};

/// The shortest and longest delay between two attempts to change the window.
const DELAYS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];

/// The window that each stream of a session has.
#[derive(Debug)]
pub(super) struct StreamWindow {
    current: u32,
    full: u32,
    /// True if the peer may not have acknowledged a reduction of the window yet.
    awaits_acknowledgement: bool,
    /// The delay before the next attempt to change the window.
    delay: Option<Duration>,
    /// The time of the next attempt, if the last one failed.
    next_try: Instant,
    may_grow_at: Instant,
}

impl StreamWindow {
    pub(super) fn new(limits: &SessionLimits) -> Self {
        Self {
            current: limits.stream_window_bytes,
            full: limits.stream_window_bytes,
            awaits_acknowledgement: false,
            delay: None,
            next_try: Instant::now(),
            may_grow_at: Instant::now(),
        }
    }

    /// Waits until the window must be set, and returns the new window.
    pub(super) async fn changed(&self, traffic: &Traffic) -> u32 {
        // A point in time, because the caller may call this again and again before it comes.
        sleep_until(self.next_try).await;
        if self.awaits_acknowledgement {
            return self.current;
        }
        traffic
            .memory()
            .window_changed(self.current, self.full, self.may_grow_at)
            .await
    }

    /// Changes the window with `set`, which sends it to the peer.
    ///
    /// `h2` applies a reduced window once the peer has acknowledged it, and refuses another change before. The same
    /// window is therefore set again until that succeeds. Then the streams are woken, which may have to extend
    /// windows that are used up.
    pub(super) fn set(
        &mut self,
        bytes: u32,
        traffic: &Traffic,
        set: impl FnOnce(u32) -> Result<(), h2::Error>,
    ) {
        let [shortest, longest] = DELAYS;
        if set(bytes).is_err() {
            // The connection is gone, or an earlier change has not been acknowledged.
            let delay = self.delay.map_or(shortest, |delay| 2 * delay);
            self.delay = Some(delay.min(longest));
        } else if self.awaits_acknowledgement {
            (self.awaits_acknowledgement, self.delay) = (false, None);
            traffic.memory().update_windows();
        } else {
            debug!(bytes, "changed the window of a session's streams");
            self.awaits_acknowledgement = bytes < self.current;
            self.delay = self.awaits_acknowledgement.then_some(shortest);
            self.current = bytes;
            self.may_grow_at = Instant::now() + RECOVERY_INTERVAL;
        }
        self.next_try = Instant::now() + self.delay.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::timeout;

    use super::*;
    use crate::tunnel::memory_budget::MemoryBudget;

    #[tokio::test(start_paused = true)]
    async fn a_reduced_window_is_set_until_the_peer_has_acknowledged_it() {
        let traffic = Traffic::new(&Arc::new(MemoryBudget::default()));
        let mut window = StreamWindow::new(&SessionLimits::default());
        let pending = |_| Err(h2::Reason::INTERNAL_ERROR.into());

        window.set(65_536, &traffic, |_| Ok(()));
        for _ in 0..20 {
            assert_eq!(window.changed(&traffic).await, 65_536);
            window.set(65_536, &traffic, pending);
        }
        assert_eq!(window.delay, Some(DELAYS[1]));
        window.set(65_536, &traffic, |_| Ok(()));
        assert!(!window.awaits_acknowledgement);

        // The caller may be interrupted as often as it wants.
        window.set(32_768, &traffic, |_| Ok(()));
        window.set(32_768, &traffic, pending);
        for _ in 0..10 {
            let short = timeout(DELAYS[0] / 2, window.changed(&traffic)).await;
            if short.is_ok() {
                break;
            }
        }
        assert!(Instant::now() >= window.next_try);
        window.set(32_768, &traffic, |_| Ok(()));

        // Nothing is buffered, so the window recovers, which streams need not know.
        assert_eq!(window.changed(&traffic).await, 1 << 20);
        window.set(1 << 20, &traffic, pending);
        assert_eq!(window.changed(&traffic).await, 1 << 20, "it is repeated");
        window.set(1 << 20, &traffic, |_| Ok(()));
        assert!(!window.awaits_acknowledgement);
        assert_eq!(window.current, window.full);
    }
}
