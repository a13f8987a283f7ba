//! Loads the object with the kernel programs on the pinned maps.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aya::{Ebpf, EbpfError, EbpfLoader, programs::ProgramError, util::nr_cpus};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use tunnel_common::{
    steering::Prefix,
    table::{self, MAPS, PROGRAMS},
};

use super::{
    attach::{self, AttachError, Attached},
    conns::Conns,
    guard::Guard,
    kernel::Places,
    maps::{Counters, KernelMaps, KernelSteering},
    migration::{self, Start},
    pins::{PinError, Pins},
    probe::Features,
    programs::{self, Programs},
    sys::Handle,
};
use crate::reconcile::{AdoptError, GracePeriod, ReadError, MapSizes, WriteError};

/// The object with the kernel programs, as compiled by the build script.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/culvert.bpf.o"));

/// The error of loading the data path.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The folder of pins can't be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The existing maps can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The new maps can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The content of the existing maps can't be migrated.
    #[error(transparent)]
    Carry(#[from] AdoptError),
    /// The CPUs can't be counted.
    #[error("cannot count the CPUs")]
    Cpus(#[source] io::Error),
    /// The maps of the object can't be opened or created.
    #[error(
        "cannot create the maps (before Linux 5.11, `Operation not permitted` may mean that the limit \
         of locked memory, ulimit -l, is too low; raising it needs CAP_SYS_RESOURCE)"
    )]
    Object(#[source] EbpfError),
    /// A program is not in the object, or has another type.
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

/// Raises the limit of locked memory; returns true if that succeeds. Before Linux 5.11, maps and programs
/// count against this limit, even for root; later kernels ignore it for them.
pub(super) fn raise_memory_limit() -> bool {
    let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    if let Err(error) = raised {
        tracing::debug!(%error, "cannot raise the limit of locked memory");
    }
    raised.is_ok()
}

/// The settings of the programs that come from the config.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Switches {
    /// The mark of the daemon's own sockets, which are not translated; 0 if no socket is marked.
    pub own_mark: u32,
    /// The steering prefixes, at most one per address family. If there are none, nothing is steered.
    pub prefixes: Vec<Prefix>,
}

impl Switches {
    /// Returns the network and mask of a family's steering prefix; without a prefix, values that match no
    /// address.
    fn range(&self, is_v4: bool) -> ([u32; 4], [u32; 4]) {
        let range = self.prefixes.iter().find(|prefix| prefix.is_v4() == is_v4);
        range.map_or(([u32::MAX; 4], [0; 4]), |prefix| {
            (prefix.network().words(), prefix.mask().words())
        })
    }
}

/// The constants of the programs (globals of the object): the name and bytes of each.
#[derive(Clone, Debug)]
pub struct Globals([(&'static str, Vec<u8>); 8]);

impl Globals {
    /// Returns the constants for the features of this kernel and the settings.
    #[must_use]
    pub fn of(features: Features, switches: &Switches) -> Self {
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (network4, mask4) = switches.range(true);
        let guard4 = [network4, mask4].map(|[_, _, _, word]| word);
        let (network6, mask6) = switches.range(false);
        let kernel_sockets = features.kernel_sockets;
        let (byte, bit) = kernel_sockets.map_or((0, 0), |known| (known.byte, known.bit));
        Self([
            ("KERN_SOCK_BYTE", bytes(&[byte])),
            ("KERN_SOCK_BIT", vec![bit]),
            ("RETVAL_SETTABLE", vec![u8::from(features.set_retval)]),
            ("KERNEL_OFFSETS", bytes(&Places::words(features.addresses))),
            ("OWN_MARK", bytes(&[switches.own_mark])),
            ("STEERING", vec![u8::from(!switches.prefixes.is_empty())]),
            ("GUARD_V4", bytes(&guard4)),
            ("GUARD_V6", bytes(&[network6, mask6].concat())),
        ])
    }

    /// Sets the constants of the object that a loader is about to load.
    pub fn tell<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, bytes) in self.by_name() {
            loader.override_global(name, bytes, true);
        }
    }

    /// Returns the name and bytes of each constant.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, &**bytes))
    }
}

/// Programs that are loaded on the pinned maps, and ready to be attached.
pub struct DataPath {
    pub(super) programs: Programs,
    /// The programs for uplinks: the plain ones, or their logging variant.
    pub(super) at_uplinks: Programs,
    pub(super) maps: PathBuf,
    pub(super) links: PathBuf,
    pub(super) globals: Globals,
    conns: Arc<Conns>,
    sizes: MapSizes,
    features: Features,
    /// True if this process created the maps, and none existed before.
    is_new: bool,
    migration: Option<IsEmpty>,
}

/// True if the new maps are empty, since the daemon can't read maps of an older layout.
#[derive(Clone, Copy, Debug)]
struct IsEmpty(bool);

