//! Which nodes have sessions.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::{
    quiet::Quiet,
    session::{Place, Session},
};
use crate::model::Target;

/// How many sessions a node may have: those of its settings, and those that a bad link broke and
/// nobody noticed yet.
const OF_NODE: usize = 32;

/// What the gateway knows of a node.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The name of the Node.
    pub node: String,
    /// Its live sessions, oldest first.
    pub sessions: Vec<SessionView>,
    /// When a session of it was last alive.
    pub last_seen: Option<Timestamp>,
    /// What last went wrong with it.
    pub last_error: Option<String>,
}

/// A session with an agent.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionView {
    /// The name that the agent gave it.
    pub name: String,
    /// Where the agent dialled from.
    pub peer: SocketAddr,
    /// Since when.
    pub since: Timestamp,
    /// The release of the agent.
    pub release: String,
    /// When the agent's certificate expires.
    pub certificate_expires: Timestamp,
    /// The time of the last ping and its answer.
    pub rtt_seconds: Option<f64>,
    /// Streams that are open.
    pub streams: u32,
    /// Bytes of streams that came from the agent.
    pub bytes_in: u64,
    /// Bytes of streams that went to the agent.
    pub bytes_out: u64,
}

/// Every node that has, had or was asked for a session; shared by the gateway and the ingress.
#[derive(Default)]
pub struct Registry {
    nodes: Mutex<BTreeMap<Arc<str>, Node>>,
    sessions: AtomicUsize,
    next: AtomicU64,
    counts: Counts,
    /// What was said of nodes, and of others: who floods with these keeps no word back of those.
    quiet: Quiet,
    quiet_of_others: Quiet,
}

#[derive(Default)]
struct Node {
    sessions: Vec<Arc<Session>>,
    last_seen: Option<Timestamp>,
    last_error: Option<Trouble>,
}

/// What last went wrong with a node.
enum Trouble {
    /// A connect to this was refused or broken off.
    Refused(Target, Reason),
    /// A session ended for this.
    Ended(String),
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sessions = self.sessions.load(Ordering::Relaxed);
        f.debug_struct("Registry")
            .field("sessions", &sessions)
            .finish_non_exhaustive()
    }
}

