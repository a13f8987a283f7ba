//! The locks that keep other daemons from using the pin directory and `stateDir`.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::info;

use crate::{
    app::{
        RoleError, failed,
        state_dir::{StateDir, StateDirError},
    },
    bpf::{PinDirectory, PinError},
    config::Config,
    error_chain::chain,
};

/// The interval between two attempts to take the locks.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The interval between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// The locked directories of a daemon.
pub(super) struct Locks {
    pub(super) pins: PinDirectory,
    pub(super) state: StateDir,
}

/// The error returned if a directory can't be locked.
enum LockError {
    Pins(PinError),
    State(StateDirError),
}

impl Locks {
    /// Locks both directories. If `wait` is true and another process, such as the daemon that this daemon replaces,
    /// uses one of them, waits until that process has exited.
    pub(super) async fn take(config: &Config, wait: bool) -> Result<Self, RoleError> {
        let mut next_log = Instant::now();
        loop {
            let error = match Self::try_take(config) {
                Ok(locks) => return Ok(locks),
                Err(error) => error,
            };
            let Some(other) = error.other_process().filter(|_| wait) else {
                return Err(error.into_role_error());
            };
            if Instant::now() >= next_log {
                info!(error = other, "waiting until another culvert process exits");
                next_log += LOG_INTERVAL;
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// Takes both locks. The error of the pin directory names the other process, so it takes precedence.
    fn try_take(config: &Config) -> Result<Self, LockError> {
        let pins = PinDirectory::lock(&config.bpf.bpffs);
        let state = StateDir::lock(&config.state_dir);
        match (pins, state) {
            (Ok(pins), Ok(state)) => Ok(Self { pins, state }),
            (Err(error @ PinError::Locked { .. }), _) => Err(LockError::Pins(error)),
            (_, Err(error)) => Err(LockError::State(error)),
            (Err(error), Ok(_)) => Err(LockError::Pins(error)),
        }
    }
}

impl LockError {
    /// Returns the text of the error, if another process has locked the directory.
    fn other_process(&self) -> Option<String> {
        match self {
            Self::Pins(error @ PinError::Locked { .. }) => Some(chain(error)),
            Self::State(error @ StateDirError::Locked { .. }) => Some(chain(error)),
            Self::Pins(_) | Self::State(_) => None,
        }
    }

    fn into_role_error(self) -> RoleError {
        match self {
            Self::Pins(error) => failed("cannot use bpf.bpffs")(error),
            Self::State(error) => failed("cannot use stateDir")(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_daemon_waits_until_the_other_has_exited() {
        let directory = tempfile::tempdir().expect("a directory");
        let text = format!("stateDir: {}", directory.path().join("state").display());
        let mut config = Config::parse(&text).expect("good");
        // This directory is not on a BPF file system, which is an error as soon as `stateDir` is free.
        config.bpf.bpffs = directory.path().join("pins");
        let other = StateDir::lock(&config.state_dir).expect("unlocked");

        let Err(error) = Locks::take(&config, false).await else {
            panic!("the other daemon runs");
        };
        assert!(chain(&error).contains("another culvert process uses stateDir"));
        let waiting = timeout(Duration::from_millis(300), Locks::take(&config, true)).await;
        assert!(waiting.is_err(), "the other daemon runs");
        drop(other);
        let waited = timeout(Duration::from_secs(30), Locks::take(&config, true)).await;
        let Err(error) = waited.expect("the other daemon has exited") else {
            panic!("the directory is not on a BPF file system");
        };
        assert!(chain(&error).contains("is not on a BPF file system"));
    }
}
