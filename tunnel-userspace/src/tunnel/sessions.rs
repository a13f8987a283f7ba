//! The registry of sessions, grouped by node. The gateway adds sessions, the ingress opens streams on them,
//! and both record errors.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{debug, warn};
use tunnel_common::reason::Reason;

use super::{
    TrafficView,
    gateway_session::{Session, StreamPermit},
    log_limit::LogLimit,
    reason_counts::ReasonCounts,
};
use crate::model::{SteeringTarget, SteeringTargets};

/// The maximum number of sessions per node. It leaves room for broken sessions that the gateway has not
/// detected yet.
const MAX_PER_NODE: usize = 32;

/// The JSON view of a node, as seen by its gateway.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The name of the Kubernetes Node.
    pub node: String,
    /// The node's open sessions, oldest first.
    pub sessions: Vec<SessionView>,
    /// The time when the node last had an open session.
    pub last_seen: Option<Timestamp>,
    /// The last error, either from connecting to the node or from one of its sessions.
    pub last_error: Option<String>,
}

/// The JSON view of a session with an agent.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionView {
    /// The name that the agent chose for the session.
    pub name: String,
    /// The address and port that the agent connected from.
    pub peer: SocketAddr,
    /// The time when the session began.
    pub since: Timestamp,
    /// The agent's release.
    pub release: String,
    /// The time when the agent's certificate expires.
    pub certificate_expires: Timestamp,
    /// The session's traffic counters.
    #[serde(flatten)]
    pub traffic: TrafficView,
}

/// The registry of sessions, grouped by node, with reason counters and log rate limits. It also keeps nodes
/// that had a session earlier, and nodes that a client has failed to connect to.
#[derive(Debug, Default)]
pub struct Sessions {
    nodes: Mutex<BTreeMap<Arc<str>, Node>>,
    count: AtomicUsize,
    next: AtomicU64,
    counts: ReasonCounts,
    /// The rate limit for messages about nodes. Other messages have a separate one, so that a flood of them
    /// does not suppress messages about nodes.
    node_log_limit: LogLimit,
    other_log_limit: LogLimit,
}

#[derive(Debug, Default)]
struct Node {
    sessions: Vec<Arc<Session>>,
    last_seen: Option<Timestamp>,
    last_error: Option<NodeError>,
}

/// The last error, either from connecting to the node or from one of its sessions.
#[derive(Debug)]
enum NodeError {
    /// A connection to this target was refused or aborted.
    Refused(SteeringTarget, Reason),
    /// A session ended with this error.
    Ended(String),
}

