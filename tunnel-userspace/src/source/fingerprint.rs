//! What tells a file or a folder from what it was.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// What tells whether a file is still the one that was read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) place: Place,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What tells a folder from another one that took its path.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Place {
    device: u64,
    inode: u64,
}

impl Place {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

impl Fingerprint {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            place: Place::of(metadata),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether this is one file that wasn't written between, whatever its name was. The time of
    /// change is left out: it moves when a file gets another name, or another one takes its name.
    pub(super) fn is_same_text(&self, other: &Self) -> bool {
        (self.place, self.size, self.modified) == (other.place, other.size, other.modified)
    }
}

/// The fingerprint of a file, through symbolic links.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}
