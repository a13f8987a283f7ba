//! The state folder of the daemon (`stateDir`), and the lock that keeps a second daemon from using it.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

/// The state folder can't be created or locked.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateError {
    /// Another daemon has locked the folder.
    #[error("another culvert process uses stateDir {path}; stop it, or configure another stateDir")]
    Held {
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
pub(super) struct State {
    _lock: Flock<File>,
}

impl State {
    /// Locks the folder, and creates it if it does not exist.
    pub(super) fn hold(folder: &Path) -> Result<Self, StateError> {
        let path = folder.to_owned();
        let failed = |source| StateError::Io {
            path: folder.to_owned(),
            source,
        };
        if !folder.is_dir() {
            fs::create_dir_all(folder).map_err(failed)?;
            fs::write(marker(folder), "").map_err(failed)?;
        }
        let opened = File::open(folder).map_err(failed)?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { _lock: lock }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(StateError::Held { path }),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

/// Returns the path of the marker file, which exists if a daemon created the folder: `cleanup` may then
/// remove the folder.
pub(super) fn marker(folder: &Path) -> PathBuf {
    folder.join("made-by-culvert")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_folder_is_locked_by_one_daemon() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("state");

        let first = State::hold(&folder).expect("unlocked");
        let second = State::hold(&folder).expect_err("locked");
        drop(first);

        assert!(matches!(second, StateError::Held { .. }), "{second}");
        State::hold(&folder).expect("unlocked again");
        assert!(marker(&folder).exists());
    }
}
