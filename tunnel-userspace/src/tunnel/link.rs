//! The traffic counters of a session, and the pings that detect a dead connection.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::poll_fn;
use h2::{Ping, PingPong};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};

use super::{Limits, socket::Meter};

/// The number of checks for received bytes within the time limit of a ping.
const LOOKS: u32 = 8;

/// The traffic counters of a session.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    /// The number of open streams.
    streams: AtomicU32,
    /// The stream bytes received from the peer.
    received: AtomicU64,
    /// The stream bytes sent to the peer.
    sent: AtomicU64,
    /// True while a ping waits for its answer for unusually long, and nothing else arrives.
    suspect: AtomicBool,
    /// The round-trip time of the last ping, in microseconds; 0 before the first.
    rtt: AtomicU64,
}

/// The JSON view of a session's traffic.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrafficView {
    /// The round-trip time of the last ping, in seconds.
    pub rtt_seconds: Option<f64>,
    /// The number of open streams.
    pub streams: u32,
    /// The stream bytes received from the peer.
    pub bytes_in: u64,
    /// The stream bytes sent to the peer.
    pub bytes_out: u64,
}

impl Traffic {
    pub(super) fn view(&self) -> TrafficView {
        let rtt = Duration::from_micros(self.rtt.load(Ordering::Relaxed));
        TrafficView {
            rtt_seconds: (!rtt.is_zero()).then_some(rtt.as_secs_f64()),
            streams: self.streams(),
            bytes_in: self.received.load(Ordering::Relaxed),
            bytes_out: self.sent.load(Ordering::Relaxed),
        }
    }

    pub(super) fn streams(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    /// Returns true if the connection may be dead: a ping waits for its answer for unusually long, and
    /// nothing else arrives.
    pub(super) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    pub(super) fn count_received(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_sent(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes a slot for a stream, if fewer than `most` streams are open.
    pub(super) fn slot(self: &Arc<Self>, most: u32) -> Option<Slot> {
        let take = |streams: u32| (streams < most).then(|| streams + 1);
        self.streams
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
            .is_ok()
            .then(|| Slot(Arc::clone(self)))
    }

    fn measured(&self, rtt: Duration) {
        let micros = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX).max(1);
        self.rtt.store(micros, Ordering::Relaxed);
    }
}

/// A slot for one stream, released on drop.
#[derive(Debug)]
pub(super) struct Slot(Arc<Traffic>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Sends pings, and returns when the peer does not answer. Any received byte counts as an answer, since a
/// pong may be queued behind a lot of data; a dead connection delivers nothing at all.
pub(super) async fn silence(
    ping: Option<PingPong>,
    meter: &Meter,
    traffic: &Traffic,
    limits: &Limits,
) {
    let Some(mut ping) = ping else {
        return std::future::pending().await;
    };
    loop {
        sleep(limits.ping_interval).await;
        let sent = Instant::now();
        if ping.send_ping(Ping::opaque()).is_err() {
            return;
        }
        let is_alive = answers(&mut ping, meter, traffic, limits.ping_timeout).await;
        traffic.suspect.store(!is_alive, Ordering::Relaxed);
        if !is_alive {
            return;
        }
        traffic.measured(sent.elapsed());
    }
}

async fn answers(ping: &mut PingPong, meter: &Meter, traffic: &Traffic, limit: Duration) -> bool {
    let (mut heard, mut at) = (meter.received(), Instant::now());
    loop {
        let pong = poll_fn(|cx| ping.poll_pong(cx));
        if let Ok(pong) = timeout(limit / LOOKS, pong).await {
            return pong.is_ok();
        }
        let now = meter.received();
        traffic.suspect.store(now == heard, Ordering::Relaxed);
        if now != heard {
            (heard, at) = (now, Instant::now());
        } else if at.elapsed() >= limit {
            return false;
        }
    }
}