impl DataPath {
    /// Checks the pins, opens or creates the maps, and loads the programs. Attaches nothing.
    ///
    /// If the existing maps have other sizes or an older layout, creates new maps next to them;
    /// [`Self::promote`] must then be called before [`Self::attach`]. Keeps the old sizes if the new ones
    /// can't be applied. `now` is the time since the machine started.
    ///
    /// # Errors
    ///
    /// A pin was not created by Culvert, or the kernel rejects the maps or programs.
    pub fn load(
        pins: &Pins,
        wanted: MapSizes,
        features: Features,
        switches: &Switches,
        now: Duration,
    ) -> Result<Self, LoadError> {
        let start = migration::choose(pins, wanted, now)?;
        let globals = Globals::of(features, switches);
        let loaded = Self::load_as(&start, pins, features, globals.clone(), now);
        match (loaded, start.migration().and_then(|it| it.had)) {
            (Err(error), Some(had)) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    error,
                    "cannot create maps of the new sizes; the maps keep their sizes"
                );
                pins.discard_next()?;
                Self::load_as(&Start::Here(had), pins, features, globals, now)
            }
            (loaded, _) => loaded,
        }
    }

    fn load_as(
        start: &Start,
        pins: &Pins,
        features: Features,
        globals: Globals,
        now: Duration,
    ) -> Result<Self, LoadError> {
        let (folder, sizes) = match start {
            Start::New(sizes) | Start::Here(sizes) => (pins.maps(), *sizes),
            Start::Migrate(migration) => (pins.next(), migration.sizes),
        };
        pins.make_folders(&folder)?;
        let migration = start.migration();
        if let Some(migration) = migration {
            migration.take_along(&folder)?;
        }
        let programs = Programs::of(load_object(&folder, sizes, &globals)?);
        if let Some(migration) = migration {
            migration.fill(&folder, now)?;
        }
        let conns = Conns::open(&folder, &pins.replaced(&folder, table::CONNS.name)?)?;
        Ok(Self {
            at_uplinks: programs.clone(),
            programs,
            conns: Arc::new(conns),
            maps: folder,
            links: pins.links(),
            globals,
            sizes,
            features,
            is_new: matches!(start, Start::New(_)),
            migration: migration.map(|migration| IsEmpty(migration.is_empty())),
        })
    }

    /// Returns true if the maps are empty, while attached programs still use older ones. The programs may
    /// then be replaced only after the sources have delivered all objects.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.migration, Some(IsEmpty(true)))
    }

    /// Replaces the existing maps by the new ones, if new ones were created. The next start of the daemon
    /// then finds the new ones.
    ///
    /// # Errors
    ///
    /// A folder can't be renamed or removed.
    pub fn promote(&mut self, pins: &Pins) -> Result<(), PinError> {
        if self.migration.is_some() {
            pins.promote()?;
            self.maps = pins.maps();
            self.migration = None;
        }
        Ok(())
    }

    /// Waits until no replaced program runs any more, and then adds the counts of replaced maps to the new
    /// ones. Must be called after [`Self::attach`], and before the replaced maps are removed.
    ///
    /// # Errors
    ///
    /// The wait for a grace period fails.
    pub fn settle(&self, grace: &impl GracePeriod) -> io::Result<()> {
        if !self.conns.is_settled() {
            grace.wait()?;
            self.conns.settle();
        }
        Ok(())
    }

    /// Returns the guard of the uplinks.
    ///
    /// # Errors
    ///
    /// The map `host` can't be opened.
    pub fn guard(&self) -> Result<Guard, ReadError> {
        let host = Handle::open(&self.maps, &table::HOST)?;
        let (programs, links) = (self.at_uplinks.clone(), self.links.clone());
        Ok(Guard::new(programs, host, links, self.features))
    }

    /// Opens the steering maps.
    ///
    /// # Errors
    ///
    /// A map can't be opened.
    pub fn open_steering(&self) -> Result<KernelSteering, ReadError> {
        KernelSteering::open(&self.maps)
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
    /// A map can't be opened.
    pub fn open_maps(&self) -> Result<(KernelMaps, Counters), ReadError> {
        let conns = || Arc::clone(&self.conns);
        let maps = KernelMaps::open_with(&self.maps, conns(), self.is_new)?;
        Ok((maps, Counters::open(&self.maps, conns())?))
    }

    /// Attaches the programs to a cgroup, or replaces the attached ones.
    ///
    /// # Errors
    ///
    /// The cgroup does not exist, or the kernel rejects a link.
    pub fn attach(&self, cgroup: &Path) -> Result<Attached, AttachError> {
        attach::attach(&self.programs, &self.links, cgroup)
    }
}

/// Returns a loader that loads programs on the maps that are pinned in a folder.
pub(super) fn loader<'a>(folder: &Path, globals: &'a Globals) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    globals.tell(&mut loader);
    for map in MAPS {
        loader.map_pin_path(map.name, folder.join(map.name));
    }
    loader
}

/// Opens or creates the maps in a folder, and loads every program on them.
fn load_object(folder: &Path, sizes: MapSizes, globals: &Globals) -> Result<Ebpf, LoadError> {
    let mut loader = loader(folder, globals);
    let cpus = nr_cpus().map_err(|(_, source)| LoadError::Cpus(source))?;
    let cpus = u32::try_from(cpus).map_err(|error| LoadError::Cpus(io::Error::other(error)))?;
    for map in MAPS {
        loader.map_max_entries(map.name, map.entries(sizes, cpus));
    }
    let mut ebpf = loader.load(OBJECT).map_err(LoadError::Object)?;
    PROGRAMS
        .iter()
        .try_for_each(|program| programs::load(&mut ebpf, program))?;
    Ok(ebpf)
}
