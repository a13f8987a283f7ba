//! Detects by metadata that a file or folder was changed or replaced.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// Metadata of a file that change whenever it is written or replaced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) place: Place,
    size: u64,
    /// The mtime: seconds and nanoseconds.
    modified: (i64, i64),
    /// The ctime: seconds and nanoseconds.
    changed: (i64, i64),
}

/// The device and inode number of a file or folder. They change if another file takes its path.
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

    /// Returns true if both fingerprints are of the same file, and it was not written in between. The ctime
    /// is ignored, since a rename changes it.
    pub(super) fn is_same_text(&self, other: &Self) -> bool {
        (self.place, self.size, self.modified) == (other.place, other.size, other.modified)
    }
}

/// Returns the fingerprint of a file, following symbolic links; `None` if it can't be read.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}
