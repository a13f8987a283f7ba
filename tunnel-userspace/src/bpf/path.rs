//! Finds the file system that a path is on, and adds paths to errors.

use std::{
    io,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{FsType, statfs};

/// An error from an operation on a path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {path}")]
pub struct PathError {
    step: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Returns a function that adds the failed operation and the path to an I/O error.
pub(super) fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PathError {
    let path = path.to_owned();
    move |source| PathError { step, path, source }
}

/// Returns the path if it exists, and otherwise its nearest existing ancestor.
pub(super) fn nearest_existing(path: &Path) -> &Path {
    let mut directories = path.ancestors();
    directories.find(|path| path.exists()).unwrap_or(path)
}

/// Returns the type of the file system that a path is on.
pub(super) fn file_system_type(path: &Path) -> Result<FsType, PathError> {
    let found = statfs(path).map_err(|error| failed("inspect", path)(error.into()))?;
    Ok(found.filesystem_type())
}
