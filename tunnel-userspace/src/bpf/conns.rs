//! The counts of open connections in the kernel, by the index of the backend.
//!
//! Only programs count. When a larger map replaces one, the sockets open at that time are counted in the
//! old map, and later ones in the new one; the program that handles a close decides which map it
//! decrements. So only the sum of both is right, until the old counts are added to the new map, which
//! happens when no program reaches the old one.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use tunnel_common::table;

use super::sys::Words;
use crate::reconcile::ReadError;

/// The counts of open connections.
#[derive(Debug)]
pub(super) struct Conns {
    now: Words,
    /// The maps that were replaced, in which programs may still count.
    before: Vec<Words>,
}

impl Conns {
    /// Opens the map in a folder, and those in the folders that it replaced.
    pub(super) fn open(folder: &Path, replaced: &[PathBuf]) -> Result<Self, ReadError> {
        let before = replaced.iter().map(|folder| Words::open(folder));
        Ok(Self {
            now: Words::open(folder)?,
            before: before.collect::<Result<_, _>>()?,
        })
    }

    /// Returns the number of open connections of a backend.
    pub(super) fn of(&self, index: u32) -> Result<u64, ReadError> {
        let absent = || ReadError {
            map: table::CONNS.name,
            source: io::Error::other(format!("it has no entry {index}")),
        };
        let place = usize::try_from(index).map_err(|_too_large| absent())?;
        // Replaced maps are read first: a socket that they count may concurrently close in the new map,
        // but no socket of the new map closes in an old one.
        let before = self.before.iter();
        let before = before.filter_map(|words| words.get().get(place));
        let before = total(before.map(read));
        let now = self.now.get().get(place).ok_or_else(absent)?;
        Ok(before.wrapping_add(read(now)))
    }

    /// Returns the number of open connections of all backends.
    pub(super) fn sum(&self) -> u64 {
        let before = self.before.iter().flat_map(Words::get);
        total(before.chain(self.now.get()).map(read))
    }

    /// Returns true if no replaced map is left.
    pub(super) const fn is_settled(&self) -> bool {
        self.before.is_empty()
    }

    /// Adds the counts of the replaced maps to the new one. No program may reach those any more: they
    /// are detached, and a grace period is over.
    pub(super) fn settle(&self) {
        for words in &self.before {
            for (old, new) in words.get().iter().zip(self.now.get()) {
                let count = read(old);
                if count != 0 {
                    // In this order, a kill between both leaves an index in use for too long; the other
                    // order would free it too early.
                    new.fetch_add(count, Ordering::SeqCst);
                    old.fetch_sub(count, Ordering::SeqCst);
                }
            }
        }
    }
}

/// Adds counts, each of which may be negative: a map may see more closes than connects.
fn total(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::wrapping_add)
}

fn read(word: &AtomicU64) -> u64 {
    word.load(Ordering::SeqCst)
}
