//! The object of kernel programs, loaded on the pinned maps.

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
use crate::reconcile::{AdoptError, Grace, ReadError, Sizes, WriteError};

/// The object, as the build script compiled it.
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
    /// The content of the maps can't be migrated.
    #[error(transparent)]
    Carry(#[from] AdoptError),
    /// The CPUs can't be counted.
    #[error("cannot count the CPUs")]
    Cpus(#[source] io::Error),
    /// The object can't be loaded.
    #[error(
        "cannot make the maps (before Linux 5.11 `Operation not permitted` may mean that the limit \
         of locked memory, ulimit -l, is too low, which takes CAP_SYS_RESOURCE to raise)"
    )]
    Object(#[source] EbpfError),
    /// A program is not in the object, or not of its kind.
    #[error("the object has no program {program} for its hook")]
    NoProgram {
        /// The name of the program.
        program: &'static str,
    },
    /// The verifier refused a program.
    #[error("the kernel refuses program {program}")]
    Program {
        /// The name of the program.
        program: &'static str,
        /// The kernel's error.
        #[source]
        source: ProgramError,
    },
}

/// Raises the limit of locked memory, against which Linux before 5.11 counts maps, for root too. A
/// failure matters on those kernels only. Returns true if the limit was raised.
pub(super) fn raise_memory_limit() -> bool {
    let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of locked memory stays as it is");
    }
    raised.is_ok()
}

/// The settings of the programs, from the config.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Switches {
    /// The mark of the daemon's own sockets, which are left alone; 0 for none.
    pub own_mark: u32,
    /// The prefixes to which connects to edge nodes are sent, at most one per family; without any,
    /// nothing is steered.
    pub prefixes: Vec<Prefix>,
}

impl Switches {
    /// Returns network and mask of a family's prefix; values that match no address if there is none.
    fn range(&self, is_v4: bool) -> ([u32; 4], [u32; 4]) {
        let range = self.prefixes.iter().find(|prefix| prefix.is_v4() == is_v4);
        range.map_or(([u32::MAX; 4], [0; 4]), |prefix| {
            (prefix.network().words(), prefix.mask().words())
        })
    }
}

/// The constants of the programs: the bytes of each, by its name in the object.
#[derive(Clone, Debug)]
pub struct Globals([(&'static str, Vec<u8>); 8]);

impl Globals {
    /// Returns the constants for a kernel's features and the config.
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
            ("KERNEL_PLACES", bytes(&Places::words(features.addresses))),
            ("OWN_MARK", bytes(&[switches.own_mark])),
            ("STEERING", vec![u8::from(!switches.prefixes.is_empty())]),
            ("GUARD_V4", bytes(&guard4)),
            ("GUARD_V6", bytes(&[network6, mask6].concat())),
        ])
    }

    /// Sets the constants of an object that is about to be loaded.
    pub fn tell<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, bytes) in self.by_name() {
            loader.override_global(name, bytes, true);
        }
    }

    /// Returns the bytes of each constant, with its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, &**bytes))
    }
}

/// Programs that are loaded on the pinned maps, and not yet attached.
pub struct DataPath {
    pub(super) programs: Programs,
    /// The programs for uplinks: the plain ones, or the variant that logs its events.
    pub(super) at_uplinks: Programs,
    pub(super) maps: PathBuf,
    pub(super) links: PathBuf,
    pub(super) globals: Globals,
    conns: Arc<Conns>,
    sizes: Sizes,
    features: Features,
    /// True if this process created the maps, and none existed before.
    is_new: bool,
    migration: Option<IsEmpty>,
}

/// True if the new maps are empty, since the old ones can't be read.
#[derive(Clone, Copy, Debug)]
struct IsEmpty(bool);

impl DataPath {
    /// Checks the pins, opens or creates the maps, and loads the programs. Attaches nothing.
    ///
    /// If the existing maps have other sizes, or an older layout, new ones are created next to them;
    /// then [`Self::promote`] must be called before [`Self::attach`]. Sizes that can't be applied stay
    /// as they are. `now` is the time since the machine started.
    ///
    /// # Errors
    ///
    /// A pin is not ours, or the kernel refuses.
    pub fn load(
        pins: &Pins,
        wanted: Sizes,
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
                    "no maps of other sizes are to be had, the maps keep theirs"
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

    /// Returns true if the maps are empty while attached programs use older ones, so that the programs
    /// may be replaced only after the sources have delivered everything.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.migration, Some(IsEmpty(true)))
    }

    /// Replaces the existing maps by the new ones, if new ones were created. From then on a start finds
    /// those.
    ///
    /// # Errors
    ///
    /// The file system refuses.
    pub fn promote(&mut self, pins: &Pins) -> Result<(), PinError> {
        if self.migration.is_some() {
            pins.promote()?;
            self.maps = pins.maps();
            self.migration = None;
        }
        Ok(())
    }

    /// Adds the counts in replaced maps to the new ones, once no replaced program runs any more: to be
    /// called after [`Self::attach`], and before those maps are removed.
    ///
    /// # Errors
    ///
    /// The kernel offers no grace period.
    pub fn settle(&self, grace: &impl Grace) -> io::Result<()> {
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

    /// Returns the sizes of the maps: those of existing maps, else the wanted ones.
    #[must_use]
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Opens the service maps, and the counters.
    ///
    /// # Errors
    ///
    /// A map can't be opened.
    pub fn open_maps(&self) -> Result<(KernelMaps, Counters), ReadError> {
        let conns = || Arc::clone(&self.conns);
        let maps = KernelMaps::open_with(&self.maps, conns(), self.is_new)?;
        Ok((maps, Counters::open(&self.maps, conns())?))
    }

    /// Attaches the programs to a cgroup, or replaces those that are attached.
    ///
    /// # Errors
    ///
    /// The cgroup does not exist, or the kernel refuses.
    pub fn attach(&self, cgroup: &Path) -> Result<Attached, AttachError> {
        attach::attach(&self.programs, &self.links, cgroup)
    }
}

/// Returns a loader of programs for the maps that are pinned in a folder.
pub(super) fn loader<'a>(folder: &Path, globals: &'a Globals) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    globals.tell(&mut loader);
    for map in MAPS {
        loader.map_pin_path(map.name, folder.join(map.name));
    }
    loader
}

/// Opens or creates the maps in a folder, and loads every program on them.
fn load_object(folder: &Path, sizes: Sizes, globals: &Globals) -> Result<Ebpf, LoadError> {
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
