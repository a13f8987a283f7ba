//! Keepalive pings, which detect when a session's connection is dead.

use std::time::Duration;

use futures_util::future::poll_fn;
use h2::{Ping, PingPong};
use tokio::time::{Instant, sleep, timeout};

use super::{SessionLimits, socket::Meter, traffic::Traffic};

/// The number of checks for received bytes within a ping's time limit.
const CHECKS_PER_TIMEOUT: u32 = 8;

/// Sends pings, and returns once the peer stops answering. Any received byte counts as an answer, since a
/// pong may be queued behind a lot of data. A dead connection delivers nothing at all.
pub(super) async fn wait_for_silence(
    ping: Option<PingPong>,
    meter: &Meter,
    traffic: &Traffic,
    limits: &SessionLimits,
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
        let is_alive = is_answered(&mut ping, meter, traffic, limits.ping_timeout).await;
        traffic.set_suspect(!is_alive);
        if !is_alive {
            return;
        }
        traffic.set_rtt(sent.elapsed());
    }
}

async fn is_answered(
    ping: &mut PingPong,
    meter: &Meter,
    traffic: &Traffic,
    limit: Duration,
) -> bool {
    let (mut received, mut at) = (meter.received(), Instant::now());
    loop {
        let pong = poll_fn(|cx| ping.poll_pong(cx));
        if let Ok(pong) = timeout(limit / CHECKS_PER_TIMEOUT, pong).await {
            return pong.is_ok();
        }
        let now = meter.received();
        traffic.set_suspect(now == received);
        if now != received {
            (received, at) = (now, Instant::now());
        } else if at.elapsed() >= limit {
            return false;
        }
    }
}
