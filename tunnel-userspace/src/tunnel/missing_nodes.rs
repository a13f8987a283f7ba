//! Determines which nodes have no Node object any more, so that their agents must not have sessions.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::model::NodeList;

/// The maximum number of removed Nodes to remember. Nodes beyond it count as Nodes that have never existed.
const MAX_REMOVED: usize = 10_000;

/// Determines which nodes have had no Node object for some time.
#[derive(Debug)]
pub(super) struct MissingNodes {
    nodes: watch::Receiver<NodeList>,
    /// The time for which a Node must be missing from a current list.
    timeout: Duration,
    state: Mutex<State>,
}

/// A node without a Node object.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct MissingNode;

impl fmt::Display for MissingNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the node has no Node object (tunnel.gateway.missingNodeTimeout)")
    }
}

#[derive(Debug, Default)]
struct State {
    /// The names on the list when it was last read.
    names: Arc<BTreeSet<Arc<str>>>,
    /// The time since which the list has been current.
    current_since: Option<Instant>,
    /// The Nodes that have been removed from the list.
    removed: HashMap<Arc<str>, RemovedNode>,
}

/// A Node that has been removed from the list.
#[derive(Clone, Copy, Debug)]
struct RemovedNode {
    at: Instant,
    /// True once the Node has been missing for long enough. It then stays missing while the sources fail.
    is_missing: bool,
}

impl MissingNodes {
    pub(super) fn new(nodes: watch::Receiver<NodeList>, timeout: Duration) -> Self {
        let state = Mutex::default();
        Self {
            nodes,
            timeout,
            state,
        }
    }

    /// Returns an error if a node has had no Node object for some time, according to a current list.
    pub(super) fn check(&self, node: &str) -> Result<(), MissingNode> {
        let now = Instant::now();
        let list = self.nodes.borrow();
        let mut state = self.state.lock();
        state.update(&list, self.timeout, now);
        // An empty list more likely means that the sources have no Nodes than that all of them were deleted.
        if list.names.is_empty() || list.names.contains(node) {
            return Ok(());
        }
        let is_missing = match state.removed.get(node) {
            Some(removed) => removed.is_missing,
            None => state.has_been_current(self.timeout, now),
        };
        if is_missing { Err(MissingNode) } else { Ok(()) }
    }
}

impl State {
    /// Records the changes of the list since the last call.
    fn update(&mut self, list: &NodeList, timeout: Duration, now: Instant) {
        if list.is_current {
            self.current_since.get_or_insert(now);
        } else {
            self.current_since = None;
        }
        if !Arc::ptr_eq(&self.names, &list.names) {
            for name in self.names.difference(&list.names) {
                if self.removed.len() < MAX_REMOVED {
                    let removed = RemovedNode {
                        at: now,
                        is_missing: false,
                    };
                    self.removed.insert(Arc::clone(name), removed);
                }
            }
            self.removed.retain(|name, _| !list.names.contains(name));
            self.names = Arc::clone(&list.names);
        }
        if self.has_been_current(timeout, now) {
            for removed in self.removed.values_mut() {
                removed.is_missing |= now.duration_since(removed.at) >= timeout;
            }
        }
    }

    /// Returns true if the list has been current for a time without interruption.
    fn has_been_current(&self, time: Duration, now: Instant) -> bool {
        let since = self.current_since;
        since.is_some_and(|since| now.duration_since(since) >= time)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    struct Fixture {
        list: watch::Sender<NodeList>,
        missing: MissingNodes,
    }

    impl Fixture {
        /// Returns a fixture whose list has been current for some time.
        async fn new(names: &[&str]) -> Self {
            let list = watch::Sender::default();
            let missing = MissingNodes::new(list.subscribe(), TIMEOUT);
            let fixture = Self { list, missing };
            fixture.set(names, true);
            assert_eq!(fixture.missing.check("edge-9"), Ok(()), "the list is new");
            advance(TIMEOUT).await;
            fixture
        }

        fn set(&self, names: &[&str], is_current: bool) {
            let names = names.iter().map(|name| Arc::from(*name)).collect();
            self.list.send_replace(NodeList {
                names: Arc::new(names),
                is_current,
            });
            // The gateway checks the nodes that have sessions at short intervals.
            self.missing.check("").unwrap_or(());
        }

        fn is_missing(&self, node: &str) -> bool {
            self.missing.check(node).is_err()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_node_is_missing_after_the_timeout_until_it_returns() {
        let fixture = Fixture::new(&["cloud-1", "edge-7"]).await;
        assert!(!fixture.is_missing("edge-7"));

        fixture.set(&["cloud-1"], true);
        advance(TIMEOUT - SECOND).await;
        assert!(!fixture.is_missing("edge-7"));
        advance(SECOND).await;
        assert!(fixture.is_missing("edge-7") && !fixture.is_missing("cloud-1"));

        fixture.set(&["cloud-1", "edge-7"], true);
        assert!(!fixture.is_missing("edge-7"));
        fixture.set(&["cloud-1"], true);
        assert!(!fixture.is_missing("edge-7"), "it has returned in between");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_was_never_listed_is_missing_only_on_a_list_that_stays_current() {
        let fixture = Fixture::new(&["cloud-1"]).await;
        assert!(fixture.is_missing("edge-9"));

        fixture.set(&["cloud-1"], false);
        assert!(!fixture.is_missing("edge-9"), "it may have been created");
        advance(10 * TIMEOUT).await;
        assert!(!fixture.is_missing("edge-9"));
        fixture.set(&["cloud-1"], true);
        advance(TIMEOUT - SECOND).await;
        assert!(!fixture.is_missing("edge-9"), "the list is renewed first");
        advance(SECOND).await;
        assert!(fixture.is_missing("edge-9"));
    }

    #[tokio::test(start_paused = true)]
    async fn no_node_becomes_missing_while_a_source_fails_but_a_missing_one_stays_missing() {
        let fixture = Fixture::new(&["cloud-1", "edge-7", "edge-8"]).await;
        fixture.set(&["cloud-1", "edge-8"], true);
        advance(TIMEOUT).await;
        fixture.set(&["cloud-1"], true);
        assert!(fixture.is_missing("edge-7"));

        fixture.set(&["cloud-1"], false);
        advance(10 * TIMEOUT).await;

        assert!(fixture.is_missing("edge-7") && !fixture.is_missing("edge-8"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_without_nodes_makes_no_node_missing() {
        let fixture = Fixture::new(&[]).await;

        advance(10 * TIMEOUT).await;

        assert!(!fixture.is_missing("edge-7"));
    }
}