impl Registry {
    /// Nobody is connected.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Every node, by name.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeView> {
        let view = |(name, node): (&Arc<str>, &Node)| NodeView {
            node: name.to_string(),
            sessions: node.sessions.iter().map(|session| session.view()).collect(),
            last_seen: node.seen(),
            last_error: node.trouble(),
        };
        self.lock().iter().map(view).collect()
    }

    /// How often each reason came up.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Reason, u64> {
        self.counts.all()
    }

    pub(super) fn count(&self, reason: Reason) {
        self.counts.count(reason);
    }

    /// How many sessions there are.
    pub(super) fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Acquire)
    }

    /// A number that no other session has.
    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// From here on the session may be picked; unless there are `most` in all already, or of its
    /// node as many as one node may have.
    pub(super) fn insert(&self, session: Arc<Session>, most: usize) -> bool {
        let name = Arc::clone(&session.facts.node);
        let mut nodes = self.lock();
        let node = nodes.entry(name).or_default();
        if self.sessions() >= most || node.sessions.len() >= OF_NODE {
            return false;
        }
        node.last_error = None;
        node.sessions.push(session);
        self.sessions.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// From here on it is not. `error` says what ended it, if it was not wanted.
    pub(super) fn remove(&self, session: &Session, error: Option<String>) {
        let mut nodes = self.lock();
        let Some(node) = nodes.get_mut(&session.facts.node) else {
            return;
        };
        let before = node.sessions.len();
        node.sessions.retain(|other| other.id != session.id);
        let gone = before - node.sessions.len();
        if gone > 0 {
            node.last_seen = Some(Timestamp::now());
        }
        if error.is_some() {
            node.last_error = error.map(Trouble::Ended);
        }
        self.sessions.fetch_sub(gone, Ordering::AcqRel);
    }

    /// A place in the session of the node that has least to do.
    pub(super) fn place(&self, node: &Arc<str>) -> Result<Place, Reason> {
        let mut sessions: Vec<_> = {
            let nodes = self.lock();
            let sessions = nodes.get(node).map(|node| node.sessions.as_slice());
            let sessions = sessions.unwrap_or_default().iter();
            sessions
                .filter(|session| session.is_open())
                .map(Arc::clone)
                .collect()
        };
        if sessions.is_empty() {
            return Err(Reason::AgentNotConnected);
        }
        sessions.sort_by_key(|session| session.load());
        sessions
            .into_iter()
            .find_map(Session::place)
            .ok_or(Reason::StreamsFull)
    }

    /// A connect to the target was refused or broken off: it is counted, said and remembered.
    pub(super) fn refused(&self, target: &Target, reason: Reason) {
        self.count(reason);
        let mut nodes = self.lock();
        let node = nodes.entry(Arc::clone(&target.node)).or_default();
        let text = explain(target, reason, node.seen(), Timestamp::now());
        node.last_error = Some(Trouble::Refused(target.clone(), reason));
        drop(nodes);
        if let Some(kept_back) = self.quiet.may_say(&target.node, reason) {
            let (node, reason) = (&target.node, reason.label());
            warn!(%node, reason, kept_back, "{text}");
        }
    }

    /// Something is wrong that has to do with no target.
    pub(super) fn unwell(&self, whom: &Arc<str>, reason: Reason, error: &dyn fmt::Display) {
        self.count(reason);
        if let Some(kept_back) = self.quiet_of_others.may_say(whom, reason) {
            let reason_label = reason.label();
            warn!(%whom, reason = reason_label, kept_back, %error, "{}", reason.meaning());
        } else {
            tracing::debug!(%whom, reason = reason.label(), %error, "{}", reason.meaning());
        }
    }

    /// Says that a session began.
    pub(super) fn say_connected(session: &Session) {
        let facts = &session.facts;
        info!(node = %facts.node, peer = %facts.peer, release = facts.release, session = facts.name, "agent connected");
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// What last went wrong, as it is now: the time since an agent was seen goes on.
    fn trouble(&self) -> Option<String> {
        Some(match self.last_error.as_ref()? {
            Trouble::Refused(target, reason) => {
                explain(target, *reason, self.seen(), Timestamp::now())
            }
            Trouble::Ended(text) => text.clone(),
        })
    }

    fn seen(&self) -> Option<Timestamp> {
        if self.sessions.is_empty() {
            self.last_seen
        } else {
            Some(Timestamp::now())
        }
    }
}

/// What is said of a refusal, wherever it is said.
fn explain(target: &Target, reason: Reason, seen: Option<Timestamp>, now: Timestamp) -> String {
    if reason != Reason::AgentNotConnected {
        return format!("{target}: {}", reason.meaning());
    }
    match seen {
        Some(seen) => {
            let ago = now.duration_since(seen).as_secs().max(0);
            format!("{target}: agent not connected, last seen {ago} s ago")
        }
        None => format!("{target}: agent not connected, never seen"),
    }
}

/// How often each reason came up.
#[derive(Debug)]
pub(super) struct Counts([AtomicU64; Reason::ALL.len()]);

impl Default for Counts {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counts {
    pub(super) fn count(&self, reason: Reason) {
        let place = Reason::ALL.iter().zip(&self.0).find(|(r, _)| **r == reason);
        if let Some((_, count)) = place {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Those that came up.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        let counts = Reason::ALL.into_iter().zip(&self.0);
        counts
            .map(|(reason, count)| (reason, count.load(Ordering::Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target {
            node: "edge-7".into(),
            address: "10.1.2.3".parse().expect("an address"),
            port: 10250,
            loopback: false,
        }
    }

    #[test]
    fn a_refusal_says_who_and_since_when() {
        let seen = Timestamp::UNIX_EPOCH;
        let now = Timestamp::from_second(42).expect("a time");
        let explain = |reason, seen| explain(&target(), reason, seen, now);

        assert_eq!(
            explain(Reason::AgentNotConnected, Some(seen)),
            "edge-7 (10.1.2.3:10250): agent not connected, last seen 42 s ago"
        );
        assert_eq!(
            explain(Reason::AgentNotConnected, None),
            "edge-7 (10.1.2.3:10250): agent not connected, never seen"
        );
        assert_eq!(
            explain(Reason::DialRefused, Some(seen)),
            "edge-7 (10.1.2.3:10250): the target refused the agent's connect"
        );
    }

    #[tokio::test]
    async fn a_node_that_was_never_seen_is_refused_counted_and_remembered() {
        let registry = Registry::new();
        let reason = registry.place(&"edge-7".into()).expect_err("nobody");

        registry.refused(&target(), reason);

        assert_eq!(
            registry.counts(),
            BTreeMap::from([(Reason::AgentNotConnected, 1)])
        );
        let nodes = registry.nodes();
        assert_eq!(nodes.len(), 1);
        assert_eq!(
            nodes[0].last_error.as_deref(),
            Some("edge-7 (10.1.2.3:10250): agent not connected, never seen")
        );
        assert_eq!(nodes[0].last_seen, None);
    }
}
