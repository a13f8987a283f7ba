//! The pin directory, which contains `v<layout>/<map>` and `links/<program>`. All entries are checked before
//! anything is changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use nix::fcntl::Flock;
use tunnel_common::{
    LAYOUT_VERSION,
    table::{self, AttachPoint, MAPS, MapSizes, Program},
};

use super::{
    attach,
    directory_lock::{lock_directory, process_hint},
    heartbeat::PinDirectoryId,
    map_directories::{self, Directory, DirectoryChange, DirectoryRole},
    path::{PathError, failed},
    pin::Pin,
};

/// An error that can occur when using the pin directory.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The directory is not on a BPF file system.
    #[error("{path} is not on a BPF file system; mount one there first: mount -t bpf bpf {mount}")]
    NotBpf {
        /// The directory.
        path: PathBuf,
        /// The mount point to use.
        mount: PathBuf,
    },
    /// Another process has locked the directory.
    #[error("another culvert{} uses {path}; stop it first, or set bpf.bpffs to another directory", process_hint(.pid.as_ref()))]
    Locked {
        /// The directory.
        path: PathBuf,
        /// The process that holds the lock, if known.
        pid: Option<u32>,
    },
    /// The directory belongs to another user.
    #[error(
        "{path} belongs to user {owner}, not to user {own}, so its content can't be trusted; remove it first: rm -r {path}"
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// The id of the user that owns the directory.
        owner: u32,
        /// The id of this process's user.
        own: u32,
    },
    /// The directory contains maps with a newer layout.
    #[error(
        "{path} has maps of layout {found}, but this culvert has layout {LAYOUT_VERSION}; \
         run the newer culvert that created them, or first remove them by its `culvert cleanup`"
    )]
    Layout {
        /// The directory that contains these maps.
        path: PathBuf,
        /// The layout of these maps.
        found: u32,
    },
    /// The directory contains an object that does not belong to Culvert.
    #[error(
        "{path} does not belong to Culvert: {difference}; nothing was changed. Move it to another place, or \
         set bpf.bpffs to another directory"
    )]
    Foreign {
        /// The pin or directory.
        path: PathBuf,
        /// The reason why it can't belong to Culvert.
        difference: String,
    },
    /// Programs use maps that are no longer pinned.
    #[error(
        "map {path} is missing while programs are attached: they use a map that can't be opened; \
         run `culvert cleanup` to remove the programs and the other maps"
    )]
    Missing {
        /// The missing pin.
        path: PathBuf,
    },
    /// An operation on a file or directory failed.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// The maps that already exist.
pub(super) enum ExistingMaps {
    /// There are no maps, or only an incomplete set.
    None,
    /// Maps with this version's layout, and their sizes.
    Current(MapSizes),
    /// Maps with an older layout, in this directory.
    Older(PathBuf),
}

/// The directory for this layout's current maps.
const CURRENT_DIRECTORY: Directory = Directory::new(LAYOUT_VERSION, DirectoryRole::Current);

/// The pin directory. It stays locked until this value is dropped.
#[derive(Debug)]
pub struct PinDirectory {
    root: PathBuf,
    /// The directory, opened. Only this user can open it, so no other user can lock it.
    lock: Mutex<Flock<File>>,
}

impl PinDirectory {
    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory is not on a BPF file system, can't be created, or is locked by
    /// another process.
    pub fn lock(root: &Path) -> Result<Self, PinError> {
        Ok(Self {
            root: root.to_owned(),
            lock: Mutex::new(lock_directory(root)?),
        })
    }

