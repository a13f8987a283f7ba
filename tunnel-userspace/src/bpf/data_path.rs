//! Loads the object that contains the kernel programs, using the pinned maps.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aya::{Ebpf, EbpfError, EbpfLoader, programs::ProgramError};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use tunnel_common::{
    flow::FROZEN_UNTIL,
    table::{self, MAPS, PROGRAMS, Program},
};

use super::{
    attach::{self, AttachError, Attached},
    attachment::Attachment,
    device_programs::{DeviceError, DevicePrograms, failed},
    flow_map::KernelFlows,
    globals::{self, Globals, ProgramSettings},
    guard::{self, Guard},
    heartbeat::DaemonHeartbeat,
    maps::{Counters, KernelAddresses, KernelMaps, KernelSteering},
    migration::{self, StartMaps},
    moving_flows::MovingFlows,
    open_connections::OpenConnections,
    path,
    pin_directory::{PinDirectory, PinError},
    probe::Features,
    programs::{self, Programs},
    sys::{self, MapHandle},
    translation::{self, SenderRangeMaps, Translation, WithoutEthernet},
};
use crate::reconcile::{
    AdoptError, ClusterAddresses, GracePeriod, MapSizes, ReadError, WriteError,
};

/// The object that contains the kernel programs, compiled by the build script.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/culvert.bpf.o"));

/// Releases the memory of [`OBJECT`] after programs have been loaded. It is read again if it is needed.
pub(super) fn release_object() {
    sys::release_pages(OBJECT);
}

/// Releases the memory of what only the start needs: [`OBJECT`], and most of the daemon's code. It is read again if it is
/// needed.
pub fn release_start() {
    release_object();
    sys::release_code();
}

/// An error that can occur when loading the data path.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The pin directory can't be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The existing maps can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The new maps can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The contents of the existing maps can't be migrated.
    #[error(transparent)]
    Migrate(#[from] AdoptError),
    /// The CPUs can't be counted.
    #[error("cannot count the CPUs")]
    Cpus(#[source] io::Error),
    /// The object's maps can't be opened or created.
    #[error(
        "cannot create the maps (before Linux 5.11, `Operation not permitted` may mean that the limit \
         of locked memory, ulimit -l, is too low; raising it needs CAP_SYS_RESOURCE)"
    )]
    Object(#[source] EbpfError),
    /// A program is missing from the object, or has an unexpected type.
    #[error("the compiled object has no program {program} of the expected type")]
    NoProgram {
        /// The name of the program.
        program: &'static str,
    },
    /// The verifier rejected a program.
    #[error("the kernel rejects program {program}")]
    Program {
        /// The name of the program.
        program: &'static str,
        /// The kernel's error.
        #[source]
        source: ProgramError,
    },
}

/// Raises the limit on locked memory; returns true on success. Before Linux 5.11, maps and programs count
/// against this limit, even for root; on later kernels they don't.
pub(super) fn raise_memory_limit() -> bool {
    let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    if let Err(error) = raised {
        tracing::debug!(%error, "cannot raise the limit of locked memory");
    }
    raised.is_ok()
}

