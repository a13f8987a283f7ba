//! Errors from looking for the programs of an earlier Culvert.

use std::{io, path::PathBuf, time::Duration};

use super::{heartbeat::PinDirectoryId, path::PathError, pin_directory::PinError};

/// An error that can occur when looking for programs that are not pinned.
#[derive(Debug, thiserror::Error)]
pub enum StrayError {
    /// The cgroup can't be opened.
    #[error(transparent)]
    Cgroup(#[from] PathError),
    /// The pin directory can't be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The kernel refused to list or open programs, links or maps.
    #[error("cannot inspect the programs on cgroup {cgroup}")]
    Inspect {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The programs belong to a Culvert that is running.
    #[error(
        "another culvert (process {pid}) has its programs on cgroup {cgroup}; stop it first, or set bpf.cgroup to \
         another cgroup"
    )]
    Running {
        /// The process.
        pid: u32,
        /// The cgroup's directory.
        cgroup: PathBuf,
    },
    /// The maps of the programs have the heartbeat of a Culvert whose process can't be seen.
    #[error(
        "another culvert has its programs on cgroup {cgroup}, and runs where this process can't see it, such as in \
         another PID namespace (its pin directory has {daemon}; `bpftool map show id {map}` shows its process); stop \
         it first, or set bpf.cgroup to another cgroup. If it was killed, try again in {}",
        whole_seconds(*valid_for)
    )]
    RunningElsewhere {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The number that identifies the daemon's pin directory.
        daemon: PinDirectoryId,
        /// The number of a map that the daemon has open.
        map: u32,
        /// The time until the daemon counts as stopped.
        valid_for: Duration,
    },
    /// The pin directory contains pins of a Culvert that runs with another pin directory.
    #[error(
        "another culvert is running with the maps that are pinned in {pins} (its own pin directory has {daemon}). If it \
         was killed, try again in {}. If it still runs then, `rm -r {pins}` removes the pins in this directory, and \
         detaches nothing",
        whole_seconds(*valid_for)
    )]
    RunningWithPins {
        /// The pin directory.
        pins: PathBuf,
        /// The number that identifies the daemon's pin directory.
        daemon: PinDirectoryId,
        /// The time until the daemon counts as stopped.
        valid_for: Duration,
    },
    /// Another process has locked a directory in which the programs are pinned.
    #[error(
        "another culvert has its programs on cgroup {cgroup}, and has locked its pin directory {pins}; stop it first, \
         or set bpf.cgroup to another cgroup"
    )]
    Locked {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The locked pin directory.
        pins: PathBuf,
    },
    /// The programs use maps of a layout that this version does not know.
    #[error(
        "cgroup {cgroup} has programs of a culvert with another layout of maps ({map} differs); run that culvert, or \
         first detach its programs by its `culvert cleanup`"
    )]
    Layout {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The map that differs.
        map: String,
    },
    /// Programs that this process may not inspect are attached to every hook.
    #[error(
        "every hook of cgroup {cgroup} has a program that is not pinned in {pins}, and this process lacks \
         CAP_SYS_ADMIN to inspect them; if they belong to an earlier culvert, run `culvert prepare` as root to take \
         them over, or `culvert cleanup` to detach them"
    )]
    Unknown {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The pin directory.
        pins: PathBuf,
    },
}

/// Formats a duration in seconds, rounded up.
fn whole_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs() + 1)
}
