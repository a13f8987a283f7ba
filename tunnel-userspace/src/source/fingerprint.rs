//! Detects by metadata that a file or directory was changed or replaced.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// Metadata of a file that change whenever it is written or replaced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) id: FileId,
    size: u64,
    /// The mtime: seconds and nanoseconds.
    mtime: (i64, i64),
    /// The ctime: seconds and nanoseconds.
    ctime: (i64, i64),
}

/// The device and inode number of a file or directory. They change if another file takes its path.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
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
            id: FileId::of(metadata),
            size: metadata.size(),
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            ctime: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns true if both fingerprints are of the same file, and it was not written in between. The ctime
    /// is ignored, since a rename changes it.
    pub(super) fn has_same_content(&self, other: &Self) -> bool {
        (self.id, self.size, self.mtime) == (other.id, other.size, other.mtime)
    }
}

/// Returns the fingerprint of a file, following symbolic links; `None` if it can't be read.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}
