//! The registry of sessions, grouped by node. The gateway adds sessions, the ingress opens streams on them,
//! and both record errors.

mod draining;
mod node_error;
mod node_warnings;
mod revocation;
mod shared_certificate;

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{debug, info, warn};
use tunnel_common::reason::Reason;

use self::{node_error::NodeError, node_warnings::NodeWarnings};
use super::{
    TrafficView,
    client_shares::{Client, ClientPermit, ClientShares, ClientView, ShareExceeded, StreamLimits},
    gateway_session::{Session, StreamPermit},
    log_limit::LogLimit,
    peer_certificates::PeerCertificates,
    reason_counts::ReasonCounts,
    session_token::SessionToken,
};
use crate::{
    identity::clock,
    model::{ObjectWarning, SteeringTarget, SteeringTargets},
};

/// The maximum number of sessions per node. It leaves room for broken sessions that the gateway has not
/// detected yet.
const MAX_PER_NODE: usize = 32;
/// The maximum number of a node's sessions from one address, so that a stolen certificate that is used from
/// elsewhere leaves room for the node's agent.
pub(super) const MAX_PER_SOURCE: usize = 16;
/// The time for which an error is shown.
const ERROR_LIFETIME: SignedDuration = SignedDuration::from_hours(1);

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
    /// The last error, either from connecting to the node or from one of its sessions, if it is less than an
    /// hour old.
    pub last_error: Option<String>,
    /// The time of the last error.
    pub last_error_at: Option<Timestamp>,
    /// The clients that hold the most streams on the node.
    pub clients: Vec<ClientView>,
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
    /// The boot ID of the agent's machine; empty if the agent sent none.
    pub boot: String,
    /// The time when the agent's certificate expires.
    pub certificate_expires: Timestamp,
    /// The name of the CA that has issued the agent's certificate.
    #[serde(default)]
    pub certificate_issuer: String,
    /// The difference between the agent's clock and the gateway's when the session began, in seconds. Positive if the
    /// agent's is ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_skew_seconds: Option<f64>,
    /// The session's traffic counters.
    #[serde(flatten)]
    pub traffic: TrafficView,
}

impl SessionView {
    /// Returns the difference between the clocks, in seconds, if it must be reported.
    #[must_use]
    pub fn large_clock_skew(&self) -> Option<f64> {
        clock::large_skew(self.clock_skew_seconds)
    }

    /// Returns what identifies the machine at the other end.
    fn machine(&self) -> (&str, IpAddr) {
        (&self.boot, self.peer.ip())
    }
}

/// The registry of sessions, grouped by node, with reason counters and log rate limits. It also keeps nodes
/// that had a session earlier, and nodes that a client has failed to connect to.
#[derive(Debug, Default)]
pub struct Sessions {
    nodes: Mutex<BTreeMap<Arc<str>, Node>>,
    count: AtomicUsize,
    next: AtomicU64,
    counts: ReasonCounts,
    /// The streams that the ingress's clients hold.
    clients: Arc<ClientShares>,
    /// The rate limit for messages about nodes. Other messages have a separate one, so that a flood of them
    /// does not suppress messages about nodes.
    node_log_limit: LogLimit,
    other_log_limit: LogLimit,
    /// The rate limit for messages about connected and disconnected agents.
    event_log_limit: LogLimit,
    warnings: NodeWarnings,
}

#[derive(Debug, Default)]
struct Node {
    sessions: Vec<Arc<Session>>,
    last_seen: Option<Timestamp>,
    last_error: Option<(NodeError, Timestamp)>,
    /// The cause for which the gateway has refused or ended the node's last session.
    revoked: Option<String>,
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
                last_error: node.recent_error(now).map(|(it, _)| it.describe(node, now)),
                last_error_at: node.recent_error(now).map(|(_, at)| *at),
                clients: self.clients.of_node(name),
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

