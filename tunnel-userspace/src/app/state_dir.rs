//! The daemon's state directory (`stateDir`), and the lock that keeps a second daemon from using it.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

/// The error returned if the state directory can't be created or locked.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateDirError {
    /// Another daemon has locked the directory.
    #[error("another culvert process uses stateDir {path}; stop it, or configure another stateDir")]
    Locked {
        /// The path of the state directory.
        path: PathBuf,
    },
    /// The file system returned an error.
    #[error("cannot use stateDir {path}")]
    Io {
        /// The path of the state directory.
        path: PathBuf,
        /// The error from the system call.
        #[source]
        source: io::Error,
    },
}

/// A lock on the state directory, released on drop.
#[derive(Debug)]
pub(super) struct StateDir {
    _lock: Flock<File>,
}

impl StateDir {
    /// Locks the directory, after creating it if it does not exist.
    pub(super) fn lock(directory: &Path) -> Result<Self, StateDirError> {
        let path = directory.to_owned();
        let failed = |source| StateDirError::Io {
            path: directory.to_owned(),
            source,
        };
        if !directory.is_dir() {
            fs::create_dir_all(directory).map_err(failed)?;
            fs::write(marker_path(directory), "").map_err(failed)?;
        }
        let opened = File::open(directory).map_err(failed)?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { _lock: lock }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(StateDirError::Locked { path }),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

/// Returns the path of the marker file. It exists if a daemon created the directory, which means that
/// `cleanup` may remove the directory.
pub(super) fn marker_path(directory: &Path) -> PathBuf {
    directory.join("made-by-culvert")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_directory_is_locked_by_one_daemon() {
        let dir = tempfile::tempdir().expect("a directory");
        let directory = dir.path().join("state");

        let first = StateDir::lock(&directory).expect("unlocked");
        let second = StateDir::lock(&directory).expect_err("locked");
        drop(first);

        assert!(matches!(second, StateDirError::Locked { .. }), "{second}");
        StateDir::lock(&directory).expect("unlocked again");
        assert!(marker_path(&directory).exists());
    }
}
