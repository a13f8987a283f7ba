//! Ends the connected sockets of removed backends, so that blocked clients get an error at once and
//! connect again.
//!
//! - `stale`: the sockets that have outlived their backend
//! - `namespaces`: the network namespaces of running processes
//! - `scan`: one scan of all their sockets
//! - `retry`: the delay before a failed scan is repeated
//! - `terminator`: scans whenever a backend was removed
//! - `helper`: the helper that scans pods if the daemon lacks the privilege
//!
//! A scan has no state: the translation of each socket is compared with the present backends. The first
//! scan, at the start, ends sockets that an earlier process left.

mod helper;
mod namespaces;
mod retry;
mod scan;
mod stale;
mod terminator;

use serde::{Deserialize, Serialize};

pub use self::{
    helper::help,
    namespaces::obstacle,
    stale::{Memory, Remembered},
    terminator::{Settings, Terminator, Transport},
};

/// The process that ends sockets in pods.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Pods {
    /// None, since the config disables it.
    #[default]
    Off,
    /// The daemon.
    Daemon,
    /// The helper of the daemon.
    Helper,
    /// None, since the daemon can't enter pods; with the cause.
    Unreached(String),
}

/// The state of ending sockets.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct View {
    /// The protocols whose sockets are ended; empty if none.
    pub protocols: Vec<Transport>,
    /// The number of sockets that were terminated since the daemon started.
    pub terminated: u64,
    /// The number of scans, by the daemon and the helper.
    pub scans: u64,
    /// The number of scans that failed, at least in part.
    pub failed_scans: u64,
    /// The number of sockets that seem to have outlived their backend, in namespaces that the last scan
    /// did not enter.
    pub stale: usize,
    /// The duration of the last scan of the daemon, in seconds.
    pub last_scan_seconds: f64,
    /// The process that ends sockets in pods.
    pub pods: Pods,
    /// The failure of the last scan of the daemon.
    pub problem: Option<String>,
    /// The failure of the last scan of the helper.
    pub helper_problem: Option<String>,
}

impl View {
    /// Counts a scan, and the sockets that it ended.
    const fn count(&mut self, ended: u64, has_failed: bool) {
        self.terminated += ended;
        self.scans += 1;
        if has_failed {
            self.failed_scans += 1;
        }
    }
}
