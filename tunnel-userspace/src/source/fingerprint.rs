//! Uses metadata to detect that a file or directory has been changed or replaced.

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// The parts of a file's metadata that change whenever the file is written or replaced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) id: FileId,
    size: u64,
    /// The modification time, in seconds and nanoseconds.
    mtime: (i64, i64),
    /// The time of the last inode change, in seconds and nanoseconds.
    ctime: (i64, i64),
}

/// The device and inode numbers of a file or directory. They differ if another file has taken over its path.
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

    /// Returns true if both fingerprints are of the same file and it was not written in between. The ctime is
    /// ignored, since renaming a file changes it.
    pub(super) fn has_same_content(&self, other: &Self) -> bool {
        (self.id, self.size, self.mtime) == (other.id, other.size, other.mtime)
    }
}

/// Returns the fingerprint of a file, following symbolic links, or `None` if the file can't be reached.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}
