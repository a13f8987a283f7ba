//! The last error of a node.

use jiff::Timestamp;
use tunnel_common::reason::Reason;

use super::Node;
use crate::model::SteeringTarget;

/// The last error, either from connecting to the node or from one of its sessions.
#[derive(Debug)]
pub(super) enum NodeError {
    /// A connection to this target was refused or aborted.
    Refused(SteeringTarget, Reason),
    /// A session ended with this error.
    Ended(String),
}

impl NodeError {
    /// Formats the error for views and logs.
    pub(super) fn describe(&self, node: &Node, now: Timestamp) -> String {
        let (target, reason) = match self {
            Self::Ended(text) => return text.clone(),
            Self::Refused(target, reason) => (target, *reason),
        };
        if reason != Reason::AgentNotConnected {
            return format!("{target}: {}", reason.meaning());
        }
        let seen = node.last_alive(now).map_or_else(
            || "never seen".to_owned(),
            |seen| {
                let ago = now.duration_since(seen).as_secs().max(0);
                format!("last seen {ago} s ago")
            },
        );
        let cause = node.revoked.as_ref().map(|cause| format!("; {cause}"));
        let cause = cause.unwrap_or_default();
        format!("{target}: agent not connected, {seen}{cause}")
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
}