    /// Creates and locks the directory again if it was removed, or if another file system was mounted in its
    /// place. Returns true if it was.
    pub(super) fn relock(&self) -> Result<bool, PinError> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let number = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let locked = lock.metadata().map_err(failed("inspect", &self.root))?;
        let is_same = fs::metadata(&self.root).is_ok_and(|found| number(found) == number(locked));
        if !is_same {
            *lock = lock_directory(&self.root)?;
        }
        Ok(!is_same)
    }

    /// Returns the number that identifies the locked directory.
    pub(super) fn id(&self) -> Result<PinDirectoryId, PathError> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let locked = lock.metadata().map_err(failed("inspect", &self.root))?;
        Ok(PinDirectoryId::new(locked.dev(), locked.ino()))
    }

    /// Returns true if a link for each program of the cgroup is pinned.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        let mut programs = Program::at_attach_point(AttachPoint::Cgroup);
        programs.all(|program| self.links().join(program.name).exists())
    }

    /// Returns true if the directory contains neither maps nor links.
    pub(super) fn is_empty(&self) -> Result<bool, PinError> {
        let is_empty = |pin: &Pin| Pin::all(&pin.path).map(|pins| pins.is_empty());
        for pin in Pin::all(&self.root)? {
            if !is_empty(&pin)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the path of the pin directory itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory for this layout's current maps.
    #[must_use]
    pub fn maps(&self) -> PathBuf {
        self.path(CURRENT_DIRECTORY)
    }

    /// Returns the directory for this layout's maps that are still being filled.
    pub(super) fn next_maps(&self) -> PathBuf {
        self.path(Directory::new(LAYOUT_VERSION, DirectoryRole::Next))
    }

    /// Returns the directory for links.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.root.join("links")
    }

    fn path(&self, directory: Directory) -> PathBuf {
        self.root.join(directory.to_string())
    }

    /// Checks that everything in the directory belongs to Culvert, and that nothing has a newer layout. Then
    /// completes any change that an earlier process left unfinished. Returns the existing maps.
    ///
    /// # Errors
    ///
    /// Returns an error if an object is foreign, has a newer layout, or is missing; in these cases, nothing
    /// is changed. Also returns an error if an operation on a file or directory fails.
    pub(super) fn check(&self) -> Result<ExistingMaps, PinError> {
        let directories = self.directories()?;
        let links = Pin::all(&self.links())?;
        links.iter().try_for_each(Pin::check_link)?;
        let complete = map_directories::complete_set(&directories, LAYOUT_VERSION);
        let mut found = BTreeMap::new();
        let mut older = None;
        for directory in &directories {
            let maps = self.check_maps(*directory)?;
            if Some(*directory) == complete {
                found = maps;
            } else if complete.is_none() && directory.layout < LAYOUT_VERSION {
                older = map_directories::complete_set(&directories, directory.layout).or(older);
            }
        }
        let translates = |pin: &Pin| {
            attach::parse_pin_name(&pin.name)
                .is_some_and(|(program, _)| [table::IN, table::OUT].contains(program))
        };
        let needs_all = links.iter().any(translates);
        let mut needed = MAPS.iter().filter(|map| needs_all || !map.is_optional);
        let missing = needed.find(|map| !found.contains_key(map.name));
        if let Some(map) = missing
            && !links.is_empty()
            && older.is_none()
        {
            return Err(PinError::Missing {
                path: self.maps().join(map.name),
            });
        }
        let layouts: BTreeSet<u32> = directories
            .iter()
            .map(|directory| directory.layout)
            .collect();
        for layout in layouts {
            self.apply(map_directories::plan_recovery(&directories, layout))?;
        }
        if let Some(older) = older {
            let directory = Directory::new(older.layout, DirectoryRole::Current);
            return Ok(ExistingMaps::Older(self.path(directory)));
        }
        if missing.is_some() {
            // The process that created these maps was killed before any program used them.
            for name in found.keys() {
                let path = self.maps().join(name);
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            }
            return Ok(ExistingMaps::None);
        }
        let sizes = MapSizes::of_maps(|map| found.get(map.name).copied());
        Ok(sizes.map_or(ExistingMaps::None, ExistingMaps::Current))
    }

    /// Returns the map directories for all layouts, and the paths of all other entries except the directory
    /// for links.
    fn entries(&self) -> Result<(BTreeSet<Directory>, Vec<PathBuf>), PinError> {
        let (mut directories, mut foreign) = (BTreeSet::new(), Vec::new());
        for Pin { name, path } in Pin::all(&self.root)? {
            if let Some(directory) = Directory::parse_name(&name) {
                directories.insert(directory);
            } else if path != self.links() {
                foreign.push(path);
            }
        }
        Ok((directories, foreign))
    }

    /// Returns the map directories. Fails if there is any other entry, except the directory for links, or if
    /// a layout is newer than this version's.
    fn directories(&self) -> Result<BTreeSet<Directory>, PinError> {
        let (directories, foreign) = self.entries()?;
        if let Some(path) = foreign.into_iter().next() {
            let difference = "Culvert has no directory of that name".to_owned();
            return Err(PinError::Foreign { path, difference });
        }
        match directories.last() {
            Some(newest) if newest.layout > LAYOUT_VERSION => Err(PinError::Layout {
                path: self.path(*newest),
                found: newest.layout,
            }),
            Some(_) | None => Ok(directories),
        }
    }

    /// Checks the maps in a directory; returns how many entries each has.
    fn check_maps(&self, directory: Directory) -> Result<BTreeMap<String, u32>, PinError> {
        let maps = Pin::all(&self.path(directory))?.into_iter();
        maps.map(|pin| {
            let entries = pin.check_map(directory)?;
            Ok((pin.name, entries))
        })
        .collect()
    }

    /// Returns all directories whose pin named `map` refers to a different map from the one pinned in
    /// `directory`.
    pub(super) fn replaced(&self, directory: &Path, map: &str) -> Result<Vec<PathBuf>, PinError> {
        let inode = |directory: &Path| {
            let pin = directory.join(map);
            match fs::metadata(&pin) {
                Ok(found) => Ok(Some(found.ino())),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(failed("inspect", &pin)(error)),
            }
        };
        let own = inode(directory)?;
        let mut replaced = Vec::new();
        for other in self.directories()? {
            let other = self.path(other);
            let found = inode(&other)?;
            if found.is_some() && found != own {
                replaced.push(other);
            }
        }
        Ok(replaced)
    }

    /// Removes the pins named `map` that refer to a different map from the one pinned in `directory`.
    pub(super) fn remove_replaced(&self, directory: &Path, map: &str) -> Result<(), PinError> {
        for other in self.replaced(directory, map)? {
            let pin = other.join(map);
            fs::remove_file(&pin).map_err(failed("remove", &pin))?;
        }
        Ok(())
    }

    /// Removes the pins beside those named `map` that refer to a different map from the one pinned in `directory`.
    pub(super) fn remove_beside_replaced(
        &self,
        directory: &Path,
        map: &str,
    ) -> Result<(), PinError> {
        for other in self.replaced(directory, map)? {
            let pins = Pin::all(&other)?.into_iter();
            pins.filter(|pin| pin.name != map)
                .try_for_each(|pin| pin.remove())?;
        }
        Ok(())
    }

    /// Returns the directories of maps that have been replaced.
    pub(super) fn replaced_directories(&self) -> Result<Vec<PathBuf>, PinError> {
        let found = self.directories()?;
        let replaced = map_directories::replaced(&found, LAYOUT_VERSION);
        Ok(replaced.map(|directory| self.path(directory)).collect())
    }

    /// Creates the directories for maps and links.
    pub(super) fn create_directories(&self, maps: &Path) -> Result<(), PinError> {
        for directory in [maps, &self.links()] {
            fs::create_dir_all(directory).map_err(failed("create", directory))?;
        }
        Ok(())
    }

    /// Replaces the existing maps with the newly filled ones. The existing ones are renamed rather than
    /// removed, since programs still use them.
    pub(super) fn promote(&self) -> Result<(), PinError> {
        self.apply(map_directories::plan_promotion(
            &self.directories()?,
            LAYOUT_VERSION,
        ))
    }

    /// Removes the maps that were being filled.
    pub(super) fn discard_next(&self) -> Result<(), PinError> {
        self.apply(map_directories::plan_recovery(
            &self.directories()?,
            LAYOUT_VERSION,
        ))
    }

    /// Removes the maps that have been replaced. Must be called only after the programs have been attached.
    ///
    /// # Errors
    ///
    /// Returns an error if a file or directory can't be removed.
    pub fn remove_unused(&self) -> Result<(), PinError> {
        self.apply(map_directories::plan_cleanup(
            &self.directories()?,
            LAYOUT_VERSION,
        ))
    }

    fn apply(&self, changes: Vec<DirectoryChange>) -> Result<(), PinError> {
        for change in changes {
            match change {
                DirectoryChange::Remove(directory) => {
                    let is_map = |pin: &Pin| pin.check_map(directory);
                    remove_known(&self.path(directory), is_map, &mut Vec::new())?;
                }
                DirectoryChange::Rename(from, to) => {
                    let (from, to) = (self.path(from), self.path(to));
                    fs::rename(&from, to).map_err(failed("rename", &from))?;
                }
            }
        }
        Ok(())
    }

    /// Detaches the programs, and removes the links, maps and directories that Culvert created. Returns what is
    /// left in place. While maps with a newer layout exist, the links are left in place, too, since their
    /// programs belong to a newer version.
    ///
    /// # Errors
    ///
    /// Returns an error if a program can't be detached, or if a file or directory can't be removed.
    pub fn remove(&self) -> Result<LeftPins, PinError> {
        let (known, mut foreign) = self.entries()?;
        let is_known = |directory: &Directory| directory.layout <= LAYOUT_VERSION;
        let (known, newer): (Vec<_>, Vec<_>) = known.into_iter().partition(is_known);
        let mut newer: Vec<_> = newer
            .iter()
            .map(|directory| self.path(*directory))
            .collect();
        // Programs are removed first, since they use the maps.
        if newer.is_empty() {
            remove_known(&self.links(), Pin::check_link, &mut foreign)?;
        } else {
            newer.push(self.links());
        }
        for directory in known {
            let is_map = |pin: &Pin| pin.check_map(directory);
            remove_known(&self.path(directory), is_map, &mut foreign)?;
        }
        if foreign.is_empty() && newer.is_empty() {
            fs::remove_dir(&self.root).map_err(failed("remove", &self.root))?;
        }
        Ok(LeftPins { foreign, newer })
    }
}

/// The paths in the pin directory that [`PinDirectory::remove`] leaves in place.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct LeftPins {
    /// Those that Culvert did not create.
    pub foreign: Vec<PathBuf>,
    /// The maps with a newer layout, and the links to their programs.
    pub newer: Vec<PathBuf>,
}

/// Removes the pins in a directory that pass a check, and then the directory itself if it is empty.
fn remove_known<T>(
    directory: &Path,
    check: impl Fn(&Pin) -> Result<T, PinError>,
    foreign: &mut Vec<PathBuf>,
) -> Result<(), PinError> {
    let before = foreign.len();
    for pin in Pin::all(directory)? {
        if check(&pin).is_ok() {
            pin.remove()?;
        } else {
            foreign.push(pin.path);
        }
    }
    if foreign.len() == before && directory.exists() {
        fs::remove_dir(directory).map_err(failed("remove", directory))?;
    }
    Ok(())
}
