//! The state folder of the daemon (`stateDir`), and the lock that keeps a second daemon from using it.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

/// The state folder can't be created or locked.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateDirError {
    /// Another daemon has locked the folder.
    #[error("another culvert process uses stateDir {path}; stop it, or configure another stateDir")]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// The file system returned an error.
    #[error("cannot use stateDir {path}")]
    Io {
        /// The folder.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
}

/// A lock on the state folder, released on drop.
#[derive(Debug)]
pub(super) struct StateDir {
    _lock: Flock<File>,
}

impl StateDir {
    /// Locks the folder, and creates it if it does not exist.
    pub(super) fn lock(folder: &Path) -> Result<Self, StateDirError> {
        let path = folder.to_owned();
        let failed = |source| StateDirError::Io {
            path: folder.to_owned(),
            source,
        };
        if !folder.is_dir() {
            fs::create_dir_all(folder).map_err(failed)?;
            fs::write(marker_path(folder), "").map_err(failed)?;
        }
        let opened = File::open(folder).map_err(failed)?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { _lock: lock }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(StateDirError::Locked { path }),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

/// Returns the path of the marker file, which exists if a daemon created the folder: `cleanup` may then
/// remove the folder.
pub(super) fn marker_path(folder: &Path) -> PathBuf {
    folder.join("made-by-culvert")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_folder_is_locked_by_one_daemon() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("state");

        let first = StateDir::lock(&folder).expect("unlocked");
        let second = StateDir::lock(&folder).expect_err("locked");
        drop(first);

        assert!(matches!(second, StateDirError::Locked { .. }), "{second}");
        StateDir::lock(&folder).expect("unlocked again");
        assert!(marker_path(&folder).exists());
    }
}
