//! What the gateway and the ingress share: the sessions of nodes, counts of reasons, and the log's limits.

use std::{collections::BTreeMap, fmt, sync::Arc};

use tracing::{debug, warn};
use tunnel_common::reason::Reason;

use super::{
    counts::Counts,
    quiet::Quiet,
    sessions::{NodeView, Sessions},
};
use crate::model::{Target, Targets};

/// What the gateway and the ingress share.
#[derive(Debug, Default)]
pub struct Registry {
    pub(super) sessions: Sessions,
    counts: Counts,
    /// What was logged of nodes, and of others: a flood of the latter keeps no line back of the former.
    quiet: Quiet,
    quiet_of_others: Quiet,
}

impl Registry {
    /// Nobody is connected.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Every node that has, had or was asked for a session, by name.
    #[must_use]
    pub fn nodes(&self) -> Vec<NodeView> {
        self.sessions.nodes()
    }

    /// These, and the nodes that are steered and never had one.
    #[must_use]
    pub fn nodes_with(&self, steered: &Targets) -> Vec<NodeView> {
        let steered = steered
            .values()
            .map(|target| NodeView::unseen(&target.node));
        let all = steered.chain(self.nodes());
        let by_name: BTreeMap<_, _> = all.map(|node| (node.node.clone(), node)).collect();
        by_name.into_values().collect()
    }

    /// How often each reason came up.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Reason, u64> {
        self.counts.all()
    }

    pub(super) fn count(&self, reason: Reason) {
        self.counts.count(reason);
    }

    /// Counts, notes and logs that a connect to the target was refused or broken off.
    pub(super) fn refused(&self, target: &Target, reason: Reason) {
        self.count(reason);
        let text = self.sessions.note_refusal(target, reason);
        if let Some(kept_back) = self.quiet.may_say(&target.node, reason) {
            let (node, reason) = (&target.node, reason.label());
            warn!(%node, reason, kept_back, "{text}");
        }
    }

    /// Counts and logs a problem that has to do with no target.
    pub(super) fn unwell(&self, whom: &Arc<str>, reason: Reason, error: &dyn fmt::Display) {
        self.count(reason);
        if let Some(kept_back) = self.quiet_of_others.may_say(whom, reason) {
            let reason_label = reason.label();
            warn!(%whom, reason = reason_label, kept_back, %error, "{}", reason.meaning());
        } else {
            debug!(%whom, reason = reason.label(), %error, "{}", reason.meaning());
        }
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

    #[tokio::test]
    async fn a_node_that_was_never_seen_is_refused_counted_and_remembered() {
        let registry = Registry::new();
        let reason = registry
            .sessions
            .permit(&"edge-7".into())
            .expect_err("nobody");

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

    #[tokio::test]
    async fn a_node_that_is_steered_and_never_connected_is_listed_once() {
        let registry = Registry::new();
        registry.refused(&target(), Reason::AgentNotConnected);
        let other = |port| Target {
            node: "edge-3".into(),
            port,
            ..target()
        };
        let steered = Targets::from([(1, target()), (2, other(10250)), (3, other(10255))]);

        let nodes = registry.nodes_with(&steered);

        let names: Vec<_> = nodes.iter().map(|node| node.node.as_str()).collect();
        assert_eq!(names, ["edge-3", "edge-7"]);
        assert_eq!(nodes[0].last_error, None);
        assert!(nodes[1].last_error.is_some());
    }
}
