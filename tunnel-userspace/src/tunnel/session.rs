//! The gateway's end of a session.

use std::{
    cmp::Reverse,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::client::SendRequest;
use http::{Request, StatusCode};
use tokio::{io::Interest, net::TcpStream, runtime::Handle, sync::watch, time::Instant};
use tracing::debug;
use tunnel_common::reason::Reason;

use super::{
    code::{End, code_of, reason_of_error, refusal},
    copy::Stream,
    link::{Traffic, TrafficView},
    opener::{Opener, Pending},
    sessions::SessionView,
    target::{LOOPBACK, TARGET},
    threads::Seat,
};
use crate::model::Target;

/// How long an agent may take to answer; longer than it gives its dial.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a stream may wait to be opened.
const OPENED: Duration = Duration::from_secs(2);
/// A pace is measured over at least this long.
const PACE: Duration = Duration::from_millis(250);
/// Paces that differ by less than this many bytes a second count as one.
const PACE_STEP: u64 = 64 << 10;

/// What carries the streams of a session.
#[derive(Debug)]
pub(super) struct Carried {
    pub(super) sender: SendRequest<Bytes>,
    /// The most streams, of this end's setting.
    pub(super) streams: u32,
    /// Where it runs, and its streams with it.
    pub(super) seat: Seat,
}

/// A session with an agent.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) node: Arc<str>,
    /// Its view as it was after the handshake.
    pub(super) facts: SessionView,
    pub(super) carried: Carried,
    pub(super) traffic: Arc<Traffic>,
    pub(super) pace: Mutex<Pace>,
    /// Says when its streams have to end, and why.
    pub(super) stop: watch::Receiver<Option<Reason>>,
}

impl Session {
    /// How little it is to be preferred: whether it may be dead, then how busy it is, by bytes and
    /// by streams, then its age.
    pub(super) fn load(&self) -> (bool, u64, u32, Reverse<u64>) {
        let TrafficView {
            bytes_in,
            bytes_out,
            streams,
            ..
        } = self.traffic.view();
        let total = bytes_in.saturating_add(bytes_out);
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        (
            self.traffic.is_suspect(),
            pace.at(Instant::now(), total) / PACE_STEP,
            streams,
            Reverse(self.id),
        )
    }

    pub(super) fn view(&self) -> SessionView {
        SessionView {
            traffic: self.traffic.view(),
            ..self.facts.clone()
        }
    }
}

impl Opener for Session {
    fn is_open(&self) -> bool {
        let mut sender = self.carried.sender.clone();
        let ready = sender.poll_ready(&mut Context::from_waker(Waker::noop()));
        !matches!(ready, Poll::Ready(Err(_)))
    }

    fn take_slot(&self) -> bool {
        // One of those that the agent takes is the hello.
        let of_agent = self
            .carried
            .sender
            .current_max_send_streams()
            .saturating_sub(1);
        let most = u32::try_from(of_agent).unwrap_or(u32::MAX);
        self.traffic.take_place(most.min(self.carried.streams))
    }

    fn free_slot(&self) {
        self.traffic.free_place();
    }

    fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn runtime(&self) -> &Handle {
        self.carried.seat.runtime()
    }

    fn stopped(&self) -> Pending<'static, Reason> {
        let mut stop = self.stop.clone();
        Box::pin(async move {
            let reason = stop.wait_for(Option::is_some).await.map(|reason| *reason);
            match reason {
                Ok(Some(reason)) => reason,
                // The session is over. What came before its end is still to be copied; if the end
                // of the stream was not among it, the stream itself says so.
                Ok(None) | Err(_) => std::future::pending().await,
            }
        })
    }

    fn open<'a>(
        &'a self,
        target: &'a Target,
        first: Bytes,
        client: &'a TcpStream,
    ) -> Pending<'a, Result<Stream, Reason>> {
        Box::pin(self.connect(target, first, client))
    }
}