impl Sessions {
    /// Creates an empty registry.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns the nodes in the registry, sorted by name.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeView> {
        self.nodes_with(&SteeringTargets::new())
    }

    /// Returns the nodes in the registry and the nodes of all steered targets, sorted by name.
    #[must_use]
    pub fn nodes_with(&self, steered: &SteeringTargets) -> Vec<NodeView> {
        let unseen = |target: &SteeringTarget| NodeView {
            node: target.node.to_string(),
            ..NodeView::default()
        };
        let steered = steered.values();
        let steered = steered.map(|target| (Arc::clone(&target.node), unseen(target)));
        let mut views: BTreeMap<_, _> = steered.collect();
        let now = Timestamp::now();
        let known = self.nodes.lock();
        views.extend(known.iter().map(|(name, node)| {
            let view = NodeView {
                node: name.to_string(),
                sessions: node.sessions.iter().map(|it| it.view()).collect(),
                last_seen: node.last_alive(now),
                // Formatted only now, because the text contains the time since the agent was last seen.
                last_error: node.last_error.as_ref().map(|it| it.describe(node, now)),
            };
            (Arc::clone(name), view)
        }));
        drop(known);
        views.into_values().collect()
    }

    /// Returns how many times each reason has occurred.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Reason, u64> {
        self.counts.all()
    }

    /// Returns the number of sessions.
    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns a unique ID for a new session.
    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a session, on which streams can then be opened. Returns false if there are already `max`
    /// sessions, or if the session's node already has [`MAX_PER_NODE`].
    pub(super) fn insert(&self, session: Session, max: usize) -> bool {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(Arc::clone(&session.node)).or_default();
        if self.len() >= max || node.sessions.len() >= MAX_PER_NODE {
            return false;
        }
        node.last_error = None;
        node.sessions.push(Arc::new(session));
        self.count.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Removes a session. `error` is the cause if the session ended unexpectedly.
    pub(super) fn remove(&self, node: &Arc<str>, id: u64, error: Option<String>) {
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(node) else {
            return;
        };
        node.sessions.retain(|session| session.id != id);
        node.last_seen = Some(Timestamp::now());
        if let Some(error) = error {
            node.last_error = Some(NodeError::Ended(error));
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Takes a permit to open a stream on the least loaded of a node's sessions.
    pub(super) fn take_permit(&self, node: &Arc<str>) -> Result<StreamPermit, Reason> {
        let mut sessions = self.nodes.lock().get(node).map_or_else(Vec::new, |node| {
            let open = node.sessions.iter().filter(|session| session.is_open());
            open.cloned().collect()
        });
        if sessions.is_empty() {
            return Err(Reason::AgentNotConnected);
        }
        sessions.sort_by_key(|session| session.sort_key());
        let permit = sessions.into_iter().find_map(StreamPermit::take);
        permit.ok_or(Reason::StreamLimit)
    }

    pub(super) fn count(&self, reason: Reason) {
        self.counts.increment(reason);
    }

    /// Counts, records and logs that a connection to a target was refused or aborted.
    pub(super) fn record_refusal(&self, target: &SteeringTarget, reason: Reason) {
        self.count(reason);
        let error = NodeError::Refused(target.clone(), reason);
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(Arc::clone(&target.node)).or_default();
        let text = error.describe(node, Timestamp::now());
        node.last_error = Some(error);
        drop(nodes);
        if let Some(suppressed) = self.node_log_limit.may_log(&target.node, reason) {
            let (node, reason) = (&target.node, reason.label());
            warn!(%node, reason, suppressed, "{text}");
        }
    }

    /// Counts and logs a problem that does not concern a particular target. `subject` is the peer's address,
    /// the node or the listener.
    pub(super) fn report_problem(
        &self,
        subject: &Arc<str>,
        reason: Reason,
        error: &dyn fmt::Display,
    ) {
        self.count(reason);
        let (label, meaning) = (reason.label(), reason.meaning());
        if let Some(suppressed) = self.other_log_limit.may_log(subject, reason) {
            warn!(%subject, reason = label, suppressed, %error, "{meaning}");
        } else {
            debug!(%subject, reason = label, %error, "{meaning}");
        }
    }
}

impl Node {
    fn last_alive(&self, now: Timestamp) -> Option<Timestamp> {
        if self.sessions.is_empty() {
            self.last_seen
        } else {
            Some(now)
        }
    }
}

impl NodeError {
    /// Formats the error for views and logs.
    fn describe(&self, node: &Node, now: Timestamp) -> String {
        match (self, node.last_alive(now)) {
            (Self::Ended(text), _) => text.clone(),
            (Self::Refused(target, Reason::AgentNotConnected), Some(seen)) => {
                let ago = now.duration_since(seen).as_secs().max(0);
                format!("{target}: agent not connected, last seen {ago} s ago")
            }
            (Self::Refused(target, Reason::AgentNotConnected), None) => {
                format!("{target}: agent not connected, never seen")
            }
            (Self::Refused(target, reason), _) => format!("{target}: {}", reason.meaning()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> SteeringTarget {
        SteeringTarget {
            node: "edge-7".into(),
            address: "10.1.2.3".parse().expect("an address"),
            port: 10250,
            loopback: false,
        }
    }

    #[test]
    fn an_error_names_the_target_and_when_its_agent_was_last_seen() {
        let now = Timestamp::from_second(42).expect("a time");
        let text = |reason, last_seen| {
            let node = Node {
                last_seen,
                ..Node::default()
            };
            NodeError::Refused(target(), reason).describe(&node, now)
        };

        assert_eq!(
            text(Reason::AgentNotConnected, Some(Timestamp::UNIX_EPOCH)),
            "edge-7 (10.1.2.3:10250): agent not connected, last seen 42 s ago"
        );
        assert_eq!(
            text(Reason::DialRefused, None),
            "edge-7 (10.1.2.3:10250): the target refused the agent's connect"
        );
    }

    #[tokio::test]
    async fn a_node_that_is_refused_or_steered_and_never_connected_is_listed_once() {
        let sessions = Sessions::new();
        let reason = sessions.take_permit(&"edge-7".into()).expect_err("nobody");
        sessions.record_refusal(&target(), reason);
        let other = |port| SteeringTarget {
            node: "edge-3".into(),
            port,
            ..target()
        };
        let steered = SteeringTargets::from([(1, target()), (2, other(10250)), (3, other(10255))]);

        let nodes = sessions.nodes_with(&steered);

        let summary =
            |node: &NodeView| (node.node.clone(), node.last_seen, node.last_error.clone());
        let error = "edge-7 (10.1.2.3:10250): agent not connected, never seen";
        assert_eq!(
            nodes.iter().map(summary).collect::<Vec<_>>(),
            [
                ("edge-3".to_owned(), None, None),
                ("edge-7".to_owned(), None, Some(error.to_owned())),
            ]
        );
        let counts = BTreeMap::from([(Reason::AgentNotConnected, 1)]);
        assert_eq!(sessions.counts(), counts);
    }
}