    /// Returns an error that names the limit if a node can't have another session from this address.
    pub(super) fn check_room(
        &self,
        node: &str,
        source: IpAddr,
        max: usize,
    ) -> Result<(), SessionLimit> {
        if self.len() >= max {
            return Err(SessionLimit::All(max));
        }
        let nodes = self.nodes.lock();
        nodes
            .get(node)
            .map_or(Ok(()), |node| node.check_room(source))
    }

    /// Adds a session, on which streams can then be opened. Returns an error if there is no room for it.
    pub(super) fn insert(&self, session: Session, max: usize) -> Result<(), SessionLimit> {
        let mut nodes = self.nodes.lock();
        if self.len() >= max {
            return Err(SessionLimit::All(max));
        }
        let node = nodes.entry(Arc::clone(&session.node)).or_default();
        node.check_room(session.initial_view.peer.ip().to_canonical())?;
        (node.last_error, node.revoked) = (None, None);
        node.sessions.push(Arc::new(session));
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Renews earlier sessions of a node with the certificates of a new one. Returns the tokens of those that it found.
    pub(super) fn renew(
        &self,
        node: &str,
        tokens: Vec<SessionToken>,
        by: &PeerCertificates,
    ) -> Vec<SessionToken> {
        let nodes = self.nodes.lock();
        let sessions = nodes.get(node).map(|node| node.sessions.as_slice());
        let sessions = sessions.unwrap_or_default();
        let renew = |token: &SessionToken| {
            let earlier = sessions.iter().find(|session| session.token.is(token));
            earlier.is_some_and(|session| {
                session.certificates.renew(by);
                true
            })
        };
        tokens.into_iter().filter(renew).collect()
    }

    /// Returns a receiver for the warnings about nodes.
    #[must_use]
    pub fn warnings(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.warnings.subscribe()
    }

    /// Reports that two machines use a node's certificate, if the node has had sessions with both for longer
    /// than a reboot may explain. Drops the warnings about the node that no longer apply.
    pub(super) fn report_shared_certificate(&self, name: &Arc<str>) {
        let mut nodes = self.nodes.lock();
        let now = Timestamp::now();
        self.warnings.expire(name, Reason::SessionLimit, now);
        let Some(node) = nodes.get_mut(name) else {
            return;
        };
        let views = node.sessions.iter().map(|session| &session.initial_view);
        let Some(text) = shared_certificate::describe(&views.collect::<Vec<_>>(), now) else {
            self.warnings.remove(name, Reason::CertificateShared);
            return;
        };
        self.warnings
            .add(name, Reason::CertificateShared, text.clone(), now);
        node.last_error = Some((NodeError::Ended(text.clone()), now));
        drop(nodes);
        self.report_problem(name, Reason::CertificateShared, &text);
    }

    /// Removes a session. `error` is the cause if the session ended unexpectedly.
    pub(super) fn remove(&self, name: &Arc<str>, id: u64, error: Option<String>) {
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(name) else {
            return;
        };
        node.sessions.retain(|session| session.id != id);
        if node.sessions.is_empty() {
            self.warnings.remove(name, Reason::CertificateShared);
            self.warnings.remove(name, Reason::SessionLimit);
            self.warnings.remove(name, Reason::CertificateNotRenewed);
        }
        node.last_seen = Some(Timestamp::now());
        if let Some(error) = error {
            node.last_error = Some((NodeError::Ended(error), Timestamp::now()));
        }
        self.count.fetch_sub(1, Ordering::AcqRel);
    }

    /// Admits a client's new connection to the ingress. `limit` is the ingress's limit on clients.
    pub(super) fn admit(
        &self,
        client: Client,
        limit: usize,
    ) -> Result<ClientPermit, ShareExceeded> {
        self.clients.admit(client, limit)
    }

    /// Takes a client's right to one stream on a node.
    pub(super) fn take_share(
        &self,
        permit: &mut ClientPermit,
        node: &Arc<str>,
        is_memory_scarce: bool,
    ) -> Result<(), ShareExceeded> {
        let nodes = self.nodes.lock();
        let sessions = nodes.get(node).map(|node| node.sessions.iter());
        let limits = sessions
            .into_iter()
            .flatten()
            .map(|session| session.max_streams());
        let limit: u32 = limits.sum();
        drop(nodes);
        // Without a session, another check refuses the client.
        let of_node = usize::try_from(limit).unwrap_or(usize::MAX).max(1);
        let limits = StreamLimits {
            of_node,
            is_memory_scarce,
        };
        permit.take_stream(node, limits)
    }

    /// Takes a permit to open a stream on the least loaded of a node's sessions.
    pub(super) fn take_permit(&self, node: &Arc<str>) -> Result<StreamPermit, Reason> {
        self.take_permit_among(node, |_| true)
    }

    /// Takes a permit to open a stream on a session of the same node with another machine.
    pub(super) fn take_permit_elsewhere(&self, session: &Session) -> Option<StreamPermit> {
        let machine = session.initial_view.machine();
        let is_elsewhere = |other: &Session| other.initial_view.machine() != machine;
        self.take_permit_among(&session.node, is_elsewhere).ok()
    }

    fn take_permit_among(
        &self,
        node: &Arc<str>,
        is_candidate: impl Fn(&Session) -> bool,
    ) -> Result<StreamPermit, Reason> {
        let mut sessions = self.nodes.lock().get(node).map_or_else(Vec::new, |node| {
            let open = node.sessions.iter();
            let open = open.filter(|session| session.is_open() && is_candidate(session));
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
        let now = Timestamp::now();
        let text = error.describe(node, now);
        node.last_error = Some((error, now));
        drop(nodes);
        let (node, reason) = (&target.node, reason.label());
        if let Some(suppressed) = self.node_log_limit.may_log(reason, node, "") {
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
        let cause = error.to_string();
        if let Some(suppressed) = self.other_log_limit.may_log(label, subject, &cause) {
            warn!(%subject, reason = label, suppressed, %error, "{meaning}");
        } else {
            debug!(%subject, reason = label, %error, "{meaning}");
        }
    }

    /// Logs that an agent has connected or disconnected. There may be thousands of such messages.
    pub(super) fn log_event(
        &self,
        event: &'static str,
        node: &Arc<str>,
        session: &SessionView,
        detail: &str,
    ) {
        let (peer, session) = (session.peer, &session.name);
        let logged = self.event_log_limit.may_log(event, node, &peer.to_string());
        if let Some(suppressed) = logged {
            info!(%node, %peer, session, detail, suppressed, "agent {event}");
        } else {
            debug!(%node, %peer, session, detail, "agent {event}");
        }
    }
}

/// A limit on sessions that has been reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum SessionLimit {
    #[error("the gateway has {0} sessions (tunnel.gateway.maxSessions)")]
    All(usize),
    #[error("the node has {MAX_PER_NODE} sessions")]
    Node,
    #[error("the node has {MAX_PER_SOURCE} sessions from this address")]
    Source,
}

impl Node {
    fn check_room(&self, source: IpAddr) -> Result<(), SessionLimit> {
        let is_same = |it: &&Arc<Session>| it.initial_view.peer.ip().to_canonical() == source;
        if self.sessions.len() >= MAX_PER_NODE {
            Err(SessionLimit::Node)
        } else if self.sessions.iter().filter(is_same).count() >= MAX_PER_SOURCE {
            Err(SessionLimit::Source)
        } else {
            Ok(())
        }
    }

    fn recent_error(&self, now: Timestamp) -> Option<&(NodeError, Timestamp)> {
        let is_recent =
            |(_, at): &&(NodeError, Timestamp)| now.duration_since(*at) < ERROR_LIFETIME;
        self.last_error.as_ref().filter(is_recent)
    }

    fn last_alive(&self, now: Timestamp) -> Option<Timestamp> {
        if self.sessions.is_empty() {
            self.last_seen
        } else {
            Some(now)
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
            is_disputed: false,
        }
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
