//! Keepalive pings, which detect when a session's connection is dead.

use std::time::Duration;

use futures_util::future::poll_fn;
use h2::{Ping, PingPong};
use tokio::time::{Instant, sleep, timeout};

use super::{SessionLimits, socket::Meter, traffic::Traffic};

/// The number of checks within a ping's time limit. All of them must find the connection silent, so that a machine
/// that was suspended, or had no CPU time, keeps its sessions: it then finds the limit exceeded before it has read
/// what the peer has sent.
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
    let mut received = meter.received();
    let mut silent_checks = 0;
    while silent_checks < CHECKS_PER_TIMEOUT {
        let pong = poll_fn(|cx| ping.poll_pong(cx));
        if let Ok(pong) = timeout(limit / CHECKS_PER_TIMEOUT, pong).await {
            return pong.is_ok();
        }
        let now = meter.received();
        silent_checks = if now == received {
            silent_checks + 1
        } else {
            0
        };
        traffic.set_suspect(silent_checks > 0);
        received = now;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future as _,
        pin::pin,
        sync::Arc,
        task::{Context, Waker},
    };

    use tokio::time::advance;

    use super::*;
    use crate::tunnel::memory_budget::MemoryBudget;

    #[tokio::test(start_paused = true)]
    async fn a_session_survives_a_pause_of_its_machine_but_not_a_peer_that_is_silent() {
        let (here, _peer) = tokio::io::duplex(1 << 20);
        let (_requests, mut connection) = h2::client::handshake(here)
            .await
            .expect("nothing is awaited from the peer");
        let (meter, traffic) = (
            Meter::default(),
            Traffic::new(&Arc::new(MemoryBudget::default())),
        );
        let limits = SessionLimits::default();
        let ping = connection.ping_pong();
        let mut silence = pin!(wait_for_silence(ping, &meter, &traffic, &limits));
        let mut cx = Context::from_waker(Waker::noop());
        let mut is_silent = || silence.as_mut().poll(&mut cx).is_ready();
        assert!(!is_silent());
        advance(limits.ping_interval).await;
        assert!(!is_silent(), "the ping was sent just now");

        advance(10 * limits.ping_timeout).await;
        assert!(!is_silent(), "the machine was suspended");
        for _ in 2..CHECKS_PER_TIMEOUT {
            advance(limits.ping_timeout / CHECKS_PER_TIMEOUT).await;
            assert!(!is_silent());
        }
        advance(limits.ping_timeout / CHECKS_PER_TIMEOUT).await;
        assert!(is_silent(), "nothing has arrived for the whole time");
    }
}
