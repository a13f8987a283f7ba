//! Attaches the programs that translate packets to uplinks, and stores the addresses that stand for clients.

use std::{collections::BTreeMap, io, iter};

use tunnel_common::{
    addr::Address,
    flow::LinkAddresses,
    locality,
    service::SourceRange,
    table::{IN, OUT, Program},
};

use super::{
    attachment::Attachment,
    sys::MapHandle,
    uplink_programs::{FrameRun, UplinkError, UplinkPrograms, failed},
};
use crate::net::{AddressPair, UplinkTranslation};

/// The program that restores the source of replies is attached before the one that begins flows.
pub(super) const ROWS: &[Program] = &[OUT, IN];

/// The programs that translate packets, and the devices that they are attached to.
pub struct Translation {
    programs: UplinkPrograms,
    addresses: MapHandle<u32, LinkAddresses>,
    local_ranges: MapHandle<u32, SourceRange>,
}

impl Translation {
    pub(super) const fn new(
        programs: UplinkPrograms,
        addresses: MapHandle<u32, LinkAddresses>,
        local_ranges: MapHandle<u32, SourceRange>,
    ) -> Self {
        Self {
            programs,
            addresses,
            local_ranges,
        }
    }

    /// Makes the programs show what they restore in the view of the attached programs.
    #[must_use]
    pub fn with_attachment(mut self, attachment: Attachment) -> Self {
        self.programs.set_attachment(attachment);
        self
    }

    /// Runs the program for packets that arrive on a frame.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't run the program.
    pub fn arrive(&self, frame: &[u8]) -> io::Result<FrameRun> {
        self.programs.run(&IN, frame)
    }

    /// Runs the program for packets that leave on a frame, as [`Self::arrive`] does.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't run the program.
    pub fn leave(&self, frame: &[u8]) -> io::Result<FrameRun> {
        self.programs.run(&OUT, frame)
    }
}

impl UplinkTranslation for Translation {
    type Error = UplinkError;

    fn attach(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), UplinkError> {
        self.programs.attach(uplinks, reattach)
    }

    fn remove_unused(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), UplinkError> {
        self.programs.remove_unused(uplinks)
    }

    fn others(&self, uplinks: &BTreeMap<u32, String>) -> Vec<String> {
        self.programs.others(uplinks)
    }

    fn set_local_ranges(&mut self, ranges: &[SourceRange]) -> Result<(), UplinkError> {
        let failed = || failed("write the map local_ranges".to_owned());
        let stored = self.local_ranges.read_all();
        let stored = stored.map_err(io::Error::other).map_err(failed())?;
        let wanted = ranges.iter().chain(iter::repeat(&locality::UNUSED));
        for ((index, old), new) in stored.iter().zip(wanted) {
            if old != new {
                let written = self.local_ranges.write(index, new);
                written.map_err(io::Error::other).map_err(failed())?;
            }
        }
        if ranges.len() > stored.len() {
            let limit = format!("there is room for {} ranges", stored.len());
            return Err(failed()(io::Error::other(limit)));
        }
        Ok(())
    }

    fn set_addresses(&mut self, wanted: &BTreeMap<u32, AddressPair>) -> Result<(), UplinkError> {
        let failed = || failed("write the map link_addresses".to_owned());
        let stored = self.addresses.read_all();
        let stored: BTreeMap<_, _> = stored
            .map_err(io::Error::other)
            .map_err(failed())?
            .into_iter()
            .collect();
        for link in stored.keys().filter(|link| !wanted.contains_key(link)) {
            let removed = self.addresses.remove(link);
            removed.map_err(io::Error::other).map_err(failed())?;
        }
        for (link, pair) in wanted {
            let value = LinkAddresses {
                v4: pair
                    .v4
                    .map_or(Address::UNSPECIFIED, |ip| Address::from_ip(ip.into())),
                v6: pair
                    .v6
                    .map_or(Address::UNSPECIFIED, |ip| Address::from_ip(ip.into())),
            };
            if stored.get(link) != Some(&value) {
                let written = self.addresses.write(link, &value);
                written.map_err(io::Error::other).map_err(failed())?;
            }
        }
        Ok(())
    }
}
