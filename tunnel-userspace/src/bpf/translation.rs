//! Attaches the programs that translate packets to links, and stores what they must know about each link.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, iter,
    net::IpAddr,
    path::{Path, PathBuf},
};

use tunnel_common::{
    addr::Address,
    locality,
    packet_link::PacketLink,
    service::SourceRange,
    table::{self, IN, OUT, Program},
};

use super::{
    attachment::Attachment,
    data_path::{self, OBJECT},
    device_programs::{DeviceError, DevicePrograms, failed},
    globals::Globals,
    probe::Features,
    programs::{FrameRun, Programs},
    sys::MapHandle,
};
use crate::net::{LocalOnLink, PacketPrograms, SenderRanges, TranslatedLink};

/// The program that restores the source of replies is attached before the one that begins flows.
pub(super) const ROWS: &[Program] = &[OUT, IN];

/// The programs that translate packets, and the devices that they are attached to.
pub struct Translation {
    programs: DevicePrograms,
    without_ethernet: WithoutEthernet,
    links: MapHandle<u32, PacketLink>,
    ranges: SenderRangeMaps,
}

/// The maps with the addresses of senders.
pub(super) struct SenderRangeMaps {
    pub(super) local: MapHandle<u32, SourceRange>,
    pub(super) forwarded: MapHandle<u32, SourceRange>,
}

impl Translation {
    pub(super) fn new(
        (programs, without_ethernet): (DevicePrograms, WithoutEthernet),
        packet_links: MapHandle<u32, PacketLink>,
        ranges: SenderRangeMaps,
    ) -> Self {
        Self {
            programs,
            without_ethernet,
            links: packet_links,
            ranges,
        }
    }