/// Programs that are loaded with the pinned maps and ready to be attached.
pub struct DataPath {
    pub(super) programs: Programs,
    /// The logging variant of a program for uplinks, which replaces the plain one.
    pub(super) logging_device_program: Option<(&'static Program, Programs)>,
    pub(super) maps: PathBuf,
    pub(super) links: PathBuf,
    pub(super) globals: Globals,
    open_connections: Arc<OpenConnections>,
    are_counts_merged: bool,
    moving_flows: Option<MovingFlows>,
    pub(super) has_packets: bool,
    sizes: MapSizes,
    features: Features,
    /// True if no maps existed before and this process created them.
    is_new: bool,
    new_maps: Option<NewMaps>,
}

/// New maps that have not been promoted yet. They are empty if the old maps have an older layout.
#[derive(Clone, Copy, Debug)]
struct NewMaps {
    is_empty: bool,
}

impl DataPath {
    /// Checks the pins, opens or creates the maps, and loads the programs. Attaches nothing.
    ///
    /// If the existing maps have other sizes or an older layout, creates new maps next to them;
    /// [`Self::promote`] must then be called before [`Self::attach`]. Keeps the old sizes if the new ones
    /// can't be applied. `now` is the time since boot.
    ///
    /// # Errors
    ///
    /// Returns an error if a pin does not belong to Culvert, or if the kernel rejects the maps or programs.
    pub fn load(
        pins: &PinDirectory,
        wanted: MapSizes,
        features: Features,
        settings: &ProgramSettings,
        now: Duration,
    ) -> Result<Self, LoadError> {
        let start = migration::plan(pins, wanted, now)?;
        let globals = Globals::new(features, settings);
        let has_packets = settings.packets.is_some();
        let load = |start: &StartMaps| {
            Self::load_on(start, pins, features, (globals.clone(), has_packets), now)
        };
        let loaded = load(&start);
        match (loaded, start.migration().and_then(|it| it.old_sizes)) {
            (Err(error), Some(old_sizes)) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    error,
                    "cannot create maps of the new sizes; the maps keep their sizes"
                );
                pins.discard_next()?;
                load(&StartMaps::Existing(old_sizes))
            }
            (loaded, _) => loaded,
        }
    }

    fn load_on(
        start: &StartMaps,
        pins: &PinDirectory,
        features: Features,
        (globals, has_packets): (Globals, bool),
        now: Duration,
    ) -> Result<Self, LoadError> {
        let (directory, sizes) = match start {
            StartMaps::New(sizes) | StartMaps::Existing(sizes) => (pins.maps(), *sizes),
            StartMaps::Migrate(migration) => (pins.next_maps(), migration.sizes),
        };
        pins.create_directories(&directory)?;
        let migration = start.migration();
        if let Some(migration) = migration {
            migration.pin_kept_maps(&directory)?;
        }
        let programs = Programs::new(load_object(&directory, sizes, &globals)?);
        if let Some(migration) = migration {
            migration.fill(&directory, now)?;
        }
        let moving_flows = match migration {
            Some(migration) if has_packets => migration.move_flows(&directory),
            None if has_packets => MovingFlows::resume(pins, &directory)?,
            // Without programs for packets, nothing needs the flows.
            Some(_) | None => None,
        };
        let open_connections =
            OpenConnections::open(&directory, &pins.replaced(&directory, table::CONNS.name)?)?;
        Ok(Self {
            logging_device_program: None,
            programs,
            open_connections: Arc::new(open_connections),
            are_counts_merged: false,
            moving_flows,
            has_packets,
            maps: directory,
            links: pins.links(),
            globals,
            sizes,
            features,
            is_new: matches!(start, StartMaps::New(_)),
            new_maps: migration.map(|migration| NewMaps {
                is_empty: migration.is_empty(),
            }),
        })
    }

    /// Returns true if the maps are empty while the attached programs still use older ones. The programs may
    /// then be replaced only after the sources have delivered all objects.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.new_maps, Some(NewMaps { is_empty: true }))
    }

    /// Replaces the existing maps with the new ones, if any were created. The daemon then finds the new ones
    /// the next time it starts.
    ///
    /// # Errors
    ///
    /// Returns an error if a directory can't be renamed or removed.
    pub fn promote(&mut self, pins: &PinDirectory) -> Result<(), PinError> {
        if self.new_maps.is_some() {
            pins.promote()?;
            self.maps = pins.maps();
            self.new_maps = None;
        }
        Ok(())
    }

    /// Waits until no replaced program is running any more, and then adds the counts in replaced maps to
    /// those in the new ones. Must be called after [`Self::attach`], and before the replaced maps are
    /// removed.
    ///
    /// # Errors
    ///
    /// Returns an error if waiting for a grace period fails.
    pub fn merge_replaced_counts(&mut self, grace: &impl GracePeriod) -> io::Result<()> {
        if !self.open_connections.is_merged() {
            grace.wait()?;
            self.open_connections.merge_replaced();
        }
        self.are_counts_merged = true;
        Ok(())
    }

    /// Removes the replaced maps, except that of flows. Must be called right before the programs for packets are replaced: a
    /// process that starts after this one was killed concludes that some of them use the new map. If the counts in the
    /// replaced maps have not been added to those in the new maps, removes the map of flows only: the next process would move
    /// the flows again.
    ///
    /// # Errors
    ///
    /// Returns an error if a file or directory can't be removed.
    pub fn remove_all_but_replaced_flows(&self, pins: &PinDirectory) -> Result<(), PinError> {
        if self.are_counts_merged {
            pins.remove_beside_replaced(&self.maps, table::FLOWS.name)
        } else {
            pins.remove_replaced(&self.maps, table::FLOWS.name)
        }
    }

    /// Removes the replaced maps, unless their counts have not been added to those in the new maps. The map of flows is removed in
    /// any case.
    ///
    /// # Errors
    ///
    /// Returns an error if a file or directory can't be removed.
    pub fn remove_replaced_maps(&self, pins: &PinDirectory) -> Result<(), PinError> {
        pins.remove_replaced(&self.maps, table::FLOWS.name)?;
        if self.are_counts_merged {
            pins.remove_unused()?;
        }
        Ok(())
    }

    /// Keeps the programs for packets of an earlier process from beginning flows, if they use replaced maps, which nobody updates
    /// any more. Their connections go on, unless it was of a version with other maps of links: then the programs are detached.
    ///
    /// # Errors
    ///
    /// Returns an error if the replaced maps can't be listed, or if a program can't be detached.
    pub fn stop_outdated_translation(&self, pins: &PinDirectory) -> Result<(), DeviceError> {
        let replaced = pins.replaced_directories().map_err(io::Error::other);
        let replaced = replaced.map_err(failed("list the replaced maps".to_owned()))?;
        if replaced.is_empty() {
            return Ok(());
        }
        let mut directories = replaced.iter().chain([&self.maps]);
        if let Err(error) = directories.try_for_each(|maps| translation::forget_links(maps)) {
            tracing::warn!(%error, "detaching the programs for packets, since their maps are outdated");
            let mut programs = self.device_programs(translation::ROWS);
            return programs.remove_unused(&BTreeMap::new());
        }
        Ok(())
    }

    /// Returns the guard for the uplinks.
    ///
    /// # Errors
    ///
    /// Returns an error if the map `host` can't be opened.
    pub fn guard(&self) -> Result<Guard, ReadError> {
        let host = MapHandle::open(&self.maps, &table::HOST)?;
        Ok(Guard::new(self.device_programs(guard::ROWS), host))
    }

    /// Returns the programs that translate packets. They are loaded now, if they are needed, so that those at the
    /// sockets didn't have to wait.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened, or if the kernel rejects a program.
    pub fn translation(&self) -> Result<Translation, LoadError> {
        if self.has_packets {
            self.programs.load(translation::ROWS)?;
        }
        if self.moving_flows.is_none() {
            // An earlier process may have been killed while it moved flows.
            let state = MapHandle::open(&self.maps, &table::PACKET_STATE)?;
            state.write(&FROZEN_UNTIL, &0_u64)?;
        }
        let packet_links = MapHandle::open(&self.maps, &table::PACKET_LINKS)?;
        let ranges = SenderRangeMaps {
            local: MapHandle::open(&self.maps, &table::LOCAL_RANGES)?,
            forwarded: MapHandle::open(&self.maps, &table::FORWARD_RANGES)?,
        };
        let programs = self.device_programs(translation::ROWS);
        let without_ethernet = WithoutEthernet::new(
            (self.maps.clone(), self.globals.clone().without_ethernet()),
            (self.links.clone(), self.features),
        );
        Ok(Translation::new(
            (programs, without_ethernet),
            packet_links,
            ranges,
        ))
    }

    /// Returns the map of flows.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be opened.
    pub fn flows(&self) -> Result<KernelFlows, ReadError> {
        KernelFlows::open(&self.maps)
    }

    /// Returns the flows that move from the map of an earlier process to another one, if there are any. The replaced maps must
    /// not be removed before [`MovingFlows::finish`] replaces the programs: a process that starts after this one was killed
    /// completes the move.
    #[must_use]
    pub const fn moving_flows(&self) -> Option<&MovingFlows> {
        self.moving_flows.as_ref()
    }

    fn device_programs(&self, rows: &'static [Program]) -> DevicePrograms {
        let logging = self.logging_device_program.as_ref();
        DevicePrograms::new(
            rows,
            self.programs.clone(),
            logging.filter(|(row, _)| rows.contains(row)).cloned(),
            (self.links.clone(), self.features),
        )
    }

    /// Returns the heartbeat of a daemon that uses the maps, with this pin directory.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened.
    pub fn heartbeat(&self, pins: Arc<PinDirectory>) -> Result<DaemonHeartbeat, ReadError> {
        DaemonHeartbeat::open(&self.maps, pins)
    }

    /// Opens the steering maps.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened.
    pub fn open_steering(&self) -> Result<KernelSteering, ReadError> {
        KernelSteering::open(&self.maps)
    }

    /// Takes over the values of addresses in the maps.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened or read.
    pub fn adopt_addresses(&self) -> Result<ClusterAddresses, ReadError> {
        let maps = Box::new(KernelAddresses::open(&self.maps)?);
        ClusterAddresses::adopt(maps, self.sizes.cluster_addresses())
    }

    /// Returns the sizes of the maps. They differ from the wanted sizes if those could not be applied.
    #[must_use]
    pub const fn sizes(&self) -> MapSizes {
        self.sizes
    }

    /// Opens the service maps and the counters.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened.
    pub fn open_maps(&self) -> Result<(KernelMaps, Counters), ReadError> {
        let open_connections = || Arc::clone(&self.open_connections);
        let maps = KernelMaps::open_with(&self.maps, open_connections(), self.is_new)?;
        Ok((maps, Counters::open(&self.maps, open_connections())?))
    }

    /// Pins the links of attached programs, so that the programs outlive this process. Returns a value that
    /// holds the links and the maps.
    ///
    /// # Errors
    ///
    /// Returns an error if a link can't be pinned, or if a map's pin can't be opened.
    pub fn hold(
        &self,
        attached: Attached,
        pins: Arc<PinDirectory>,
        cgroup: &Path,
        heartbeat: Arc<DaemonHeartbeat>,
    ) -> Result<Attachment, PinError> {
        let pinned = attached.pin();
        pinned.map_err(path::failed("pin programs in", &self.links))?;
        Attachment::new(pins, cgroup, attached.into_links(), heartbeat)
    }

    /// Attaches the programs to a cgroup, replacing any that are already attached.
    ///
    /// # Errors
    ///
    /// Returns an error if the cgroup does not exist, or if the kernel rejects a link.
    pub fn attach(&self, cgroup: &Path) -> Result<Attached, AttachError> {
        attach::attach(&self.programs, &self.links, cgroup)
    }
}

/// Returns a loader whose programs use the maps that are pinned in a directory.
pub(super) fn loader<'a>(directory: &Path, globals: &'a Globals) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    globals.apply_to(&mut loader);
    for map in MAPS {
        loader.map_pin_path(map.name, directory.join(map.name));
    }
    loader
}

/// Opens or creates the maps in a directory, and loads every program with them, except those that translate packets.
fn load_object(directory: &Path, sizes: MapSizes, globals: &Globals) -> Result<Ebpf, LoadError> {
    let mut loader = loader(directory, globals);
    let cpus = globals::cpus().map_err(LoadError::Cpus)?;
    for map in MAPS {
        loader.map_max_entries(map.name, map.entries(sizes, cpus));
    }
    let mut ebpf = loader.load(OBJECT).map_err(LoadError::Object)?;
    PROGRAMS
        .iter()
        .filter(|program| !translation::ROWS.contains(program))
        .try_for_each(|program| programs::load(&mut ebpf, program))?;
    Ok(ebpf)
}
