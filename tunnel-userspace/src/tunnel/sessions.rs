//! Which nodes have sessions, and what last went wrong with each.

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
use tunnel_common::reason::Reason;

use super::{
    TrafficView,
    opener::{Opener as _, Permit},
    session::Session,
};
use crate::model::Target;

/// How many sessions a node may have: those of its settings, and those that a bad link broke and
/// nobody noticed yet.
const OF_NODE: usize = 32;

/// What the gateway knows of a node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
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

impl NodeView {
    /// A node that no session was ever seen of.
    pub(super) fn unseen(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            ..Self::default()
        }
    }
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
    /// What it carries and carried.
    #[serde(flatten)]
    pub traffic: TrafficView,
}

/// Every node that has, had or was asked for a session.
#[derive(Default)]
pub(super) struct Sessions {
    nodes: Mutex<BTreeMap<Arc<str>, Node>>,
    count: AtomicUsize,
    next: AtomicU64,
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

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl Sessions {
    /// Returns every node, by name.
    pub(super) fn nodes(&self) -> Vec<NodeView> {
        let view = |(name, node): (&Arc<str>, &Node)| NodeView {
            node: name.to_string(),
            sessions: node.sessions.iter().map(|session| session.view()).collect(),
            last_seen: node.seen(),
            last_error: node.trouble(),
        };
        self.lock().iter().map(view).collect()
    }

    /// Returns how many sessions there are.
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns a number that no other session has.
    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a session, which may be picked from here on; unless there are `most` in all already, or of
    /// its node as many as one node may have.
    pub(super) fn insert(&self, session: Arc<Session>, most: usize) -> bool {
        let name = Arc::clone(&session.node);
        let mut nodes = self.lock();
        let node = nodes.entry(name).or_default();
        if self.count() >= most || node.sessions.len() >= OF_NODE {
            return false;
        }
        node.last_error = None;
        node.sessions.push(session);
        self.count.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Removes a session. `error` says what ended it, if its end was not wanted.
    pub(super) fn remove(&self, session: &Session, error: Option<String>) {
        let mut nodes = self.lock();
        let Some(node) = nodes.get_mut(&session.node) else {
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
        self.count.fetch_sub(gone, Ordering::AcqRel);
    }

    /// Takes a permit for a stream of the session of the node that has least to do.
    pub(super) fn permit(&self, node: &Arc<str>) -> Result<Permit, Reason> {
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
            .find_map(|session| Permit::take(session))
            .ok_or(Reason::StreamsFull)
    }

    /// Notes that a connect to the target was refused or broken off, and returns the text for it.
    pub(super) fn note_refusal(&self, target: &Target, reason: Reason) -> String {
        let mut nodes = self.lock();
        let node = nodes.entry(Arc::clone(&target.node)).or_default();
        node.last_error = Some(Trouble::Refused(target.clone(), reason));
        explain(target, reason, node.seen(), Timestamp::now())
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
}
