//! The counts of open connections in the kernel, by the index of the backend.
//!
//! Only programs count. Where a larger map takes the place of one, the sockets that are open then are
//! counted in the old one, and those that follow in the new one; which of the two a close is
//! counted in depends on the program that sees it. So the sum of both is right at any time, and
//! each by itself is once the old one's numbers are moved over, when no program reaches it any more.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use tunnel_common::table;

use super::sys::Words;
use crate::reconcile::ReadError;

/// The counts.
#[derive(Debug)]
pub(super) struct Conns {
    now: Words,
    /// Those of maps that were replaced, and that programs may still be counting in.
    before: Vec<Words>,
}

impl Conns {
    /// Opens the map in a folder, and those in the folders that were replaced by it.
    pub(super) fn open(folder: &Path, replaced: &[PathBuf]) -> Result<Self, ReadError> {
        let before = replaced.iter().map(|folder| Words::open(folder));
        Ok(Self {
            now: Words::open(folder)?,
            before: before.collect::<Result<_, _>>()?,
        })
    }

    /// How many open sockets remember a backend.
    pub(super) fn of(&self, index: u32) -> Result<u64, ReadError> {
        let absent = || ReadError {
            map: table::CONNS.name,
            source: io::Error::other(format!("it has no entry {index}")),
        };
        let place = usize::try_from(index).map_err(|_too_large| absent())?;
        // What was replaced is read first: a socket that is counted there may close in the new one
        // meanwhile, and none of the new one's in the old.
        let before = self.before.iter();
        let before = before.filter_map(|words| words.get().get(place));
        let before = total(before.map(read));
        let now = self.now.get().get(place).ok_or_else(absent)?;
        Ok(before.wrapping_add(read(now)))
    }

    /// How many open sockets remember a backend, of all backends.
    pub(super) fn sum(&self) -> u64 {
        let before = self.before.iter().flat_map(Words::get);
        total(before.chain(self.now.get()).map(read))
    }

    /// Whether there are such.
    pub(super) const fn is_settled(&self) -> bool {
        self.before.is_empty()
    }

    /// Moves what was counted in the maps that were replaced. No program may reach those any more:
    /// they are off their hooks, and a grace period is over.
    pub(super) fn settle(&self) {
        for words in &self.before {
            for (old, new) in words.get().iter().zip(self.now.get()) {
                let count = read(old);
                if count != 0 {
                    // In this order, so that a kill between the two leaves an index that rests for
                    // too long, and none that is used too early.
                    new.fetch_add(count, Ordering::SeqCst);
                    old.fetch_sub(count, Ordering::SeqCst);
                }
            }
        }
    }
}

/// Adds up counts, each of which may be below 0: more closed in a map than were opened in it.
fn total(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::wrapping_add)
}

fn read(word: &AtomicU64) -> u64 {
    word.load(Ordering::SeqCst)
}
