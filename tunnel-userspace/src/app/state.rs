//! The state folder: created by the daemon, and locked against a second one.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

/// The state folder can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateError {
    /// Another daemon has locked the folder.
    #[error("another culvert uses stateDir {path}; stop it first, or give this one its own")]
    Held {
        /// The folder.
        path: PathBuf,
    },
    /// The file system returned an error.
    #[error("cannot use stateDir {path}")]
    Io {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// The state folder, locked for the lifetime of this value.
#[derive(Debug)]
pub(super) struct State {
    _lock: Flock<File>,
}

impl State {
    /// Creates the folder if it does not exist, and locks it.
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

/// Returns the path of the marker file: a daemon created the folder, so `cleanup` may remove it.
pub(super) fn marker(folder: &Path) -> PathBuf {
    folder.join("made-by-culvert")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_state_serves_one_daemon() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("state");

        let first = State::hold(&folder).expect("free");
        let second = State::hold(&folder).expect_err("held");
        drop(first);

        assert!(matches!(second, StateError::Held { .. }), "{second}");
        State::hold(&folder).expect("free again");
        assert!(marker(&folder).exists());
    }
}
