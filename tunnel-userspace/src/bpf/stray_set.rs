//! The links and maps of an earlier Culvert that are not pinned in this Culvert's directory.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
};

use tunnel_common::{
    LAYOUT_VERSION,
    table::{self, MAPS, Map},
};

use super::{
    heartbeat::{Heartbeat, PinDirectoryId},
    map_directories::{Directory, DirectoryRole},
    path::failed,
    pin_aliases::ObjectIds,
    pin_directory::{PinDirectory, PinError},
    stray_error::StrayError,
    stray_programs::is_map,
    sys::{self, LoadedMap},
};

/// The links and maps of one earlier Culvert.
#[derive(Default)]
pub(super) struct StraySet {
    /// The links, each with the name of its pin.
    pub(super) links: Vec<(String, OwnedFd)>,
    pub(super) maps: BTreeMap<u32, LoadedMap>,
}

impl StraySet {
    /// Returns the layout of the maps. For all older layouts, returns the one before this version's, because only
    /// the maps that all layouts share are used.
    pub(super) fn layout(&self, cgroup: &Path) -> Result<u32, StrayError> {
        let named = |row: &Map| self.maps.values().find(|map| map.name == row.name);
        let found: Vec<_> = MAPS
            .iter()
            .filter_map(|row| Some((row, named(row)?)))
            .collect();
        // A newer layout has all of this layout's lasting maps, or changes one of them.
        let is_complete = MAPS
            .iter()
            .all(|row| row.is_optional || found.iter().any(|(it, _)| *it == row));
        let mut different = found.iter().filter(|(row, map)| !is_map(map, row));
        let different = different.find(|(row, _)| row.is_lasting || is_complete);
        match different {
            Some((_, map)) => Err(StrayError::Layout {
                cgroup: cgroup.to_owned(),
                map: map.name.clone(),
            }),
            None if is_complete => Ok(LAYOUT_VERSION),
            None => Ok(LAYOUT_VERSION - 1),
        }
    }

    /// Pins the maps, then the links.
    pub(super) fn pin(&self, pins: &PinDirectory, layout: u32) -> Result<(), PinError> {
        let directory = Directory::new(layout, DirectoryRole::Current);
        let directory = pins.root().join(directory.to_string());
        pins.create_directories(&directory)?;
        // Maps for constants have a dot in their names, and are not pinned.
        let maps = self.maps.values().filter(|map| !map.name.contains('.'));
        for map in maps {
            let pin = directory.join(&map.name);
            sys::pin(map.fd.as_fd(), &pin).map_err(failed("pin", &pin))?;
        }
        for (name, link) in &self.links {
            let pin = pins.links().join(name);
            sys::pin(link.as_fd(), &pin).map_err(failed("pin", &pin))?;
        }
        Ok(())
    }

    /// Returns the numbers of the links and maps.
    pub(super) fn object_ids(&self) -> ObjectIds {
        let link = |(_, link): &(String, OwnedFd)| Some(sys::link_ids(link.as_fd()).ok()??.link);
        ObjectIds {
            links: self.links.iter().filter_map(link).collect(),
            maps: self.maps.keys().copied().collect(),
        }
    }

    /// Returns the pin directory of the daemon that last used the maps, if it is known.
    pub(super) fn last_pins(&self) -> Option<PinDirectoryId> {
        let mut maps = self.maps.values();
        let steered = maps.find(|map| is_map(map, &table::STEERED))?;
        let heartbeat = Heartbeat::of_map(steered.fd.try_clone().ok()?).ok()?;
        heartbeat.last_pins().ok()?
    }
}
