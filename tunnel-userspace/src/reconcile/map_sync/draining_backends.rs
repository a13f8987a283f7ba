//! Removed backends that still have open connections. An index is not reused until its last connection has
//! been closed; otherwise the close would be counted against the new backend.

use std::collections::{BTreeSet, VecDeque};

use super::allocators::IndexAllocator;
use crate::reconcile::map_access::CounterReader;

/// The maximum number of connection counters to read in one poll.
const BATCH: usize = 4096;

/// The indices of removed backends that have open connections, in the order in which they are polled.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct DrainingBackends(VecDeque<u32>);

impl DrainingBackends {
    /// Reads the connection counters of all unused indices. Returns the indices that have open connections,
    /// and an allocator for the others.
    pub(super) fn find(
        reader: &impl CounterReader,
        entries: u32,
        used: BTreeSet<u32>,
    ) -> (Self, IndexAllocator) {
        let unused = (0..entries).filter(|index| !used.contains(index));
        let draining: VecDeque<u32> = unused
            .filter(|index| has_open_connections(reader, *index))
            .collect();
        let taken = used.into_iter().chain(draining.iter().copied());
        let free = IndexAllocator::new(entries, &taken.collect());
        (Self(draining), free)
    }

    /// Returns how many removed backends still have open connections.
    pub(in crate::reconcile) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the indices.
    pub(super) fn indices(&self) -> BTreeSet<u32> {
        self.0.iter().copied().collect()
    }

    /// Frees the index of a removed backend that no program can choose any more, or adds the index to those
    /// being polled if the backend still has open connections. Returns true if the index was freed.
    pub(super) fn free_or_drain(
        &mut self,
        index: u32,
        reader: &impl CounterReader,
        free: &mut IndexAllocator,
    ) -> bool {
        let is_free = !has_open_connections(reader, index);
        if is_free {
            free.free(index);
        } else {
            self.0.push_back(index);
        }
        is_free
    }

    /// Polls the next indices and frees those that have no open connections. Returns the freed indices.
    pub(super) fn poll(
        &mut self,
        reader: &impl CounterReader,
        free: &mut IndexAllocator,
    ) -> Vec<u32> {
        let mut freed = Vec::new();
        for _ in 0..self.0.len().min(BATCH) {
            if let Some(index) = self.0.pop_front()
                && self.free_or_drain(index, reader, free)
            {
                freed.push(index);
            }
        }
        freed
    }
}

fn has_open_connections(reader: &impl CounterReader, index: u32) -> bool {
    let open = reader.open_connections(index).inspect_err(|error| {
        let error = error as &dyn std::error::Error;
        tracing::warn!(
            index,
            error,
            "cannot read the open connections of a removed backend, so its index is not freed"
        );
    });
    // A count that can't be read may be greater than 0.
    !matches!(open, Ok(0))
}
