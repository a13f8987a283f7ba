//! Finds further pins of links and maps, in other directories of the same BPF file system. A Culvert that takes over the
//! programs of an earlier one removes the earlier pins: `culvert cleanup` with the earlier config would otherwise detach
//! programs that are in use.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::statfs::BPF_FS_MAGIC,
};
use tunnel_common::table::MAPS;

use super::{
    attach,
    path::{file_system_type, nearest_existing},
    sys,
};

/// The maximum depth of a pin below the root of the file system.
const MAX_DEPTH: u32 = 6;
/// The maximum number of directory entries to inspect.
const MAX_ENTRIES: usize = 65_536;

/// The numbers of links and maps.
#[derive(Clone, Debug, Default)]
pub(super) struct ObjectIds {
    pub(super) links: BTreeSet<u32>,
    pub(super) maps: BTreeSet<u32>,
}

impl ObjectIds {
    /// Returns true if an object is one of these links and maps.
    fn contains(&self, object: BorrowedFd<'_>) -> bool {
        let link = sys::link_ids(object).ok().flatten();
        let map = || sys::map_id(object).ok().flatten();
        link.map_or_else(
            || map().is_some_and(|id| self.maps.contains(&id)),
            |ids| self.links.contains(&ids.link),
        )
    }
}

/// The pins of some links and maps in other pin directories, which stay locked as long as this value exists.
#[derive(Debug, Default)]
pub(super) struct PinAliases {
    pins: Vec<PathBuf>,
    directories: BTreeSet<PathBuf>,
    locks: Vec<Flock<File>>,
}

impl PinAliases {
    /// Finds the pins on the file system of a pin directory, except those in the pin directory itself, and locks their
    /// pin directories. Returns the path of a pin directory that another process has locked as an error.
    pub(super) fn find(own: &Path, objects: &ObjectIds) -> Result<Self, PathBuf> {
        let mut found = Self::default();
        let mut entries = MAX_ENTRIES;
        let nearest = nearest_existing(own);
        if file_system_type(nearest).is_ok_and(|kind| kind == BPF_FS_MAGIC) {
            found.search(
                file_system_root(nearest),
                own,
                objects,
                MAX_DEPTH,
                &mut entries,
            );
        }
        found.add_optional_maps();
        found.add_filter_programs();
        for directory in &found.directories {
            let opened = File::open(directory);
            match opened.map(|it| Flock::lock(it, FlockArg::LockExclusiveNonblock)) {
                Ok(Ok(lock)) => found.locks.push(lock),
                Ok(Err((_, Errno::EWOULDBLOCK))) => return Err(directory.clone()),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        Ok(found)
    }

    fn search(
        &mut self,
        directory: &Path,
        own: &Path,
        objects: &ObjectIds,
        depth: u32,
        entries: &mut usize,
    ) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Some(left) = entries.checked_sub(1) else {
                return;
            };
            *entries = left;
            let path = entry.path();
            if path == own {
                continue;
            }
            let kind = entry.file_type();
            if kind.as_ref().is_ok_and(fs::FileType::is_dir) {
                if depth > 0 {
                    self.search(&path, own, objects, depth - 1, entries);
                }
            } else if kind.is_ok_and(|kind| kind.is_file())
                && sys::open_pin(&path).is_ok_and(|object| objects.contains(object.as_fd()))
            {
                // Pins are in `<pin directory>/links` and `<pin directory>/v<layout>`.
                let root = directory.parent().unwrap_or(directory);
                self.directories.insert(root.to_owned());
                self.pins.push(path);
            }
        }
    }

    /// Adds the pins of optional maps, which no attached program may use, next to the pins that were found.
    fn add_optional_maps(&mut self) {
        let parents: BTreeSet<_> = self.pins.iter().filter_map(|pin| pin.parent()).collect();
        let optional = MAPS.iter().filter(|row| row.is_optional);
        let pins = optional.flat_map(|row| parents.iter().map(|parent| parent.join(row.name)));
        let is_new = |pin: &PathBuf| pin.exists() && !self.pins.contains(pin);
        let pins: Vec<_> = pins.filter(is_new).collect();
        self.pins.extend(pins);
    }

    /// Adds the pins of programs that are attached to uplinks as filters, next to the pins that were found. The new process
    /// replaces the filters.
    fn add_filter_programs(&mut self) {
        let parents: BTreeSet<_> = self.pins.iter().filter_map(|pin| pin.parent()).collect();
        let entries = parents
            .into_iter()
            .flat_map(|parent| fs::read_dir(parent).into_iter());
        let pins = entries.flatten().flatten().filter(|entry| {
            let name = entry.file_name();
            let parsed = name.to_str().and_then(attach::parse_pin_name);
            parsed.is_some_and(|(_, device)| device.is_some())
        });
        let is_new = |pin: &PathBuf| !self.pins.contains(pin);
        let pins: Vec<_> = pins.map(|entry| entry.path()).filter(is_new).collect();
        self.pins.extend(pins);
    }

    /// Removes the pins, and the directories that are empty without them. Nothing is detached as long as other pins or
    /// processes hold the links. Returns the pin directories.
    pub(super) fn remove(&self) -> Vec<PathBuf> {
        for pin in &self.pins {
            if let Err(error) = fs::remove_file(pin) {
                tracing::warn!(%error, pin = %pin.display(), "cannot remove a pin of an earlier Culvert");
            }
        }
        let parents: BTreeSet<_> = self.pins.iter().filter_map(|pin| pin.parent()).collect();
        let roots = self.directories.iter().map(PathBuf::as_path);
        for directory in parents.into_iter().chain(roots) {
            if let Err(error) = fs::remove_dir(directory) {
                let directory = directory.display();
                tracing::debug!(%error, %directory, "left a directory of an earlier Culvert");
            }
        }
        self.directories.iter().cloned().collect()
    }
}

/// Returns the root of the file system that a directory is on, as it is mounted.
fn file_system_root(directory: &Path) -> &Path {
    let device = |path: &Path| fs::metadata(path).map(|it| it.dev()).ok();
    let own = device(directory);
    let same = directory.ancestors().take_while(|it| device(it) == own);
    same.last().unwrap_or(directory)
}
