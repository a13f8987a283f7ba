//! Sessions that the gateway refuses or ends although the agent's certificate is valid.

use std::sync::Arc;

use jiff::Timestamp;

use super::{NodeError, Sessions};

impl Sessions {
    /// Ends all sessions of a node, and returns how many there were. The node's agent may connect again.
    pub fn end(&self, node: &str) -> usize {
        let nodes = self.nodes.lock();
        let sessions = nodes.get(node).map(|node| node.sessions.as_slice());
        let sessions = sessions.unwrap_or_default();
        for session in sessions {
            session.end.send_replace(true);
        }
        sessions.len()
    }

    /// Records the cause for which the gateway has refused or ended a node's session.
    pub(in crate::tunnel) fn record_revocation(&self, node: &Arc<str>, cause: &str) {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(Arc::clone(node)).or_default();
        node.revoked = Some(cause.to_owned());
        node.last_error = Some((NodeError::Ended(cause.to_owned()), Timestamp::now()));
    }
}
