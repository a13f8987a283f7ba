//! What an agent shows of itself.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_common::reason::Reason;

use super::{counts::Counts, link::Traffic};

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
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
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
    /// The time of the last ping and its answer.
    pub rtt_seconds: Option<f64>,
    /// Streams that are open.
    pub streams: u32,
    /// Bytes of streams that came from the gateway.
    pub bytes_in: u64,
    /// Bytes of streams that went to the gateway.
    pub bytes_out: u64,
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

/// The writing end.
#[derive(Debug)]
pub(super) struct Board {
    view: watch::Sender<Arc<AgentView>>,
    pub(super) counts: Counts,
}

impl Board {
    pub(super) fn new(connections: impl Iterator<Item = (String, u8)>) -> Self {
        let connections = connections.map(|(gateway, connection)| ConnectionView {
            gateway,
            connection,
            state: ConnectionState::Connecting,
            since: None,
            last_error: None,
            next_try: None,
            rtt_seconds: None,
            streams: 0,
            bytes_in: 0,
            bytes_out: 0,
        });
        let view = AgentView {
            connections: connections.collect(),
            counts: BTreeMap::new(),
        };
        Self {
            view: watch::Sender::new(Arc::new(view)),
            counts: Counts::default(),
        }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<AgentView>> {
        self.view.subscribe()
    }

    /// Changes what is shown of a connection.
    pub(super) fn change(&self, slot: usize, change: impl FnOnce(&mut ConnectionView)) {
        self.publish(|view| {
            if let Some(connection) = view.connections.get_mut(slot) {
                change(connection);
            }
        });
    }

    /// Shows what the live connections carry now.
    pub(super) fn refresh(&self, live: &[Option<Arc<Traffic>>]) {
        self.publish(|view| {
            for (connection, traffic) in view.connections.iter_mut().zip(live) {
                let Some(traffic) = traffic else { continue };
                connection.rtt_seconds = traffic.rtt_seconds();
                connection.streams = traffic.streams();
                connection.bytes_in = traffic.received();
                connection.bytes_out = traffic.sent();
            }
        });
    }

    fn publish(&self, change: impl FnOnce(&mut AgentView)) {
        let counts = self.counts.all();
        self.view.send_if_modified(|view| {
            let mut next = AgentView::clone(view);
            change(&mut next);
            let label = |(reason, count): (Reason, u64)| (reason.label().to_owned(), count);
            next.counts = counts.into_iter().map(label).collect();
            let is_new = next != **view;
            if is_new {
                *view = Arc::new(next);
            }
            is_new
        });
    }
}