    /// Makes the programs show what they restore in the view of the attached programs.
    #[must_use]
    pub fn with_attachment(mut self, attachment: Attachment) -> Self {
        self.without_ethernet.attachment = Some(attachment.clone());
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

/// The same programs for links whose packets have no Ethernet header. They are loaded when there is such a link.
pub(super) struct WithoutEthernet {
    maps: PathBuf,
    globals: Globals,
    links: PathBuf,
    features: Features,
    attachment: Option<Attachment>,
    programs: Option<DevicePrograms>,
}

impl WithoutEthernet {
    pub(super) fn new(
        (maps, globals): (PathBuf, Globals),
        (links, features): (PathBuf, Features),
    ) -> Self {
        Self {
            maps,
            globals,
            links,
            features,
            attachment: None,
            programs: None,
        }
    }

    fn attach(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), DeviceError> {
        if uplinks.is_empty() && self.programs.is_none() {
            return Ok(());
        }
        self.loaded()?.attach(uplinks, reattach)
    }

    /// Returns the programs, which are loaded if they have not been yet.
    fn loaded(&mut self) -> Result<&mut DevicePrograms, DeviceError> {
        let programs = match self.programs.take() {
            Some(programs) => programs,
            None => self.load()?,
        };
        Ok(self.programs.insert(programs))
    }

    fn load(&self) -> Result<DevicePrograms, DeviceError> {
        let failed = || failed("load the programs for links without an Ethernet header".to_owned());
        let ebpf = data_path::loader(&self.maps, &self.globals).load(OBJECT);
        let programs = Programs::new(ebpf.map_err(io::Error::other).map_err(failed())?);
        let loaded = programs.load(ROWS);
        loaded.map_err(io::Error::other).map_err(failed())?;
        let pins = (self.links.clone(), self.features);
        let mut programs = DevicePrograms::new(ROWS, programs, None, pins);
        if let Some(attachment) = &self.attachment {
            programs.set_attachment(attachment.clone());
        }
        Ok(programs)
    }
}

impl PacketPrograms for Translation {
    type Error = DeviceError;

    fn attach(
        &mut self,
        with_ethernet: &BTreeMap<u32, String>,
        without_ethernet: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), DeviceError> {
        let attached = self.programs.attach(with_ethernet, reattach);
        let others = self.without_ethernet.attach(without_ethernet, reattach);
        attached.and(others)
    }

    fn load_without_ethernet(&mut self) -> Result<(), DeviceError> {
        self.without_ethernet.loaded().map(drop)
    }

    fn attached_links(&self) -> BTreeSet<u32> {
        self.programs.attached_links()
    }

    fn complete_links(&self) -> BTreeSet<u32> {
        let others = self.without_ethernet.programs.iter();
        let others = others.flat_map(DevicePrograms::complete_links);
        let links = self.programs.complete_links().iter().chain(others);
        links.copied().collect()
    }

    fn remove_unused(&mut self, links: &BTreeMap<u32, String>) -> Result<(), DeviceError> {
        self.programs.remove_unused(links)
    }

    fn others(&self, links: &BTreeMap<u32, String>) -> Vec<String> {
        self.programs.others(links)
    }

    fn set_ranges(&mut self, ranges: &SenderRanges) -> Result<(), DeviceError> {
        let local = write_ranges(&self.ranges.local, &ranges.local);
        let forwarded = write_ranges(&self.ranges.forwarded, &ranges.forwarded);
        let failed = |name: &str| failed(format!("write the map {name}"));
        local.map_err(failed(table::LOCAL_RANGES.name))?;
        forwarded.map_err(failed(table::FORWARD_RANGES.name))
    }

    fn forget_other_links(&mut self, links: &BTreeSet<u32>) -> Result<(), DeviceError> {
        let removed = remove_other_links(&self.links, links);
        removed.map_err(failed("write the map packet_links".to_owned()))
    }

    fn set_links(&mut self, wanted: &BTreeMap<u32, TranslatedLink>) -> Result<(), DeviceError> {
        let failed = || failed("write the map packet_links".to_owned());
        let stored = self.links.read_all();
        let stored: BTreeMap<_, _> = stored
            .map_err(io::Error::other)
            .map_err(failed())?
            .into_iter()
            .collect();
        for (link, state) in wanted {
            let value = value_of(state);
            if stored.get(link) != Some(&value) {
                let written = self.links.write(link, &value);
                written.map_err(io::Error::other).map_err(failed())?;
            }
        }
        Ok(())
    }
}

/// Removes all links from the map in a directory, if it exists, so that no flow begins by the programs that use it.
pub(super) fn forget_links(maps: &Path) -> io::Result<()> {
    if !maps.join(table::PACKET_LINKS.name).exists() {
        return Ok(());
    }
    let links = MapHandle::open(maps, &table::PACKET_LINKS).map_err(io::Error::other)?;
    remove_other_links(&links, &BTreeSet::new())
}

fn remove_other_links(map: &MapHandle<u32, PacketLink>, kept: &BTreeSet<u32>) -> io::Result<()> {
    let stored = map.read_all().map_err(io::Error::other)?;
    for (link, _) in stored.iter().filter(|(link, _)| !kept.contains(link)) {
        map.remove(link).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Writes the ranges that have changed. The remaining entries become unused.
fn write_ranges(map: &MapHandle<u32, SourceRange>, ranges: &[SourceRange]) -> io::Result<()> {
    let stored = map.read_all().map_err(io::Error::other)?;
    let wanted = ranges.iter().chain(iter::repeat(&locality::UNUSED));
    for ((index, old), new) in stored.iter().zip(wanted) {
        if old != new {
            map.write(index, new).map_err(io::Error::other)?;
        }
    }
    if ranges.len() > stored.len() {
        let limit = format!("there is room for {} ranges", stored.len());
        return Err(io::Error::other(limit));
    }
    Ok(())
}

/// Returns the value of the map `packet_links` for a link.
fn value_of(link: &TranslatedLink) -> PacketLink {
    let address = |ip: Option<IpAddr>| ip.map_or(Address::UNSPECIFIED, Address::from_ip);
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    PacketLink {
        v4: address(link.addresses.v4.map(IpAddr::V4)),
        v6: address(link.addresses.v6.map(IpAddr::V6)),
        flags: flag(link.leads_to_pods, PacketLink::LEADS_TO_PODS)
            | match link.local_senders {
                LocalOnLink::InRanges => 0,
                LocalOnLink::PresumedLocal => PacketLink::PRESUMED_LOCAL,
                LocalOnLink::All => PacketLink::LOCAL_SENDERS,
            }
            | flag(link.known_flows_only, PacketLink::KNOWN_FLOWS_ONLY)
            | flag(link.redirects, PacketLink::REDIRECTS)
            | flag(link.has_no_ethernet, PacketLink::WITHOUT_ETHERNET),
    }
}
