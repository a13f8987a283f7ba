//! Terminates connected sockets when their backend is removed, so that blocked clients get an error at once
//! and can reconnect to another backend.
//!
//! - `stale`: finds stale sockets, that is, sockets connected to a removed backend
//! - `namespaces`: finds and enters the network namespaces of processes
//! - `scan`: scans for stale sockets once and terminates them
//! - `retry`: determines the delay before a failed scan is retried
//! - `terminator`: starts a scan whenever a backend has been removed
//! - `helper`: runs the helper process, which scans pods if the daemon lacks the privileges to do so
//!
//! A scan keeps no state: it compares each socket's translation with the current backends. The first scan, at
//! startup, also terminates sockets whose backends were removed while no daemon was running.

mod helper;
mod namespaces;
mod retry;
mod scan;
mod stale;
mod terminator;

use serde::{Deserialize, Serialize};

pub use self::{
    helper::run_helper,
    namespaces::{is_in_initial_pid_namespace, obstacle_to_entering},
    stale::{TranslatedSocket, TranslationMaps},
    terminator::{Terminator, TerminatorSettings, Transport},
};

/// The process that terminates sockets in pods.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PodTerminator {
    /// No process: the config disables terminating sockets in pods.
    #[default]
    Off,
    /// The daemon itself.
    Daemon,
    /// The helper process.
    Helper,
    /// No process: no helper is connected, and the daemon can't enter the pods' network namespaces, for the
    /// reason given.
    Unreached(String),
}

/// The state of socket termination, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TerminatorView {
    /// The protocols whose sockets are terminated.
    pub protocols: Vec<Transport>,
    /// The number of sockets terminated since the daemon started.
    pub terminated: u64,
    /// The number of scans by the daemon and the helper.
    pub scans: u64,
    /// The number of scans that failed, completely or in part.
    pub failed_scans: u64,
    /// The number of sockets that appear to be stale but are in namespaces that the last scan did not enter.
    pub stale: usize,
    /// The duration of the daemon's last scan, in seconds.
    pub last_scan_seconds: f64,
    /// The process that terminates sockets in pods.
    pub pods: PodTerminator,
    /// The error from the daemon's last scan, if there was one.
    pub problem: Option<String>,
    /// The error from the helper's last scan, if there was one.
    pub helper_problem: Option<String>,
}

impl TerminatorView {
    /// Counts a scan and the sockets that it terminated.
    const fn count(&mut self, ended: u64, has_failed: bool) {
        self.terminated += ended;
        self.scans += 1;
        if has_failed {
            self.failed_scans += 1;
        }
    }
}
