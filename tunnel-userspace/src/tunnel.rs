//! The tunnel to edge nodes. The ingress accepts steered connections, and forwards each one as an HTTP/2
//! stream over the connection that the node's agent opened to the gateway. The agent then connects to the
//! target.
//!
//! The wire protocol is described in `docs/tunnel-protocol.md`.

mod access;
mod adaptive_read_size;
pub mod agent;
mod agent_session;
mod agent_state;
mod allow_list;
mod backoff;
mod client_rules;
mod client_shares;
mod copy;
mod dial;
mod dial_permits;
mod error_code;
mod forwarded_clients;
mod frame_limit;
pub mod gateway;
mod gateway_session;
mod handshakes;
mod hello;
mod http2;
mod incoming_interface;
pub mod ingress;
mod keepalive;
mod log_limit;
mod memory_budget;
mod missing_nodes;
mod peer_certificates;
mod reason_counts;
mod session_threads;
mod session_token;
mod sessions;
mod socket;
mod stream_window;
#[cfg(test)]
mod tests;
mod traffic;

use std::{sync::Arc, time::Duration};

pub use access::AccessInputs;
pub use agent_state::{AgentState, AgentView, ConnectionState, ConnectionView};
pub use client_rules::{ClientRules, ENTRY_FORM, is_client_entry, is_namespace_entry};
pub use client_shares::ClientView;
pub use forwarded_clients::{FindDialled, ForwardedClients};
use memory_budget::MemoryBudget;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub use sessions::{NodeView, SessionView, Sessions};
pub use traffic::TrafficView;

use crate::duration;

/// The delay before the listener accepts connections again after `accept` has failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The limits and timeouts of a session, which apply to both the gateway and the agent.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SessionLimits {
    /// The maximum number of concurrent streams in a session.
    pub max_streams: u32,
    /// The flow-control window of each stream, in bytes. The sender waits while this many bytes are unread.
    pub stream_window_bytes: u32,
    /// The maximum number of bytes that the streams of all sessions buffer for slow receivers. A session may use
    /// half of what other sessions leave free; beyond that, the windows of its streams shrink.
    pub max_buffered_bytes: usize,
    /// The maximum number of threads that run sessions. At most one thread per CPU is started.
    pub max_threads: usize,
    /// The interval between pings to the peer.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub ping_interval: Duration,
    /// The session is closed if nothing is received from the peer for this long after a ping.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub ping_timeout: Duration,
    /// The time that open streams are given to finish during a drain.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub drain_timeout: Duration,
    /// A stream on which no byte moves in either direction for this long is reset. Zero means that there is no
    /// limit.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub idle_timeout: Duration,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_streams: 250,
            stream_window_bytes: 1 << 20,
            max_buffered_bytes: 64 << 20,
            max_threads: 4,
            ping_interval: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            idle_timeout: Duration::ZERO,
        }
    }
}

/// The settings shared by the gateway, the ingress and the agent.
#[derive(Clone, Debug)]
pub struct CommonSettings {
    /// The limits for each session.
    pub limits: SessionLimits,
    /// The firewall mark (`SO_MARK`) to set on the tunnel's own sockets, if one is configured.
    pub mark: Option<u32>,
    /// The bytes that all streams buffer.
    memory: Arc<MemoryBudget>,
}

impl CommonSettings {
    /// Creates the settings. Copies of them share one limit on buffered bytes.
    #[must_use]
    pub fn new(limits: SessionLimits, mark: Option<u32>) -> Self {
        let memory = Arc::new(MemoryBudget::new(limits.max_buffered_bytes));
        Self {
            limits,
            mark,
            memory,
        }
    }
}

/// The error for an allow-list entry that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not self:PORT, localhost:PORT or ADDRESS:PORT")]
pub struct InvalidAllowedTarget(String);

/// Parses `bytes` as each kind of message that a peer can send: a hello, a CONNECT request with its header,
/// and a refusal. Used by the fuzz target.
pub(crate) fn parse_messages(bytes: &[u8]) {
    hello::parse_both(bytes);
    let mut parts = bytes.splitn(2, |byte| *byte == 0);
    let (first, second) = (parts.next().unwrap_or(bytes), parts.next());
    let value = second.and_then(|value| http::HeaderValue::from_bytes(value).ok());
    let request = http::Request::connect(first);
    let request = value.iter().fold(request, |request, value| {
        request.header(allow_list::TARGET_HEADER, value)
    });
    let _target = request
        .body(())
        .map(|request| allow_list::RequestedTarget::parse(&request));
    if let (Ok(status), Some(label)) = (http::StatusCode::from_bytes(first), value) {
        let name = http::HeaderName::from_static(error_code::REASON_HEADER);
        error_code::reason_of_refusal(status, &[(name, label)].into_iter().collect());
    }
}
