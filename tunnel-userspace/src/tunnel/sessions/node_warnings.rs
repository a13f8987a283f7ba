//! The problems with nodes that an operator must solve. Events report them.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use tokio::sync::watch;
use tunnel_common::reason::Reason;

use super::{SessionLimit, Sessions};
use crate::{identity::clock, model::ObjectWarning};

/// The time after which a warning that is not repeated is dropped.
const LIFETIME: SignedDuration = SignedDuration::from_mins(5);

/// The text of each warning, and the time when it was last repeated, by node and reason.
type Warnings = BTreeMap<(Arc<str>, Reason), (String, Timestamp)>;

/// The current warnings about nodes, and the receivers that get each change.
#[derive(Debug, Default)]
pub(super) struct NodeWarnings {
    current: Mutex<Warnings>,
    published: watch::Sender<Arc<[ObjectWarning]>>,
}

impl NodeWarnings {
    /// Returns a receiver for the warnings.
    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.published.subscribe()
    }

    /// Adds a warning about a node, or repeats it. A repeated warning is not published again.
    /// Returns true if it is new.
    pub(super) fn add(
        &self,
        node: &Arc<str>,
        reason: Reason,
        text: String,
        now: Timestamp,
    ) -> bool {
        self.edit(|current| {
            let last = current.insert((Arc::clone(node), reason), (text.clone(), now));
            last.is_none_or(|(last, _)| last != text)
        })
    }

    /// Drops a warning about a node.
    pub(super) fn remove(&self, node: &Arc<str>, reason: Reason) {
        _ = self.edit(|current| current.remove(&(Arc::clone(node), reason)).is_some());
    }

    /// Drops a warning about a node if it has not been repeated for [`LIFETIME`].
    pub(super) fn expire(&self, node: &Arc<str>, reason: Reason, now: Timestamp) {
        self.edit(|current| match current.entry((Arc::clone(node), reason)) {
            Entry::Occupied(entry) if now.duration_since(entry.get().1) >= LIFETIME => {
                entry.remove();
                true
            }
            Entry::Occupied(_) | Entry::Vacant(_) => false,
        });
    }

    /// Changes the warnings, and publishes them if `change` returns true. Returns what it has returned.
    fn edit(&self, change: impl FnOnce(&mut Warnings) -> bool) -> bool {
        let mut current = self.current.lock();
        let is_changed = change(&mut current);
        if is_changed {
            let all = current.iter();
            let all = all.map(|((node, reason), (text, _))| {
                ObjectWarning::for_node(node, *reason, text.clone())
            });
            self.published.send_replace(all.collect());
        }
        is_changed
    }
}

impl Sessions {
    /// Warns that a node's session was refused, unless the limit is that of the gateway.
    pub(in crate::tunnel) fn warn_of_session_limit(&self, node: &Arc<str>, limit: SessionLimit) {
        if matches!(limit, SessionLimit::Node | SessionLimit::Source) {
            let text = format!("the gateway refuses further sessions: {limit}");
            let now = Timestamp::now();
            self.warnings.add(node, Reason::SessionLimit, text, now);
        }
    }

    /// Warns that the certificate of a node's newest session has not been renewed, or that it has.
    pub(in crate::tunnel) fn report_late_certificate(&self, name: &Arc<str>) {
        let nodes = self.nodes.lock();
        let sessions = nodes.get(name).map(|node| node.sessions.iter());
        let newest = sessions.into_iter().flatten().max_by_key(|it| it.id);
        let late = newest.and_then(|it| it.certificates.current().lateness(clock::now()));
        drop(nodes);
        self.warn(name, Reason::CertificateNotRenewed, late);
    }

    /// Warns that a gateway has got no certificate for a long time, or that it has.
    pub(crate) fn warn_of_requests(&self, node: &Arc<str>, problem: Option<String>) {
        self.warn(node, Reason::CertificateRequestFailed, problem);
    }

    /// Adds or removes a warning. A new one is counted and logged.
    fn warn(&self, node: &Arc<str>, reason: Reason, problem: Option<String>) {
        let Some(text) = problem else {
            return self.warnings.remove(node, reason);
        };
        if self
            .warnings
            .add(node, reason, text.clone(), Timestamp::now())
        {
            self.report_problem(node, reason, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_published_once_for_each_change_and_dropped_if_it_is_not_repeated() {
        let warnings = NodeWarnings::default();
        let mut receiver = warnings.subscribe();
        let node = Arc::from("edge-7");
        let limit = Reason::SessionLimit;
        let mut published = || {
            let is_new = receiver.has_changed().expect("a sender");
            let texts = receiver.borrow_and_update();
            is_new.then(|| texts.iter().map(|it| it.note.clone()).collect::<Vec<_>>())
        };
        let at = |minutes| Timestamp::UNIX_EPOCH + SignedDuration::from_mins(minutes);

        warnings.add(&node, limit, "16 sessions".to_owned(), at(0));
        assert_eq!(published(), Some(vec!["16 sessions".to_owned()]));
        warnings.add(&node, limit, "16 sessions".to_owned(), at(4));
        assert_eq!(published(), None, "repeated");
        warnings.add(&node, limit, "32 sessions".to_owned(), at(4));
        assert_eq!(published(), Some(vec!["32 sessions".to_owned()]));
        warnings.expire(&node, limit, at(8));
        warnings.remove(&node, Reason::CertificateShared);
        assert_eq!(published(), None, "too early");
        warnings.expire(&node, limit, at(9));
        assert_eq!(published(), Some(Vec::new()));
    }
}
