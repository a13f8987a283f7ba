//! Ends the connected sockets of backends that are gone, so that whoever waits on one hears of it at
//! once and connects anew.
//!
//! - `stale`: which sockets have outlived their backend
//! - `namespaces`: the network namespaces of running processes
//! - `scan`: one look at all of them
//! - `retry`: how long until a look that failed is repeated
//! - `terminator`: looks whenever a backend has gone
//! - `helper`: the helper that looks into pods where the daemon has no right to
//!
//! A look takes nothing from the one before: what each socket remembers is compared with the
//! backends as they are now. The first one, at the start, ends what an earlier process left.

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

/// Who ends sockets in pods.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Pods {
    /// Nobody, as the config says.
    #[default]
    Off,
    /// The daemon.
    Daemon,
    /// A helper of the daemon's.
    Helper,
    /// Nobody, and why.
    Unreached(String),
}

/// How it is with the ending of sockets.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct View {
    /// Of which protocols sockets are ended; empty if of none.
    pub protocols: Vec<Transport>,
    /// Sockets that were ended since the daemon started.
    pub ended: u64,
    /// Looks that were made, by the daemon and the helper.
    pub looks: u64,
    /// How many of them failed, or failed in part.
    pub failures: u64,
    /// Sockets that seem to have outlived their backend, in namespaces that the last look did not
    /// enter.
    pub left: usize,
    /// How long the last look of the daemon took, in seconds.
    pub last_look_seconds: f64,
    /// Who ends sockets in pods.
    pub pods: Pods,
    /// What failed in the last look of the daemon.
    pub problem: Option<String>,
    /// What failed in the last look of the helper.
    pub helper_problem: Option<String>,
}

impl View {
    /// Counts a look that ended so many sockets.
    const fn count(&mut self, ended: u64, has_failed: bool) {
        self.ended += ended;
        self.looks += 1;
        if has_failed {
            self.failures += 1;
        }
    }
}
