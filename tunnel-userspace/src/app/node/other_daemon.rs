//! Waits until another daemon, such as the one that this daemon replaces, has exited.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::info;

use crate::{
    app::state_dir::{StateDir, StateDirError},
    bpf::{PinDirectory, PinError},
    config::Config,
    error_chain::chain,
};

/// The interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The interval between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// Waits while another process has locked the pin directory or `stateDir`. Other errors end the wait, because
/// loading the data path reports them.
pub(super) async fn wait_until_gone(config: &Config) {
    let mut next_log = Instant::now();
    while let Some(error) = find_other(config) {
        if Instant::now() >= next_log {
            info!(error, "waiting until another culvert process exits");
            next_log += LOG_INTERVAL;
        }
        sleep(CHECK_INTERVAL).await;
    }
}

/// Returns the error that names the directory if another process has locked one.
fn find_other(config: &Config) -> Option<String> {
    if let Err(error @ PinError::Locked { .. }) = PinDirectory::lock(&config.bpf.bpffs) {
        return Some(chain(&error));
    }
    match StateDir::lock(&config.state_dir) {
        Err(error @ StateDirError::Locked { .. }) => Some(chain(&error)),
        Ok(_) | Err(_) => None,
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
        // This directory is not on a BPF file system, which ends only the wait for the pin directory.
        config.bpf.bpffs = directory.path().join("pins");
        let other = StateDir::lock(&config.state_dir).expect("unlocked");

        let waiting = timeout(Duration::from_millis(300), wait_until_gone(&config)).await;
        assert!(waiting.is_err(), "the other daemon runs");
        drop(other);
        let waited = timeout(Duration::from_secs(30), wait_until_gone(&config)).await;
        waited.expect("the other daemon has exited");
    }
}
