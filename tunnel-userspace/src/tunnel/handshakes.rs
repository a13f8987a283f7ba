//! The handshakes in progress. Their number is limited, and the limit is shared fairly among source
//! addresses.

use std::{collections::HashMap, net::IpAddr};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// The handshakes in progress, oldest first.
#[derive(Debug)]
pub(super) struct Handshakes {
    max: usize,
    entries: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    source: IpAddr,
    task: AbortHandle,
}

impl Handshakes {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            entries: Mutex::default(),
        }
    }

    /// Adds a handshake and starts its task with `spawn`. If the maximum has been reached, evicts another
    /// handshake and returns that one's source.
    ///
    /// The victim is the oldest handshake from the source that has the most. A source that opens many
    /// connections and stalls them therefore evicts only its own handshakes. If an agent shares that source,
    /// its handshake completes long before it becomes the oldest.
    pub(super) fn begin(
        &self,
        id: u64,
        source: IpAddr,
        spawn: impl FnOnce() -> AbortHandle,
    ) -> Option<IpAddr> {
        let mut entries = self.entries.lock();
        let evicted = (entries.len() >= self.max)
            .then(|| victim(&entries))
            .flatten()
            .map(|index| entries.remove(index));
        // Spawned while the lock is held, so that even a task that finishes immediately finds its entry in
        // `end`.
        let task = spawn();
        entries.push(Entry { id, source, task });
        drop(entries);
        evicted.map(|entry| {
            entry.task.abort();
            entry.source
        })
    }

    /// Removes a finished handshake. Returns false if it had already been evicted.
    pub(super) fn end(&self, id: u64) -> bool {
        let mut entries = self.entries.lock();
        let before = entries.len();
        entries.retain(|entry| entry.id != id);
        entries.len() < before
    }
}

/// Returns the index of the oldest entry from the source that has the most entries. In a tie, the source with
/// the oldest entry is chosen.
fn victim(entries: &[Entry]) -> Option<usize> {
    let mut counts: HashMap<IpAddr, usize> = HashMap::new();
    for entry in entries {
        *counts.entry(entry.source).or_default() += 1;
    }
    let max = counts.values().max()?;
    entries
        .iter()
        .position(|entry| counts.get(&entry.source) == Some(max))
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::JoinSet;

    use super::*;

    fn from(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[tokio::test]
    async fn the_oldest_handshake_of_the_source_with_the_most_is_evicted() {
        let (handshakes, mut tasks) = (Handshakes::new(4), JoinSet::<()>::new());
        let mut begin = |id, last| handshakes.begin(id, from(last), || tasks.spawn(pending()));
        assert_eq!(begin(0, 1), None, "the good one");
        for id in 1..4 {
            assert_eq!(begin(id, 9), None);
        }

        for id in 4..1000 {
            assert_eq!(begin(id, 9), Some(from(9)));
        }

        assert!(handshakes.end(0), "the good one is still there");
        // From here on, there is only one source.
        assert_eq!(begin(1000, 9), None);
        assert_eq!(begin(1001, 9), Some(from(9)));
        assert!(!handshakes.end(1));
        assert!(!handshakes.end(997));
        assert!(handshakes.end(998));
        for _ in 4..=1000 {
            let ended = tasks.join_next().await.expect("one that gave way");
            assert!(ended.is_err_and(|error| error.is_cancelled()));
        }
    }
}
