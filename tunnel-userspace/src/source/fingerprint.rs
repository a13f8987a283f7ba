//! Identifies files and folders, and detects their changes.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// The metadata that change whenever a file is replaced or written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) place: Place,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The identity of a folder or file, which differs from that of another one at the same path.
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

    /// Returns true if both are one file without a write in between, under any name. The ctime is
    /// ignored: it changes when the file is renamed, or another one takes its name.
    pub(super) fn is_same_text(&self, other: &Self) -> bool {
        (self.place, self.size, self.modified) == (other.place, other.size, other.modified)
    }
}

/// Reads the fingerprint of a file, through symbolic links.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}
