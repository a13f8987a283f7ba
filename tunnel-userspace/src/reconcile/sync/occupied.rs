//! Indices of removed backends that open connections still refer to. An index is reused only after the
//! last of them has closed: their close would be counted at the new backend.

use std::collections::{BTreeSet, VecDeque};

use super::alloc::Indices;
use crate::reconcile::access::Counts;

/// The number of indices that one poll reads.
const BATCH: usize = 4096;

/// The indices, in the order in which they are polled.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct Occupied(VecDeque<u32>);

impl Occupied {
    /// Returns the indices of an array that are not in use, but have open connections; and the
    /// remaining, free ones.
    pub(super) fn find(reader: &impl Counts, entries: u32, used: BTreeSet<u32>) -> (Self, Indices) {
        let gone = (0..entries).filter(|index| !used.contains(index));
        let occupied: VecDeque<u32> = gone.filter(|index| is_open(reader, *index)).collect();
        let taken = used.into_iter().chain(occupied.iter().copied());
        let free = Indices::new(entries, &taken.collect());
        (Self(occupied), free)
    }

    /// Returns the number of indices.
    pub(in crate::reconcile) fn len(&self) -> usize {
        self.0.len()
    }

    /// Frees an index that no program can reach any more, or keeps it as long as it has open
    /// connections.
    pub(super) fn free(&mut self, index: u32, reader: &impl Counts, free: &mut Indices) {
        if is_open(reader, index) {
            self.0.push_back(index);
        } else {
            free.give(index);
        }
    }

    /// Polls a batch of the indices, in turn, and frees those without open connections. Returns the
    /// number freed.
    pub(super) fn look(&mut self, reader: &impl Counts, free: &mut Indices) -> usize {
        let before = self.0.len();
        for _ in 0..before.min(BATCH) {
            if let Some(index) = self.0.pop_front() {
                self.free(index, reader, free);
            }
        }
        before - self.0.len()
    }
}

fn is_open(reader: &impl Counts, index: u32) -> bool {
    let open = reader.open_at(index).inspect_err(|error| {
        let error = error as &dyn std::error::Error;
        tracing::warn!(index, error, "a backend's index is not freed");
    });
    // An unreadable count may be of open connections.
    !matches!(open, Ok(0))
}
