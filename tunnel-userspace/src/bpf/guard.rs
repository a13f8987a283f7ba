//! Attaches the guard to uplinks. The guard is a tc program that drops packets that arrive from outside and
//! are addressed to a steering prefix.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use tunnel_common::{
    steering::SteeringRecord,
    table::{GUARD, Program},
};

use super::{
    attachment::Attachment,
    device_programs::{DeviceError, DevicePrograms, failed},
    sys::MapHandle,
};
use crate::net::UplinkGuard;

/// The index of the entry in the map `host` that holds the address families whose steering prefix has a
/// route.
const ROUTED_FAMILIES: u32 = 1;

/// The programs on uplinks.
pub(super) const ROWS: &[Program] = &[GUARD];

/// The guard, and the devices that it is attached to.
pub struct Guard {
    programs: DevicePrograms,
    host: MapHandle<u32, u64>,
    /// The address families that were last written to `host`.
    routed_families: Option<u64>,
}

impl Guard {
    pub(super) const fn new(programs: DevicePrograms, host: MapHandle<u32, u64>) -> Self {
        Self {
            programs,
            host,
            routed_families: None,
        }
    }

    /// Makes the guard show what it restores in the view of the attached programs.
    #[must_use]
    pub fn with_attachment(mut self, attachment: Attachment) -> Self {
        self.programs.set_attachment(attachment);
        self
    }

    /// Runs the guard program on a frame, and returns the verdict: -1 to pass, 2 to drop.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't run the program.
    pub fn run(&self, frame: &[u8]) -> io::Result<i32> {
        self.programs.run(&GUARD, frame).map(|run| run.verdict)
    }
}

impl UplinkGuard for Guard {
    type Error = DeviceError;

    fn guard_uplinks(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), DeviceError> {
        self.programs.attach(uplinks, reattach)
    }

    fn guarded_links(&self) -> BTreeSet<u32> {
        self.programs.attached_links()
    }

    fn set_steering(&mut self, [v4, v6]: [bool; 2]) -> Result<(), DeviceError> {
        let [v4, v6] = [v4, v6].map(u64::from);
        let families = (v4 * SteeringRecord::ROUTED_V4) | (v6 * SteeringRecord::ROUTED_V6);
        if self.routed_families == Some(families) {
            return Ok(());
        }
        let written = self.host.write(&ROUTED_FAMILIES, &families);
        let written = written.map_err(io::Error::other);
        written.map_err(failed(
            "write the routed address families to the map host".to_owned(),
        ))?;
        self.routed_families = Some(families);
        Ok(())
    }

    fn remove_unused(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), DeviceError> {
        self.programs.remove_unused(uplinks)
    }
}
