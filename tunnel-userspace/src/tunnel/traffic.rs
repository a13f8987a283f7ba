//! The traffic counters of a session.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

/// The interval between checks for open streams.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

use super::memory_budget::{MemoryBudget, SessionMemory};

/// The traffic counters of a session.
#[derive(Debug)]
pub(super) struct Traffic {
    /// The number of open streams.
    streams: AtomicU32,
    /// The number of stream bytes received from the peer.
    received: AtomicU64,
    /// The number of stream bytes sent to the peer.
    sent: AtomicU64,
    /// True while the answer to a ping is overdue and nothing else is received.
    suspect: AtomicBool,
    /// The round-trip time of the last answered ping, in microseconds; 0 if none has been answered yet.
    rtt: AtomicU64,
    /// The bytes that the streams buffer.
    memory: Arc<SessionMemory>,
}

/// The JSON view of a session's traffic.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrafficView {
    /// The round-trip time of the last answered ping, in seconds, if there is one.
    pub rtt_seconds: Option<f64>,
    /// True if the peer may be dead: the answer to a ping is overdue, and nothing else is received.
    pub suspect: bool,
    /// The number of open streams.
    pub streams: u32,
    /// The number of stream bytes received from the peer.
    pub bytes_in: u64,
    /// The number of stream bytes sent to the peer.
    pub bytes_out: u64,
}

impl Traffic {
    /// Creates the counters of a session. Its streams count the bytes that they buffer in `budget`.
    pub(super) fn new(budget: &Arc<MemoryBudget>) -> Arc<Self> {
        Arc::new(Self {
            streams: AtomicU32::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            suspect: AtomicBool::new(false),
            rtt: AtomicU64::new(0),
            memory: Arc::new(SessionMemory::new(Arc::clone(budget))),
        })
    }

    /// Returns the counter of the bytes that the session's streams buffer.
    pub(super) const fn memory(&self) -> &Arc<SessionMemory> {
        &self.memory
    }

    pub(super) fn view(&self) -> TrafficView {
        let rtt = Duration::from_micros(self.rtt.load(Ordering::Relaxed));
        TrafficView {
            rtt_seconds: (!rtt.is_zero()).then_some(rtt.as_secs_f64()),
            suspect: self.is_suspect(),
            streams: self.streams(),
            bytes_in: self.received.load(Ordering::Relaxed),
            bytes_out: self.sent.load(Ordering::Relaxed),
        }
    }

    pub(super) fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    /// Waits until no stream is open.
    pub(super) async fn without_streams(&self) {
        while self.streams() > 0 {
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns true if the connection may be dead: the answer to a ping is overdue, and nothing else is
    /// received.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// Counts received bytes, and returns their number.
    pub(super) fn count_received(&self, bytes: usize) -> u64 {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.received.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Counts sent bytes, and returns their number.
    pub(super) fn count_sent(&self, bytes: usize) -> u64 {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Takes a slot for a stream, if fewer than `max` streams are open.
    pub(super) fn take_slot(self: &Arc<Self>, max: u32) -> Option<StreamSlot> {
        let take = |streams: u32| (streams < max).then(|| streams + 1);
        self.streams
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .is_ok()
            .then(|| StreamSlot(Arc::clone(self)))
    }

    pub(super) fn set_suspect(&self, suspect: bool) {
        self.suspect.store(suspect, Ordering::Relaxed);
    }

    pub(super) fn set_rtt(&self, rtt: Duration) {
        let micros = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX).max(1);
        self.rtt.store(micros, Ordering::Relaxed);
    }
}

/// A slot for one stream, released on drop.
#[derive(Debug)]
pub(super) struct StreamSlot(Arc<Traffic>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}
