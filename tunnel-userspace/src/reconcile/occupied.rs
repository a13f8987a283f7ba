//! Indices of backends that are gone and that open connections still name. None is given out again
//! before the last of those has closed: what they count would be another backend's.

use std::collections::VecDeque;

use super::{MapReader, actual::Actual, alloc::Indices};

/// How many are looked at in one go.
const BATCH: usize = 4096;

/// The indices, in the order in which they are looked at.
#[derive(Debug, Default)]
pub(crate) struct Occupied(VecDeque<u32>);

impl Actual {
    /// How many indices open connections keep.
    pub(crate) fn occupied(&self) -> usize {
        self.occupied.0.len()
    }

    /// Finds those that an earlier process, or a program that ran until now, left occupied. A grace
    /// period must have passed since the maps were read.
    pub(crate) fn find_occupied(&mut self, reader: &impl MapReader) {
        let used = self.used_backends();
        let entries = self.sizes.backend_entries();
        let gone = (0..entries).filter(|index| !used.contains(index));
        self.occupied = Occupied(gone.filter(|index| is_open(reader, *index)).collect());
        let taken = used.into_iter().chain(self.occupied.0.iter().copied());
        self.free_backends = Indices::new(entries, &taken.collect());
    }

    /// Frees an index that no program can reach any more, or keeps it for as long as connections
    /// are open.
    pub(super) fn free_backend(&mut self, reader: &impl MapReader, index: u32) {
        if is_open(reader, index) {
            self.occupied.0.push_back(index);
        } else {
            self.free_backends.give(index);
        }
    }

    /// Looks at some of those that are kept, in turn. Gives how many are free now.
    pub(crate) fn look_at_occupied(&mut self, reader: &impl MapReader) -> usize {
        let mut freed = 0_usize;
        for _ in 0..self.occupied.0.len().min(BATCH) {
            let Some(index) = self.occupied.0.pop_front() else {
                break;
            };
            if is_open(reader, index) {
                self.occupied.0.push_back(index);
            } else {
                self.free_backends.give(index);
                freed = freed.saturating_add(1);
            }
        }
        freed
    }
}

fn is_open(reader: &impl MapReader, index: u32) -> bool {
    match reader.open_at(index) {
        Ok(open) => open != 0,
        Err(error) => {
            tracing::warn!(
                index,
                error = &error as &dyn std::error::Error,
                "a backend's index is not freed"
            );
            true
        }
    }
}
