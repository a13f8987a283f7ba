//! Runs the programs that translate packets on single frames, without an effect on the node: they read the same service maps
//! as the attached programs, but write to maps of their own, which are removed afterwards.

use std::{io, os::fd::AsFd as _, sync::Arc};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapError, PerCpuArray},
};
use tunnel_common::{
    addr::{Address, Protocol},
    affinity::{Affinity, AffinityKey},
    decide::Traffic,
    flow::{Endpoint, Flow, FlowKey, Role},
    forward::sender,
    locality::{self, Locality},
    packet_link::PacketLink,
    reason::Reason,
    service::SourceRange,
    table::{self, MAPS, Map, Program},
};

use super::{
    data_path::{DataPath, LoadError, OBJECT, release_object},
    globals::{self, Globals},
    pin_directory::PinDirectory,
    programs::{FrameRun, Programs},
    sys::{MapHandle, Plain},
    translation,
};
use crate::reconcile::{MapSizes, ReadError, WriteError};

/// The maps that the programs write. Each trial has its own.
const WRITTEN: [&str; 9] = [
    table::FLOWS.name,
    table::RECENT_FLOWS.name,
    table::RECENT_COUNTS.name,
    table::FRAGMENTS.name,
    table::PACKET_RUNS.name,
    table::PACKET_STATE.name,
    table::REASON_COUNTS.name,
    table::SERVICE_COUNTS.name,
    table::AFFINITY.name,
];

/// The sizes of the maps that a trial has for itself. A flow has three entries.
const SIZE: u32 = 16;

/// The index of the loopback device, on which the kernel runs programs for trials.
const LOOPBACK: u32 = 1;

