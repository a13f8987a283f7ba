//! The tunnel: a connect that was steered here travels as one HTTP/2 stream over the connection that
//! the agent of its edge node dialled, and the agent dials the target.
//!
//! `docs/tunnel-protocol.md` describes what goes over the wire.

pub mod agent;
mod arrival;
mod backoff;
mod code;
mod copy;
mod counts;
mod dial;
pub mod gateway;
mod handshakes;
mod hello;
pub mod ingress;
mod link;
mod opener;
mod quiet;
mod registry;
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
pub use registry::Registry;
pub use sessions::{NodeView, SessionView};
pub use view::{AgentView, Board, ConnectionState, ConnectionView};

/// Bounds of a session, on either end.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How many streams a session may carry.
    pub streams: u32,
    /// How many bytes of a stream may be under way to an end that doesn't take them.
    pub window: u32,
    /// How often the other end is asked for a sign of life.
    pub ping_every: Duration,
    /// How long it may take to give one.
    pub ping_timeout: Duration,
    /// How long streams may go on once this end is about to stop.
    pub drain: Duration,
}

/// An entry of the allow-list is none.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not self:PORT, localhost:PORT or ADDRESS:PORT")]
pub struct BadAllowance(String);
