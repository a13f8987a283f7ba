//! The gateway's side of a session, which opens streams to the agent.

use std::{
    cmp::Reverse,
    future::pending,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::client::SendRequest;
use http::{Request, StatusCode};
use parking_lot::Mutex;
use tokio::{
    io::Interest,
    net::TcpStream,
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::debug;
use tunnel_common::reason::Reason;

use super::{
    allow_list::{LOOPBACK, TARGET_HEADER},
    copy::TunnelStream,
    error_code::{StreamSide, code_of, reason_of_error, reason_of_refusal},
    http2::{self, ResponseError},
    peer_certificates::PeerCertificates,
    session_threads::ThreadHandle,
    session_token::SessionToken,
    sessions::SessionView,
    traffic::{StreamSlot, Traffic},
};
use crate::model::SteeringTarget;

/// The time limit for the agent's response to a CONNECT request. It exceeds the agent's own time limit for
/// dialling the target.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum time that a stream may wait in `h2` to be opened.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// The minimum interval over which a session's data rate is measured.
const RATE_INTERVAL: Duration = Duration::from_millis(250);
/// The granularity at which sessions' data rates are compared, in bytes per second.
const RATE_STEP: u64 = 64 << 10;

/// A session with an agent.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) node: Arc<str>,
    /// A view of the session, created when its handshake completed.
    pub(super) initial_view: SessionView,
    /// The secret by which the agent's next sessions renew this one.
    pub(super) token: SessionToken,
    /// The certificates by which the agent is trusted.
    pub(super) certificates: PeerCertificates,
    pub(super) sender: SendRequest<Bytes>,
    /// The maximum number of streams, from the gateway's config.
    pub(super) max_streams: u32,
    /// The thread that runs the session and its streams.
    pub(super) thread: ThreadHandle,
    pub(super) traffic: Arc<Traffic>,
    pub(super) rate: Mutex<RateMeter>,
    /// Becomes true once an operator has ended the session.
    pub(super) end: watch::Sender<bool>,
    /// The reason for which the session's streams must be reset, once they must.
    pub(super) stop: watch::Receiver<Option<Reason>>,
    /// See [`SessionLimits::idle_timeout`](super::SessionLimits::idle_timeout).
    pub(super) idle_timeout: Duration,
}

impl Session {
    /// Returns the sort key for choosing a session; the smallest key wins. A session that may be dead loses
    /// to any other. Otherwise the lower data rate wins, then the smaller number of streams, then the newer
    /// session.
    pub(super) fn sort_key(&self) -> (bool, u64, u32, Reverse<u64>) {
        let view = self.traffic.view();
        let rate = self
            .rate
            .lock()
            .measure(Instant::now(), view.bytes_in + view.bytes_out);
        (
            self.traffic.is_suspect(),
            rate / RATE_STEP,
            view.streams,
            Reverse(self.id),
        )
    }

    pub(super) fn view(&self) -> SessionView {
        let mut view = self.initial_view.clone();
        view.traffic = self.traffic.view();
        if let Some(agent) = &self.certificates.current().agent {
            view.certificate_expires = agent.expires;
            view.certificate_issuer.clone_from(&agent.issuer);
        }
        view
    }

    /// Returns the maximum number of streams: the smaller one of the gateway's and the agent's.
    pub(super) fn max_streams(&self) -> u32 {
        // The hello is one of the streams. The subtraction saturates, since an agent may advertise a maximum
        // of 0.
        let of_agent = self.sender.current_max_send_streams().saturating_sub(1);
        let of_agent = u32::try_from(of_agent).unwrap_or(u32::MAX);
        of_agent.min(self.max_streams)
    }

    /// Returns true if the session accepts new streams: it has not ended, and the agent has not sent GOAWAY.
    pub(super) fn is_open(&self) -> bool {
        let mut sender = self.sender.clone();
        let ready = sender.poll_ready(&mut Context::from_waker(Waker::noop()));
        !matches!(ready, Poll::Ready(Err(_)))
    }

    /// Waits until the session's streams must be reset, and returns the reason.
    pub(super) async fn stopped(&self) -> Reason {
        let mut stop = self.stop.clone();
        let reason = stop.wait_for(Option::is_some).await;
        match reason.ok().and_then(|reason| *reason) {
            Some(reason) => reason,
            // The sender was dropped, so the session has ended. Bytes that were received earlier must still
            // be copied. A stream that is incomplete will return an error.
            None => pending().await,
        }
    }

    /// Opens a stream: sends the CONNECT request and the client's first bytes, then waits for the response.
    pub(super) async fn open(
        &self,
        target: &SteeringTarget,
        first: Bytes,
        client: &TcpStream,
    ) -> Result<TunnelStream, NotOpened> {
        let request = request(target)?;
        let lost = |error: h2::Error| reason_of_error(&error, StreamSide::Target);
        let mut sender = self.sender.clone();
        let sent = sender.send_request(request, false);
        let (answer, mut send) = sent.map_err(|error| NotOpened {
            reason: lost(error),
            is_sent: false,
        })?;
        if !first.is_empty() {
            self.traffic.count_sent(first.len());
            // This fails if a refusal has already arrived. The response then contains the reason.
            if let Err(error) = send.send_data(first, false) {
                debug!(%error, "the stream was refused before the client's first bytes were sent");
            }
        }
        let answered = tokio::select! {
            answered = timeout(ANSWER_TIMEOUT, http2::response(answer)) => answered.map_err(|_elapsed| Reason::DialTimedOut),
            _ = client.ready(Interest::ERROR) => Err(Reason::ClientReset),
            () = never_opened(&mut sender) => Err(Reason::StreamLimit),
            reason = self.stopped() => Err(reason),
        };
        let answer = match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(ResponseError::Lost(error))) => return Err(lost(error).into()),
            Ok(Err(error @ ResponseError::Interim(_))) => {
                debug!(node = %self.node, %error, "the stream is reset");
                send.send_reset(code_of(Reason::ProtocolError));
                return Err(Reason::ProtocolError.into());
            }
            Err(reason) => {
                send.send_reset(code_of(reason));
                return Err(reason.into());
            }
        };
        if answer.status() != StatusCode::OK {
            return Err(reason_of_refusal(answer.status(), answer.headers()).into());
        }
        let recv = answer.into_body();
        let side = StreamSide::Client;
        Ok(TunnelStream { send, recv, side })
    }
}