impl Session {
    /// Sends the CONNECT of a stream and waits for the answer.
    async fn connect(
        &self,
        target: &Target,
        first: Bytes,
        client: &TcpStream,
    ) -> Result<Stream, Reason> {
        let request = request(target)?;
        let lost = |error: h2::Error| reason_of_error(&error, End::Target);
        let mut sender = self.carried.sender.clone();
        let (answer, mut send) = sender.send_request(request, false).map_err(lost)?;
        if !first.is_empty() {
            self.traffic.count_sent(first.len());
            // A refusal may be here before them: then the stream has ended, and the answer tells why.
            if let Err(error) = send.send_data(first, false) {
                debug!(%error, "the agent answered before the client's first bytes went");
            }
        }
        let answered = tokio::select! {
            answered = tokio::time::timeout(ANSWER, answer) => {
                answered.map_err(|_elapsed| Reason::DialTimedOut)
            }
            _ = client.ready(Interest::ERROR) => Err(Reason::ClientReset),
            () = never_opened(&mut sender) => Err(Reason::StreamsFull),
            reason = self.stopped() => Err(reason),
        };
        let answer = match answered {
            Ok(answer) => answer.map_err(lost)?,
            Err(reason) => {
                send.send_reset(code_of(reason));
                return Err(reason);
            }
        };
        if answer.status() != StatusCode::OK {
            return Err(refusal(answer.status(), answer.headers()));
        }
        let recv = answer.into_body();
        let local = End::Client;
        Ok(Stream { send, recv, local })
    }
}

/// Ends if the last request of a sender still waits to be opened after a while: streams that ended
/// here, but whose last bytes the agent doesn't take, still count as open in `h2`.
async fn never_opened(sender: &mut SendRequest<Bytes>) {
    tokio::time::sleep(OPENED).await;
    let waits = poll_fn(|cx| Poll::Ready(sender.poll_ready(cx).is_pending())).await;
    if !waits {
        std::future::pending::<()>().await;
    }
}

fn request(target: &Target) -> Result<Request<()>, Reason> {
    let authority = SocketAddr::new(target.address, target.port).to_string();
    let mut request = Request::connect(authority);
    if target.loopback {
        request = request.header(TARGET, LOOPBACK);
    }
    request
        .body(())
        .map_err(|_error: http::Error| Reason::ProtocolBroken)
}

/// Bytes a second, since it was last looked at.
#[derive(Debug)]
pub(super) struct Pace {
    at: Instant,
    total: u64,
    rate: u64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            at: Instant::now(),
            total: 0,
            rate: 0,
        }
    }

    fn at(&mut self, now: Instant, total: u64) -> u64 {
        let time = now.duration_since(self.at);
        let millis = u64::try_from(time.max(PACE).as_millis()).unwrap_or(u64::MAX);
        let rate = total.saturating_sub(self.total).saturating_mul(1000) / millis;
        if time >= PACE {
            (self.at, self.total, self.rate) = (now, total, rate);
        }
        rate.max(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_what_was_dialled_with_v6_in_brackets() {
        let mut target = Target {
            node: "edge-7".into(),
            address: "fd00::3".parse().expect("an address"),
            port: 10266,
            loopback: true,
        };
        let loopback = request(&target).expect("a request");
        assert_eq!(loopback.uri().to_string(), "[fd00::3]:10266");
        assert_eq!(loopback.headers()[TARGET], LOOPBACK);

        target.loopback = false;
        let plain = request(&target).expect("a request");
        assert!(plain.headers().is_empty());
    }

    #[test]
    fn a_pace_is_that_of_now_and_a_burst_is_seen_at_once() {
        let start = Instant::now();
        let mut pace = Pace::new();
        pace.at = start;
        let second = Duration::from_secs(1);

        assert_eq!(pace.at(start + second, 1000), 1000);
        assert_eq!(
            pace.at(start + second, 1_001_000),
            4_000_000,
            "a burst within the time of one look"
        );
        assert_eq!(pace.at(start + 2 * second, 1_001_000), 1_000_000);
        assert_eq!(pace.at(start + 3 * second, 1_001_000), 0, "silence");
    }
}
