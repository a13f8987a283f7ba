//! What an agent shows of itself.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::{
    counts::Counts,
    link::{Traffic, TrafficView},
};

/// What an agent shows of itself.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentView {
    /// Its connections: for each gateway as many as the setting says.
    pub connections: Vec<ConnectionView>,
    /// How often each reason came up, by its label.
    pub counts: BTreeMap<String, u64>,
}

/// A connection to a gateway.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionView {
    /// The gateway, as the settings name it.
    pub gateway: String,
    /// Which of the connections to it, from 0.
    pub connection: u8,
    /// What it is at.
    pub state: ConnectionState,
    /// Since when it is connected, or isn't any more.
    pub since: Option<Timestamp>,
    /// What last went wrong.
    pub last_error: Option<String>,
    /// When it will be tried again.
    pub next_try: Option<Timestamp>,
    /// What its last session carries and carried.
    #[serde(flatten)]
    pub traffic: TrafficView,
}

/// What a connection is at.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnectionState {
    /// It is being made.
    #[default]
    Connecting,
    /// There is a session.
    Connected,
    /// It failed, and waits for its next try.
    Waiting,
    /// The agent is about to stop.
    Draining,
}

impl ConnectionState {
    /// Every one of them.
    pub const ALL: [Self; 4] = [
        Self::Connecting,
        Self::Connected,
        Self::Waiting,
        Self::Draining,
    ];

    /// The word for it, as in JSON.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Waiting => "waiting",
            Self::Draining => "draining",
        }
    }
}

/// What an agent is at, as its parts tell it.
#[derive(Debug)]
pub struct Board {
    connections: Mutex<Vec<Connection>>,
    pub(super) counts: Counts,
}

#[derive(Debug)]
struct Connection {
    view: ConnectionView,
    /// Of its last session.
    traffic: Arc<Traffic>,
}

impl Board {
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
            counts: Counts::default(),
        }
    }

    /// Shows it as it is now.
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

    /// Shows what a connection is at.
    pub(super) fn show(
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

    /// Shows from now on what the new session of a connection carries.
    pub(super) fn carries(&self, slot: usize, traffic: Arc<Traffic>) {
        if let Some(connection) = self.connections.lock().get_mut(slot) {
            connection.traffic = traffic;
        }
    }
}
