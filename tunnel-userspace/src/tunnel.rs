//! The tunnel: a connect that was steered here travels as one HTTP/2 stream over the connection that
//! the agent of its edge node dialled, and the agent dials the target.
//!
//! `docs/tunnel-protocol.md` describes what goes over the wire.

pub mod agent;
mod backoff;
mod copy;
mod counts;
mod dial;
mod error_code;
pub mod gateway;
mod handshakes;
mod hello;
mod incoming_interface;
pub mod ingress;
mod link;
mod log_limit;
mod serve;
mod session;
mod sessions;
mod size;
mod socket;
mod target;
#[cfg(test)]
mod tests;
mod threads;
mod view;
mod wire;

use std::time::Duration;

pub use link::TrafficView;
use serde::{Deserialize, Serialize};
pub use sessions::{NodeView, SessionView, Sessions};
pub use view::{AgentView, Board, ConnectionState, ConnectionView};

use crate::duration;

/// The pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The bounds of a session, at either end.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Limits {
    /// The maximum number of streams of a session.
    pub max_streams: u32,
    /// The flow-control window of a stream in bytes: the most that is sent ahead of a slow reader.
    pub stream_window_bytes: u32,
    /// The maximum number of threads that carry sessions; at most one per CPU.
    pub max_threads: usize,
    /// The interval between pings to the other end.
    #[serde(with = "duration")]
    pub ping_interval: Duration,
    /// The time to wait for any sign of life after a ping.
    #[serde(with = "duration")]
    pub ping_timeout: Duration,
    /// The time that open streams have left when this end stops.
    #[serde(with = "duration")]
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_streams: 250,
            stream_window_bytes: 1 << 20,
            max_threads: 4,
            ping_interval: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// The settings that every role of the tunnel shares.
#[derive(Clone, Debug)]
pub struct Common {
    /// Bounds of sessions.
    pub limits: Limits,
    /// The firewall mark (`SO_MARK`) of our own sockets, if one is configured.
    pub mark: Option<u32>,
}

/// An allow-list entry that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not self:PORT, localhost:PORT or ADDRESS:PORT")]
pub struct BadAllowance(String);

/// Parses bytes as every message head that a peer sends: a hello, a CONNECT with its header, and a
/// refusal.
pub(crate) fn read_heads(bytes: &[u8]) {
    hello::read_both(bytes);
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let (first, second) = (parts.next().unwrap_or(bytes), parts.next());
    let value = second.and_then(|value| http::HeaderValue::from_bytes(value).ok());
    let request = http::Request::connect(first);
    let request = value.iter().fold(request, |request, value| {
        request.header(target::TARGET, value)
    });
    let _asked = request.body(()).map(|request| target::Asked::of(&request));
    if let (Ok(status), Some(label)) = (http::StatusCode::from_bytes(first), value) {
        let name = http::HeaderName::from_static(error_code::REASON);
        error_code::refusal(status, &[(name, label)].into_iter().collect());
    }
}