/// The reason why a stream was not opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotOpened {
    pub(super) reason: Reason,
    /// False if the agent has certainly got nothing, not even the client's first bytes.
    pub(super) is_sent: bool,
}

impl From<Reason> for NotOpened {
    fn from(reason: Reason) -> Self {
        Self {
            reason,
            is_sent: true,
        }
    }
}

/// A permit to open one stream on a session.
#[derive(Debug)]
pub(super) struct StreamPermit {
    pub(super) session: Arc<Session>,
    _slot: StreamSlot,
}

impl StreamPermit {
    /// Takes a permit, unless the session already has its maximum number of streams.
    pub(super) fn take(session: Arc<Session>) -> Option<Self> {
        let slot = session.traffic.take_slot(session.max_streams())?;
        Some(Self {
            session,
            _slot: slot,
        })
    }
}

/// Waits for [`OPEN_TIMEOUT`], then returns only if `h2` has not opened a stream for the sender's last
/// request. `h2` counts a stream as open until the agent has taken its last bytes, even if the gateway has
/// already ended it.
async fn never_opened(sender: &mut SendRequest<Bytes>) {
    sleep(OPEN_TIMEOUT).await;
    if poll_fn(|cx| Poll::Ready(sender.poll_ready(cx).is_ready())).await {
        pending().await
    }
}

fn request(target: &SteeringTarget) -> Result<Request<()>, Reason> {
    let authority = SocketAddr::new(target.address, target.port).to_string();
    let mut request = Request::connect(authority);
    if target.loopback {
        request = request.header(TARGET_HEADER, LOOPBACK);
    }
    request
        .body(())
        .map_err(|_error: http::Error| Reason::ProtocolError)
}

/// A meter for a data rate, in bytes per second.
#[derive(Debug)]
pub(super) struct RateMeter {
    at: Instant,
    total: u64,
    rate: u64,
}

impl RateMeter {
    pub(super) fn new() -> Self {
        Self {
            at: Instant::now(),
            total: 0,
            rate: 0,
        }
    }

    fn measure(&mut self, now: Instant, total: u64) -> u64 {
        let time = now.duration_since(self.at);
        let millis = u64::try_from(time.max(RATE_INTERVAL).as_millis()).unwrap_or(u64::MAX);
        // The subtraction saturates, since another thread may already have recorded a later total.
        let rate = total.saturating_sub(self.total) * 1000 / millis;
        if time >= RATE_INTERVAL {
            (self.at, self.total, self.rate) = (now, total, rate);
        }
        rate.max(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connect_request_has_the_dialled_address_with_ipv6_in_brackets() {
        let mut target = SteeringTarget {
            node: "edge-7".into(),
            address: "fd00::3".parse().expect("an address"),
            port: 10266,
            loopback: true,
            is_disputed: false,
        };
        let loopback = request(&target).expect("a request");
        assert_eq!(loopback.uri().to_string(), "[fd00::3]:10266");
        assert_eq!(loopback.headers()[TARGET_HEADER], LOOPBACK);

        target.loopback = false;
        let plain = request(&target).expect("a request");
        assert!(plain.headers().is_empty());
    }

    #[test]
    fn a_rate_is_current_and_shows_a_burst_at_once() {
        let start = Instant::now();
        let mut rate = RateMeter::new();
        rate.at = start;
        let second = Duration::from_secs(1);

        assert_eq!(rate.measure(start + second, 1000), 1000);
        assert_eq!(
            rate.measure(start + second, 1_001_000),
            4_000_000,
            "a burst within one interval"
        );
        assert_eq!(rate.measure(start + 2 * second, 1_001_000), 1_000_000);
        assert_eq!(rate.measure(start + 3 * second, 1_001_000), 0, "silence");
    }
}