/// An error that can occur in a trial.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The programs can't be loaded.
    #[error("cannot load the programs for a trial")]
    Load(#[from] LoadError),
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map of the trial can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A program can't be run.
    #[error("cannot run a program")]
    Run(#[source] io::Error),
}

/// Starts trials of the programs that translate packets.
#[derive(Clone, Debug)]
pub struct PacketTrials {
    pins: Arc<PinDirectory>,
    globals: Globals,
}

impl DataPath {
    /// Returns the trials of the programs that translate packets, or `None` if packets are not translated.
    #[must_use]
    pub fn packet_trials(&self, pins: Arc<PinDirectory>) -> Option<PacketTrials> {
        self.has_packets.then(|| PacketTrials {
            pins,
            globals: self.globals.clone(),
        })
    }
}

impl PacketTrials {
    /// Loads the programs for a trial.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened, or if the kernel rejects a program.
    pub fn begin(&self) -> Result<PacketTrial, TrialError> {
        let is_written =
            |map: &&Map| WRITTEN.contains(&map.name) || map.name == table::PACKET_LINKS.name;
        let maps = self.pins.maps();
        let cpus = globals::cpus().map_err(LoadError::Cpus)?;
        let mut loader = EbpfLoader::new();
        self.globals.apply_to(&mut loader);
        for map in MAPS {
            if is_written(&map) {
                loader.map_max_entries(map.name, map.entries(MapSizes::uniform(SIZE), cpus));
            } else {
                loader.map_pin_path(map.name, maps.join(map.name));
            }
        }
        let ebpf = loader.load(OBJECT).map_err(LoadError::Object)?;
        let trial = PacketTrial {
            flows: own(&ebpf, &table::FLOWS)?,
            local_ranges: MapHandle::open(&maps, &table::LOCAL_RANGES)?,
            links: own(&ebpf, &table::PACKET_LINKS)?,
            affinity: own(&ebpf, &table::AFFINITY)?,
            node_flows: MapHandle::open(&maps, &table::FLOWS)?,
            node_links: MapHandle::open(&maps, &table::PACKET_LINKS)?,
            node_affinity: MapHandle::open(&maps, &table::AFFINITY)?,
            programs: Programs::new(ebpf),
        };
        let loaded = trial.programs.load(translation::ROWS);
        release_object();
        loaded?;
        Ok(trial)
    }
}

/// Opens a map that belongs to a trial.
fn own<K, V>(ebpf: &Ebpf, row: &'static Map) -> Result<MapHandle<K, V>, TrialError>
where
    K: Plain,
    V: Plain,
{
    let failed = |source| ReadError {
        map: row.name,
        source,
    };
    let missing = || failed(io::ErrorKind::NotFound.into());
    let map = ebpf.map(row.name).ok_or_else(missing)?;
    let (aya::maps::Map::HashMap(data) | aya::maps::Map::LruHashMap(data)) = map else {
        return Err(missing().into());
    };
    let fd = data.fd().as_fd().try_clone_to_owned().map_err(failed)?;
    Ok(MapHandle::of_map(fd, row)?)
}

/// Programs that translate packets, with maps of their own for what they write.
pub struct PacketTrial {
    programs: Programs,
    flows: MapHandle<FlowKey, Flow>,
    links: MapHandle<u32, PacketLink>,
    local_ranges: MapHandle<u32, SourceRange>,
    affinity: MapHandle<AffinityKey, Affinity>,
    node_flows: MapHandle<FlowKey, Flow>,
    node_links: MapHandle<u32, PacketLink>,
    node_affinity: MapHandle<AffinityKey, Affinity>,
}

impl PacketTrial {
    /// Copies the flow from a client to a frontend, if the node has one. Returns its last entry, with what all of its
    /// entries have seen.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn copy_flow(
        &self,
        client: Endpoint,
        frontend: Endpoint,
        protocol: Protocol,
    ) -> Result<Option<Flow>, TrialError> {
        let key = FlowKey::arriving(client, frontend, protocol);
        let Some(dialled) = self.node_flows.find(&key)? else {
            return Ok(None);
        };
        self.flows.write(&key, &dialled)?;
        let mut found = dialled;
        for role in [Role::FORWARDED, Role::MASQUERADED] {
            let key = found.key_of(role);
            if let Some(entry) = self.node_flows.find(&key)?
                && entry.has_ends_of(&dialled)
            {
                self.flows.write(&key, &entry)?;
                let seen = found.seen.union(entry.seen);
                found = Flow { seen, ..entry };
            }
        }
        Ok(Some(found))
    }

    /// Copies the backend that session affinity remembers for a client.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn copy_affinity(&self, key: &AffinityKey) -> Result<(), TrialError> {
        if let Some(entry) = self.node_affinity.find(key)? {
            self.affinity.write(key, &entry)?;
        }
        Ok(())
    }

    /// Returns the kind of traffic that packets of a sender are which arrive on a link.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn traffic(&self, link: u32, from: Address) -> Result<Traffic, TrialError> {
        let known = self.node_links.find(&link)?;
        let flags = known.map_or(0, |link| link.flags);
        let ranges = self.local_ranges.read_all()?;
        let relation = |index: u32| {
            let mut ranges = ranges.iter();
            let range = ranges.find(|(it, _)| *it == index);
            range.map_or(0, |(_, range)| locality::relation(&from, range))
        };
        let locality = sender::locality_on_link(flags, || Locality::of(relation));
        Ok(sender::traffic_on_link(flags, locality))
    }

    /// Makes the flow of a packet masqueraded that leaves by the link that it has arrived on, if that leads to pods. In a
    /// trial, the kernel doesn't show the program that the links are the same.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn return_to(&self, link: u32, ends: (Endpoint, Endpoint)) -> Result<(), TrialError> {
        let Some(known) = self.node_links.find(&link)? else {
            return Ok(());
        };
        if known.flags & PacketLink::LEADS_TO_PODS == 0 {
            return Ok(());
        }
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            let key = FlowKey::forwarded(ends.0, ends.1, protocol);
            if let Some(flow) = self.flows.find(&key)? {
                let flags = flow.flags | Flow::MUST_MASQUERADE;
                self.flows.write(&key, &Flow { flags, ..flow })?;
            }
        }
        Ok(())
    }

    /// Runs the program for packets that arrive on a link on a frame.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written, or if the kernel can't run the program.
    pub fn arrive(&self, frame: &[u8], link: u32) -> Result<FrameRun, TrialError> {
        self.run(&table::IN, frame, link)
    }

    /// Runs the program for packets that leave by a link on a frame, as [`Self::arrive`] does.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written, or if the kernel can't run the program.
    pub fn leave(&self, frame: &[u8], link: u32) -> Result<FrameRun, TrialError> {
        self.run(&table::OUT, frame, link)
    }

    /// Runs the program for packets that leave by a link on a frame, as if no other link had handed it to this host. The program
    /// may then decide about it as about a packet of this host, and needs to know the link to the backend.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written, or if the kernel can't run the program.
    pub fn leave_host(&self, frame: &[u8], link: u32) -> Result<FrameRun, TrialError> {
        for (index, known) in self.node_links.read_all()? {
            self.links.write(&index, &known)?;
        }
        self.leave(frame, link)
    }

    /// Runs a program on a frame, as if the device on which the kernel runs it were the link.
    fn run(&self, row: &Program, frame: &[u8], link: u32) -> Result<FrameRun, TrialError> {
        match self.node_links.find(&link)? {
            // The result of the program is then the packet, not its way.
            Some(known) => {
                let flags = known.flags & !PacketLink::REDIRECTS;
                self.links
                    .write(&LOOPBACK, &PacketLink { flags, ..known })?;
            }
            None => self.links.remove(&LOOPBACK)?,
        }
        self.programs.run(row, frame).map_err(TrialError::Run)
    }

    /// Returns the reasons that the programs have counted.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn reasons(&self) -> Result<Vec<Reason>, TrialError> {
        let read = self.programs.with_map(table::REASON_COUNTS.name, |map| {
            counted_reasons(map).map_err(io::Error::other)
        });
        let found = read.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()));
        Ok(found.map_err(|source| ReadError {
            map: table::REASON_COUNTS.name,
            source,
        })?)
    }
}

/// Returns the reasons whose counters are not 0.
fn counted_reasons(map: &aya::maps::Map) -> Result<Vec<Reason>, MapError> {
    let counts: PerCpuArray<_, u64> = PerCpuArray::try_from(map)?;
    let mut found = Vec::new();
    for reason in Reason::COUNTED_BY_KERNEL {
        let values = counts.get(&reason.index(), 0)?;
        if values.iter().any(|count| *count > 0) {
            found.push(reason);
        }
    }
    Ok(found)
}
