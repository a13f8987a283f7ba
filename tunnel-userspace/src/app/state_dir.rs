//! The daemon's state directory (`stateDir`), and the lock that keeps a second daemon from using it.
//!
//! The lock is on a file that only the daemon's user can open, because any user who can open a file can lock it.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{
    fcntl::{Flock, FlockArg},
    unistd::geteuid,
};
use tracing::warn;

use crate::listen;

/// The error returned if the state directory can't be created or locked.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateDirError {
    /// Another daemon has locked the directory.
    #[error("another culvert process uses stateDir {path}; stop it, or configure another stateDir")]
    Locked {
        /// The path of the state directory.
        path: PathBuf,
    },
    /// Another user owns or may change the directory, or owns the file that is locked.
    #[error(
        "stateDir {path} can't be trusted: {difference}; correct it by: chown {own} {path} && chmod 700 {path}"
    )]
    Shared {
        /// The path of the state directory or of the lock.
        path: PathBuf,
        /// The difference from a directory of this process's user.
        difference: String,
        /// The id of this process's user.
        own: u32,
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
    /// The lock; `None` if the file can't be created because the file system is full.
    _lock: Option<Flock<File>>,
    /// The reason why the directory can't be used completely, if there is one.
    pub(super) problem: Option<String>,
}

impl StateDir {
    /// Locks the directory, after creating it if it does not exist. If the file system is full or read-only, the
    /// daemon works without its lock and its marker: the lock on the pin directory already keeps a second daemon
    /// from using the same maps.
    pub(super) fn lock(directory: &Path) -> Result<Self, StateDirError> {
        match Self::try_lock(directory) {
            Err(StateDirError::Io { path, source }) if listen::is_unwritable(&source) => {
                let problem = format!(
                    "stateDir {} can't be written: {source}; until there is room, the last known objects are \
                     not saved, and `culvert status` may not reach the daemon",
                    path.display()
                );
                warn!(problem, "continuing without a complete stateDir");
                Ok(Self {
                    _lock: None,
                    problem: Some(problem),
                })
            }
            locked => locked,
        }
    }

    fn try_lock(directory: &Path) -> Result<Self, StateDirError> {
        let path = directory.to_owned();
        let failed = |source| StateDirError::Io {
            path: directory.to_owned(),
            source,
        };
        if !directory.is_dir() {
            if let Some(parent) = directory.parent() {
                fs::create_dir_all(parent).map_err(failed)?;
            }
            let mut builder = DirBuilder::new();
            builder.mode(0o700).create(directory).map_err(failed)?;
            fs::write(marker_path(directory), "").map_err(failed)?;
        }
        check_owner(directory, &fs::metadata(directory).map_err(failed)?)?;
        let lock = lock_path(directory);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW);
        let opened = options.open(&lock).map_err(failed)?;
        check_owner(&lock, &opened.metadata().map_err(failed)?)?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self {
                _lock: Some(lock),
                problem: None,
            }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(StateDirError::Locked { path }),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

/// Checks that only this process's user can change a file or directory.
fn check_owner(path: &Path, metadata: &fs::Metadata) -> Result<(), StateDirError> {
    let own = geteuid().as_raw();
    let (owner, mode) = (metadata.uid(), metadata.mode());
    let difference = if owner != own {
        format!("user {owner} owns it, not user {own}")
    } else if mode & 0o022 != 0 {
        format!("its mode {:o} lets other users change it", mode & 0o7777)
    } else {
        return Ok(());
    };
    let path = path.to_owned();
    Err(StateDirError::Shared {
        path,
        difference,
        own,
    })
}

/// Returns the path of the file that is locked.
pub(super) fn lock_path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Returns the path of the marker file. It exists if a daemon created the directory, which means that
/// `cleanup` may remove the directory.
pub(super) fn marker_path(directory: &Path) -> PathBuf {
    directory.join("made-by-culvert")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn other_users_can_neither_lock_nor_change_the_state_directory() {
        let dir = tempfile::tempdir().expect("a directory");
        let directory = dir.path().join("state");
        let mode = |path: &Path| fs::metadata(path).expect("a file").mode() & 0o777;

        let lock = StateDir::lock(&directory).expect("unlocked");
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&lock_path(&directory)), 0o600);
        drop(lock);

        let writable = fs::Permissions::from_mode(0o1777);
        fs::set_permissions(&directory, writable).expect("changed");
        let error = StateDir::lock(&directory)
            .expect_err("writable")
            .to_string();
        assert!(
            error.contains("1777") && error.contains("chmod 700"),
            "{error}"
        );
    }

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
