//! The handshakes in progress. Their number is limited, and peers that have not shown a certificate share the
//! limit fairly by their source addresses.

mod source_groups;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use self::source_groups::{Source, SourceGroups};

/// The maximum number of handshakes in progress whose peers have shown a certificate of the same node.
const MAX_PER_NODE: usize = 8;

/// The handshakes in progress.
#[derive(Debug)]
pub(super) struct Handshakes {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    /// The handshakes that may be evicted, because their peers have shown no certificate yet.
    evictable: SourceGroups,
    /// The number of handshakes of each node whose certificate has been verified.
    verified: HashMap<Arc<str>, usize>,
}

#[derive(Debug)]
struct Entry {
    task: AbortHandle,
    peer: Peer,
}

#[derive(Debug)]
enum Peer {
    Unverified(Source),
    Verified(Arc<str>),
}

/// The result of adding a handshake.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Admission {
    /// The handshake has started.
    Started,
    /// The handshake has started, and another one, from this source, has been evicted.
    Evicted(IpAddr),
    /// The handshake has not started, since no other one may be evicted.
    Refused,
}

impl Handshakes {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            state: Mutex::default(),
        }
    }

    /// Adds a handshake and starts its task with `spawn`. `id` must be greater than all earlier ones. If the
    /// maximum has been reached, or if `must_evict` is true because the gateway has too many connections, evicts
    /// another handshake whose peer has not shown a certificate yet.
    ///
    /// The victim is the oldest handshake of the source address that has the most, in the network that has
    /// the most. A source or network that opens many connections and stalls them therefore evicts only its
    /// own handshakes. If an agent shares that source, its handshake completes long before it becomes the
    /// oldest.
    pub(super) fn begin(
        &self,
        id: u64,
        peer: SocketAddr,
        must_evict: bool,
        spawn: impl FnOnce() -> AbortHandle,
    ) -> Admission {
        let mut state = self.state.lock();
        let mut evicted = None;
        if must_evict || state.entries.len() >= self.max {
            let Some((victim, source)) = state.evictable.victim() else {
                return Admission::Refused;
            };
            evicted = state.remove(victim).map(|entry| (entry, source.address));
        }
        let source = Source::of(peer);
        state.evictable.insert(source, id);
        // Spawned while the lock is held, so that even a task that finishes immediately finds its entry in
        // `end`.
        let task = spawn();
        let peer = Peer::Unverified(source);
        state.entries.insert(id, Entry { task, peer });
        drop(state);
        evicted.map_or(Admission::Started, |(entry, source)| {
            entry.task.abort();
            Admission::Evicted(source)
        })
    }

    /// Records that the peer has shown a certificate of `node`. The handshake can't be evicted from now on.
    /// Returns false if it has been evicted already, or if there are [`MAX_PER_NODE`] such handshakes of the
    /// node.
    pub(super) fn verify(&self, id: u64, node: &Arc<str>) -> bool {
        let mut state = self.state.lock();
        let of_node = state.verified.get(node).copied().unwrap_or(0);
        if of_node >= MAX_PER_NODE {
            return false;
        }
        let Some(mut entry) = state.remove(id) else {
            return false;
        };
        entry.peer = Peer::Verified(Arc::clone(node));
        state.verified.insert(Arc::clone(node), of_node + 1);
        state.entries.insert(id, entry);
        true
    }

    /// Removes a finished handshake. Returns false if it had already been evicted.
    pub(super) fn end(&self, id: u64) -> bool {
        self.state.lock().remove(id).is_some()
    }
}

impl State {
    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        match &entry.peer {
            Peer::Unverified(source) => self.evictable.remove(*source, id),
            Peer::Verified(node) => {
                if let Some(count) = self.verified.get_mut(node) {
                    *count -= 1;
                    if *count == 0 {
                        self.verified.remove(node);
                    }
                }
            }
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::JoinSet;

    use super::*;

    fn from(last: u8) -> SocketAddr {
        ([192, 0, 2, last], 4242).into()
    }

    #[tokio::test]
    async fn the_oldest_handshake_of_the_source_with_the_most_is_evicted() {
        let (handshakes, mut tasks) = (Handshakes::new(4), JoinSet::<()>::new());
        let mut begin =
            |id, last| handshakes.begin(id, from(last), false, || tasks.spawn(pending()));
        assert_eq!(begin(0, 1), Admission::Started, "the good one");
        for id in 1..4 {
            assert_eq!(begin(id, 9), Admission::Started);
        }

        for id in 4..1000 {
            assert_eq!(begin(id, 9), Admission::Evicted(from(9).ip()));
        }

        assert!(handshakes.end(0), "the good one is still there");
        // From here on, there is only one source.
        assert_eq!(begin(1000, 9), Admission::Started);
        assert_eq!(begin(1001, 9), Admission::Evicted(from(9).ip()));
        assert!(!handshakes.end(1));
        assert!(!handshakes.end(997));
        assert!(handshakes.end(998));
        for _ in 4..=1000 {
            let ended = tasks.join_next().await.expect("one that was evicted");
            assert!(ended.is_err_and(|error| error.is_cancelled()));
        }
    }

    #[tokio::test]
    async fn a_gateway_with_too_many_connections_evicts_a_handshake_although_few_are_in_progress() {
        let (handshakes, mut tasks) = (Handshakes::new(100), JoinSet::<()>::new());
        let mut begin =
            |id, is_full| handshakes.begin(id, from(9), is_full, || tasks.spawn(pending()));

        assert_eq!(begin(0, true), Admission::Refused, "there is no other one");
        assert_eq!(begin(1, false), Admission::Started);
        assert_eq!(begin(2, true), Admission::Evicted(from(9).ip()));
        assert!(handshakes.verify(2, &"edge-1".into()));
        assert_eq!(begin(3, true), Admission::Refused, "it has a certificate");
    }

    #[tokio::test]
    async fn a_handshake_with_a_certificate_is_never_evicted_and_a_node_has_a_few() {
        let (handshakes, mut tasks) = (Handshakes::new(20), JoinSet::<()>::new());
        let mut begin = |id| handshakes.begin(id, from(9), false, || tasks.spawn(pending()));
        let nodes: [Arc<str>; 3] = ["edge-1".into(), "edge-2".into(), "edge-3".into()];
        for id in 0..20 {
            assert_eq!(begin(id), Admission::Started);
        }
        for id in 0..8 {
            assert!(handshakes.verify(id, &nodes[0]));
        }
        assert!(!handshakes.verify(8, &nodes[0]), "a ninth one");
        assert!(handshakes.end(8));
        assert!(handshakes.verify(9, &nodes[1]));

        for id in 20..100 {
            begin(id);
        }
        assert!(!handshakes.verify(10, &nodes[1]), "it was evicted");
        assert!(handshakes.end(0), "verified");
        assert!(handshakes.verify(99, &nodes[0]), "room again");
        for id in 89..99 {
            assert!(
                handshakes.verify(id, &nodes[usize::from(id > 95) + 1]),
                "{id}"
            );
        }
        assert_eq!(begin(100), Admission::Started);
        assert_eq!(begin(101), Admission::Evicted(from(9).ip()));
        assert!(handshakes.verify(101, &nodes[2]));
        assert_eq!(begin(102), Admission::Refused, "all are verified");
    }
}
