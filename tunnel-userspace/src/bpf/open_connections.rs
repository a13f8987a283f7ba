//! The kernel's counts of open connections, by backend index.
//!
//! Only the kernel programs change the counts. When a larger map replaces the old one, sockets that are
//! already open stay counted in the old map, and new sockets are counted in the new map. Closing a socket
//! decrements the count in the map used by whichever program handles the close. Until no program uses the old
//! map any more and its counts have been added to the new one, only the sum of both maps is right.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use tunnel_common::table;

use super::sys::MappedCounters;
use crate::reconcile::ReadError;

/// The counts of open connections, by backend index.
#[derive(Debug)]
pub(super) struct OpenConnections {
    current: MappedCounters,
    /// The replaced maps, which programs may still use.
    replaced: Vec<MappedCounters>,
}

impl OpenConnections {
    /// Opens the map in `directory`, and the maps that it replaces, which are in the `replaced` directories.
    pub(super) fn open(directory: &Path, replaced: &[PathBuf]) -> Result<Self, ReadError> {
        let replaced = replaced
            .iter()
            .map(|directory| MappedCounters::open(directory));
        Ok(Self {
            current: MappedCounters::open(directory)?,
            replaced: replaced.collect::<Result<_, _>>()?,
        })
    }

    /// Returns how many connections to a backend are open.
    pub(super) fn count_of(&self, index: u32) -> Result<u64, ReadError> {
        let absent = || ReadError {
            map: table::CONNS.name,
            source: io::Error::other(format!("the map has no entry {index}")),
        };
        let position = usize::try_from(index).map_err(|_too_large| absent())?;
        // Replaced maps are read first: if one of them counts a socket as opened, the new map may count it as
        // closed, but never the other way round.
        let replaced = self.replaced.iter();
        let replaced = replaced.filter_map(|counters| counters.get().get(position));
        let replaced = wrapping_sum(replaced.map(read));
        let current = self.current.get().get(position).ok_or_else(absent)?;
        Ok(replaced.wrapping_add(read(current)))
    }

    /// Returns the total number of open connections.
    pub(super) fn total(&self) -> u64 {
        let replaced = self.replaced.iter().flat_map(MappedCounters::get);
        wrapping_sum(replaced.chain(self.current.get()).map(read))
    }

    /// Returns true if there are no replaced maps.
    pub(super) const fn is_merged(&self) -> bool {
        self.replaced.is_empty()
    }

    /// Adds the counts in the replaced maps to the new one. Must be called only after the programs that use
    /// the replaced maps have been detached and a grace period has passed.
    pub(super) fn merge_replaced(&self) {
        for counters in &self.replaced {
            for (old, new) in counters.get().iter().zip(self.current.get()) {
                let count = read(old);
                if count != 0 {
                    // If the process is killed between these two lines, the count is too high, and the index
                    // stays in use for too long. In the opposite order, the index would be freed too early.
                    new.fetch_add(count, Ordering::SeqCst);
                    old.fetch_sub(count, Ordering::SeqCst);
                }
            }
        }
    }
}

/// Adds counts modulo 2^64. A single count may be negative if its map counted more closes than connects.
fn wrapping_sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::wrapping_add)
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::SeqCst)
}
