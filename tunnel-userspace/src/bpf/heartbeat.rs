//! The daemon's heartbeat, which it writes to the maps that its programs use. From these maps, another Culvert can
//! recognise that the daemon is running, even in another PID namespace and with another pin directory.

use std::{fmt, os::fd::OwnedFd, path::Path, sync::Arc, time::Duration};

use tunnel_common::{
    steering::{self, SteeringRecord},
    table,
};

use super::{pin_directory::PinDirectory, sys::MapHandle};
use crate::{
    clock::since_boot,
    error_chain::chain,
    reconcile::{ReadError, WriteError},
};

/// The record that contains the heartbeat: the last one in the map `steered`.
#[derive(Debug)]
pub(super) struct Heartbeat {
    steered: MapHandle<u32, SteeringRecord>,
}

/// A daemon that uses the maps, and whose heartbeat is still valid.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RunningDaemon {
    /// The number that identifies the daemon's pin directory.
    pub(super) pins: PinDirectoryId,
    /// The time after which the heartbeat is no longer valid, unless the daemon renews it.
    pub(super) valid_for: Duration,
}

/// The device number and the inode number of a pin directory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PinDirectoryId(u64);

impl PinDirectoryId {
    /// Combines the numbers from `stat`. The kernel's numbers for a BPF file system and its inodes have 32 bits.
    pub(super) const fn new(device: u64, inode: u64) -> Self {
        const LOW: u64 = 0xffff_ffff;
        Self((device & LOW) << 32 | inode & LOW)
    }
}

impl fmt::Display for PinDirectoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, inode) = (self.0 >> 32, self.0 & 0xffff_ffff);
        let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
        write!(f, "inode {inode} on device {major}:{minor}")
    }
}

impl Heartbeat {
    /// Opens the map in a directory of maps.
    pub(super) fn open(maps: &Path) -> Result<Self, ReadError> {
        let steered = MapHandle::open(maps, &table::STEERED)?;
        Ok(Self { steered })
    }

    /// Uses a map that is already open.
    pub(super) fn of_map(map: OwnedFd) -> Result<Self, ReadError> {
        let steered = MapHandle::of_map(map, &table::STEERED)?;
        Ok(Self { steered })
    }

    fn index(&self) -> u32 {
        self.steered.entries().saturating_sub(1)
    }

    /// Makes the daemon with this pin directory count as running for some time. If the time is zero, the daemon has
    /// stopped.
    pub(super) fn write(
        &self,
        pins: PinDirectoryId,
        valid_for: Duration,
    ) -> Result<(), HeartbeatError> {
        let index = self.index();
        let until = (since_boot() + valid_for).as_nanos();
        let heartbeat = steering::Heartbeat {
            valid_until: if valid_for.is_zero() {
                0
            } else {
                u64::try_from(until).unwrap_or(u64::MAX)
            },
            pin_directory: pins.0,
        };
        let record = self.steered.get(&index)?.with_heartbeat(heartbeat);
        Ok(self.steered.write(&index, &record)?)
    }

    /// Returns the pin directory of the daemon that last used the maps.
    pub(super) fn last_pins(&self) -> Result<Option<PinDirectoryId>, ReadError> {
        let last = self.steered.get(&self.index())?.heartbeat();
        Ok(Some(PinDirectoryId(last.pin_directory)).filter(|_| last.pin_directory != 0))
    }

    /// Returns the daemon that uses the maps, unless it has stopped. A daemon with the pin directory `own` does not
    /// count, because the caller has locked that directory.
    pub(super) fn running(
        &self,
        own: Option<PinDirectoryId>,
    ) -> Result<Option<RunningDaemon>, ReadError> {
        let last = self.steered.get(&self.index())?.heartbeat();
        let pins = PinDirectoryId(last.pin_directory);
        let valid_for = Duration::from_nanos(last.valid_until).saturating_sub(since_boot());
        let is_running = !valid_for.is_zero() && own != Some(pins);
        Ok(is_running.then_some(RunningDaemon { pins, valid_for }))
    }
}

/// Writes this daemon's heartbeat. When the value is dropped, the daemon counts as stopped.
#[derive(Debug)]
pub struct DaemonHeartbeat {
    heartbeat: Heartbeat,
    pins: Arc<PinDirectory>,
}

impl DaemonHeartbeat {
    /// Uses the maps in a directory, for a daemon with this pin directory.
    pub(super) fn open(maps: &Path, pins: Arc<PinDirectory>) -> Result<Self, ReadError> {
        let heartbeat = Heartbeat::open(maps)?;
        Ok(Self { heartbeat, pins })
    }

    /// Makes other processes recognise by the maps that this daemon is running, until `valid_for` has passed. A failure
    /// is only logged, because then the daemon is merely harder to recognise.
    pub fn beat(&self, valid_for: Duration) {
        let written = self.pins.id().map_err(|error| chain(&error));
        let written = written.and_then(|pins| {
            let written = self.heartbeat.write(pins, valid_for);
            written.map_err(|error| chain(&error))
        });
        if let Err(error) = written {
            tracing::warn!(error, "cannot write the daemon's heartbeat");
        }
    }
}

impl Drop for DaemonHeartbeat {
    fn drop(&mut self) {
        self.beat(Duration::ZERO);
    }
}

/// An error from reading or writing the heartbeat.
#[derive(Debug, thiserror::Error)]
pub(super) enum HeartbeatError {
    /// The record can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The record can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}
