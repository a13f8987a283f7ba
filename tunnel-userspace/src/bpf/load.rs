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

/// The data path could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The folder of pins can't be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The maps that are there can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The new maps can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// What the maps hold can't be carried over.
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
        /// What the kernel said.
        #[source]
        source: ProgramError,
    },
}

/// Lifts the limit of locked memory, which Linux before 5.11 counts maps against, for root too.
/// Where that is not allowed, later kernels don't need it. Says whether it was done.
pub(super) fn raise_memory_limit() -> bool {
    let raised = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of locked memory stays as it is");
    }
    raised.is_ok()
}

/// What the programs are told when they are loaded.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Switches {
    /// The mark of the daemon's own sockets, which are left alone; 0 for none.
    pub own_mark: u32,
    /// The ranges that connects to edge nodes are sent to, one of each family at most; without any,
    /// nothing is steered.
    pub prefixes: Vec<Prefix>,
}

impl Switches {
    /// Network and mask of the range of a family; that of no address if there is none.
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
    /// What the programs are told of the kernel and of the config.
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

    /// Tells them to the programs of an object that is about to be loaded.
    pub fn tell<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, bytes) in self.by_name() {
            loader.override_global(name, bytes, true);
        }
    }

    /// Each with its name.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, &**bytes))
    }
}

/// Programs that are loaded on the pinned maps, and not yet attached.
pub struct DataPath {
    pub(super) programs: Programs,
    /// Those that are put at uplinks: these, or the variant that tells its events.
    pub(super) at_uplinks: Programs,
    pub(super) maps: PathBuf,
    pub(super) links: PathBuf,
    pub(super) globals: Globals,
    conns: Arc<Conns>,
    sizes: Sizes,
    features: Features,
    /// Whether the maps were just made, and none were there.
    is_new: bool,
    migration: Option<IsEmpty>,
}

/// Whether maps that were made beside others are empty, since those others can't be read.
#[derive(Clone, Copy, Debug)]
struct IsEmpty(bool);

impl DataPath {
    /// Checks the pins, opens or makes the maps, and loads the programs. Nothing is attached.
    ///
    /// Where the maps that are there have other sizes, or an older layout, new ones are made beside
    /// them, for which [`Self::promote`] is to be called before [`Self::attach`]. Sizes that can't
    /// be had stay as they are. The time is that since the machine started.
    ///
    /// # Errors
    ///
    /// What is pinned is not ours, or the kernel refuses.
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

    /// Whether the maps have yet to get what the programs that are attached go by, so that these are
    /// to be replaced only once the sources have told everything.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        matches!(self.migration, Some(IsEmpty(true)))
    }

    /// Puts the maps that were made beside others in their place, if there are such. From then on
    /// they are those that a start finds.
    ///
    /// # Errors
    ///
    /// The file system refused.
    pub fn promote(&mut self, pins: &Pins) -> Result<(), PinError> {
        if self.migration.is_some() {
            pins.promote()?;
            self.maps = pins.maps();
            self.migration = None;
        }
        Ok(())
    }

    /// Moves what the programs that were replaced counted, in maps that were replaced with them,
    /// once none of them runs any more: to be called after [`Self::attach`], and before those maps
    /// are swept away.
    ///
    /// # Errors
    ///
    /// The kernel gives no grace period.
    pub fn settle(&self, grace: &impl Grace) -> io::Result<()> {
        if !self.conns.is_settled() {
            grace.wait()?;
            self.conns.settle();
        }
        Ok(())
    }

    /// The guard of the uplinks.
    ///
    /// # Errors
    ///
    /// Its map can't be opened.
    pub fn guard(&self) -> Result<Guard, ReadError> {
        let host = Handle::open(&self.maps, &table::HOST)?;
        let (programs, links) = (self.at_uplinks.clone(), self.links.clone());
        Ok(Guard::new(programs, host, links, self.features))
    }

    /// Opens the steering maps.
    ///
    /// # Errors
    ///
    /// One can't be opened.
    pub fn open_steering(&self) -> Result<KernelSteering, ReadError> {
        KernelSteering::open(&self.maps)
    }

    /// The sizes that the maps have: those of the maps that were there, else those wanted.
    #[must_use]
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Opens the service maps, and the counters.
    ///
    /// # Errors
    ///
    /// One can't be opened.
    pub fn open_maps(&self) -> Result<(KernelMaps, Counters), ReadError> {
        let conns = || Arc::clone(&self.conns);
        let maps = KernelMaps::open_with(&self.maps, conns(), self.is_new)?;
        Ok((maps, Counters::open(&self.maps, conns())?))
    }

    /// Attaches the programs to a cgroup, or puts them in the place of those that are there.
    ///
    /// # Errors
    ///
    /// The cgroup is not there, or the kernel refuses.
    pub fn attach(&self, cgroup: &Path) -> Result<Attached, AttachError> {
        attach::attach(&self.programs, &self.links, cgroup)
    }
}

/// A loader of programs on the maps that are pinned in a folder.
pub(super) fn loader<'a>(folder: &Path, globals: &'a Globals) -> EbpfLoader<'a> {
    let mut loader = EbpfLoader::new();
    globals.tell(&mut loader);
    for map in MAPS {
        loader.map_pin_path(map.name, folder.join(map.name));
    }
    loader
}

/// Opens or makes the maps in a folder, and loads every program on them.
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
