//! Ends connected sockets when their backend is removed, so that blocked clients get an error at once and
//! can connect to another backend.
//!
//! - `stale`: finds stale sockets, which are connected to a removed backend
//! - `namespaces`: finds and enters the network namespaces of processes
//! - `scan`: one scan for stale sockets, which ends them
//! - `retry`: the delay before a failed scan is repeated
//! - `terminator`: starts a scan whenever a backend was removed
//! - `helper`: the helper process that scans pods if the daemon lacks the privilege
//!
//! A scan keeps no state: it compares the translation of each socket with the current backends. The first
//! scan, at the start, also ends sockets of backends that were removed while no daemon ran.

mod helper;
mod namespaces;
mod retry;
mod scan;
mod stale;
mod terminator;

use serde::{Deserialize, Serialize};

pub use self::{
    helper::run_helper,
    namespaces::obstacle_to_entering,
    stale::{TranslatedSocket, TranslationMaps},
    terminator::{Terminator, TerminatorSettings, Transport},
};

/// The process that ends sockets in pods.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PodTerminator {
    /// None, since the config disables ending sockets in pods.
    #[default]
    Off,
    /// The daemon.
    Daemon,
    /// The helper process.
    Helper,
    /// None, since the daemon can't enter the network namespaces of pods; with the cause.
    Unreached(String),
}

/// The JSON view of ending sockets, for status.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TerminatorView {
    /// The protocols whose sockets are ended; empty if none.
    pub protocols: Vec<Transport>,
    /// The number of sockets that were ended since the daemon started.
    pub terminated: u64,
    /// The number of scans, by the daemon and the helper.
    pub scans: u64,
    /// The number of scans that failed completely or in part.
    pub failed_scans: u64,
    /// The number of sockets that seem to be stale, in namespaces that the last scan did not enter.
    pub stale: usize,
    /// The duration of the daemon's last scan, in seconds.
    pub last_scan_seconds: f64,
    /// The process that ends sockets in pods.
    pub pods: PodTerminator,
    /// The error of the daemon's last scan.
    pub problem: Option<String>,
    /// The error of the helper's last scan.
    pub helper_problem: Option<String>,
}

impl TerminatorView {
    /// Adds a scan and the number of sockets that it ended.
    const fn count(&mut self, ended: u64, has_failed: bool) {
        self.terminated += ended;
        self.scans += 1;
        if has_failed {
            self.failed_scans += 1;
        }
    }
}
