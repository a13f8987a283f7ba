//! The status of an agent and its connections: the record that its tasks update, and its JSON view.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::{
    reason_counts::ReasonCounts,
    traffic::{Traffic, TrafficView},
};

/// The JSON view of an agent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentView {
    /// The connections: `connectionsPerGateway` of them for each gateway.
    pub connections: Vec<ConnectionView>,
    /// The number of occurrences of each reason, by its label.
    pub counts: BTreeMap<String, u64>,
}

/// The JSON view of a connection to a gateway.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionView {
    /// The gateway as configured.
    pub gateway: String,
    /// The number of the connection among those to the same gateway, from 0.
    pub connection: u8,
    /// The state of the connection.
    pub state: ConnectionState,
    /// The time when the connection was last established or lost.
    pub since: Option<Timestamp>,
    /// The last error.
    pub last_error: Option<String>,
    /// The time of the next attempt.
    pub next_try: Option<Timestamp>,
    /// The traffic of the current or last session.
    #[serde(flatten)]
    pub traffic: TrafficView,
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
    /// The last attempt failed, or the agent has no certificate yet; the next attempt is pending.
    Backoff,
    /// The agent is draining.
    Draining,
}

impl ConnectionState {
    /// All states.
    pub const ALL: [Self; 4] = [
        Self::Connecting,
        Self::Connected,
        Self::Backoff,
        Self::Draining,
    ];

    /// Returns the state's label, as in JSON.
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

/// The current status of an agent, which its tasks update.
#[derive(Debug)]
pub struct AgentState {
    connections: Mutex<Vec<Connection>>,
    pub(super) counts: ReasonCounts,
}

#[derive(Debug)]
struct Connection {
    view: ConnectionView,
    /// The traffic of the current or last session.
    traffic: Arc<Traffic>,
}

impl AgentState {
    pub(super) fn new(connections: impl Iterator<Item = (String, u8)>) -> Self {
        let connections = connections.map(|(gateway, connection)| Connection {
            view: ConnectionView {
                gateway,
                connection,
                ..ConnectionView::default()
            },
            traffic: Arc::default(),
        });
        Self {
            connections: Mutex::new(connections.collect()),
            counts: ReasonCounts::default(),
        }
    }

    /// Returns the current view.
    #[must_use]
    pub fn view(&self) -> AgentView {
        let connections = self.connections.lock();
        let view = |connection: &Connection| ConnectionView {
            traffic: connection.traffic.view(),
            ..connection.view.clone()
        };
        let label = |(reason, count): (Reason, u64)| (reason.label().to_owned(), count);
        AgentView {
            connections: connections.iter().map(view).collect(),
            counts: self.counts.all().into_iter().map(label).collect(),
        }
    }

    /// Updates the state of the connection in a slot. Without an error, the last error stays.
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

    /// Shows the traffic counters of a new session of the connection in a slot.
    pub(super) fn set_traffic(&self, slot: usize, traffic: Arc<Traffic>) {
        if let Some(connection) = self.connections.lock().get_mut(slot) {
            connection.traffic = traffic;
        }
    }
}
