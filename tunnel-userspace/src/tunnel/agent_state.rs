//! The status of an agent and its connections, which the agent's tasks update, and a JSON view of it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::{
    reason_counts::ReasonCounts,
    traffic::{Traffic, TrafficView},
};
use crate::identity::clock;

/// The JSON view of an agent's status.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentView {
    /// The agent's connections: `connectionsPerGateway` of them to each gateway.
    pub connections: Vec<ConnectionView>,
    /// The number of times each reason has occurred, keyed by the reason's label.
    pub counts: BTreeMap<String, u64>,
}

/// The JSON view of a connection to a gateway.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionView {
    /// The gateway, as written in the config.
    pub gateway: String,
    /// The connection's number among those to the same gateway, counting from 0.
    pub connection: u8,
    /// The state of the connection.
    pub state: ConnectionState,
    /// The time when the connection was last established or lost.
    pub since: Option<Timestamp>,
    /// The last error, if there has been one.
    pub last_error: Option<String>,
    /// The time of the next connection attempt, if one is scheduled.
    pub next_try: Option<Timestamp>,
    /// The difference between the gateway's clock and the agent's when the last session began, in seconds. Positive if the
    /// gateway's is ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_skew_seconds: Option<f64>,
    /// The traffic counters of the current or last session. Its streams include those of earlier sessions, which go on after a
    /// renewal or a drain of the gateway.
    #[serde(flatten)]
    pub traffic: TrafficView,
}

impl ConnectionView {
    /// Returns the difference between the clocks, in seconds, if it must be reported.
    #[must_use]
    pub fn large_clock_skew(&self) -> Option<f64> {
        clock::large_skew(self.clock_skew_seconds)
    }
}

/// The state of a connection to a gateway.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnectionState {
    /// A connection attempt is in progress.
    #[default]
    Connecting,
    /// A session is established.
    Connected,
    /// The last attempt or session failed, or the agent has no certificate yet. The next attempt is pending.
    Backoff,
    /// The agent is draining.
    Draining,
}

impl ConnectionState {
    /// All connection states.
    pub const ALL: [Self; 4] = [
        Self::Connecting,
        Self::Connected,
        Self::Backoff,
        Self::Draining,
    ];

    /// Returns the state's label, as it appears in JSON.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Backoff => "backoff",
            Self::Draining => "draining",
        }
    }
}

/// The current status of an agent, updated by the agent's tasks.
#[derive(Debug)]
pub struct AgentState {
    connections: Mutex<Vec<Connection>>,
    pub(super) counts: ReasonCounts,
}

#[derive(Debug)]
struct Connection {
    view: ConnectionView,
    /// The traffic counters of the current or last session.
    traffic: Arc<Traffic>,
    /// Those of earlier sessions that may have open streams.
    earlier: Vec<Weak<Traffic>>,
}

impl Connection {
    fn view(&self) -> ConnectionView {
        let earlier = self.earlier.iter().filter_map(Weak::upgrade);
        let mut traffic = self.traffic.view();
        traffic.streams += earlier.map(|earlier| earlier.streams()).sum::<u32>();
        ConnectionView {
            traffic,
            ..self.view.clone()
        }
    }
}

impl AgentState {
    pub(super) fn new(connections: impl Iterator<Item = (String, u8)>) -> Self {
        let connections = connections.map(|(gateway, connection)| Connection {
            view: ConnectionView {
                gateway,
                connection,
                ..ConnectionView::default()
            },
            // Replaced by the first session's.
            traffic: Traffic::new(&Arc::default()),
            earlier: Vec::new(),
        });
        Self {
            connections: Mutex::new(connections.collect()),
            counts: ReasonCounts::default(),
        }
    }

    /// Returns a view of the current status.
    #[must_use]
    pub fn view(&self) -> AgentView {
        let connections = self.connections.lock();
        let label = |(reason, count): (Reason, u64)| (reason.label().to_owned(), count);
        AgentView {
            connections: connections.iter().map(Connection::view).collect(),
            counts: self.counts.all().into_iter().map(label).collect(),
        }
    }

    /// Updates the state of the connection in the given slot. If `error` is `None`, the last error is kept.
    pub(super) fn set_state(
        &self,
        slot: usize,
        state: ConnectionState,
        next_try: Option<Timestamp>,
        error: Option<String>,
    ) {
        if let Some(Connection { view, .. }) = self.connections.lock().get_mut(slot) {
            let was_connected = view.state == ConnectionState::Connected;
            if was_connected != (state == ConnectionState::Connected) {
                view.since = Some(Timestamp::now());
            }
            (view.state, view.next_try) = (state, next_try);
            view.last_error = error.or_else(|| view.last_error.take());
        }
    }

    /// Makes the view show the traffic of the new session on the connection in the given slot, and the difference between the
    /// clocks of the gateway and the agent.
    pub(super) fn set_session(
        &self,
        slot: usize,
        traffic: Arc<Traffic>,
        skew: Option<SignedDuration>,
    ) {
        if let Some(connection) = self.connections.lock().get_mut(slot) {
            let earlier = Arc::downgrade(&std::mem::replace(&mut connection.traffic, traffic));
            connection.earlier.push(earlier);
            connection.earlier.retain(|it| it.strong_count() > 0);
            connection.view.clock_skew_seconds = skew.map(|skew| skew.as_secs_f64());
        }
    }
}
