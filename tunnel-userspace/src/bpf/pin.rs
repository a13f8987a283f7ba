//! A pin: its check, and its removal.

use std::{
    fs, io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use tunnel_common::{
    LAYOUT_VERSION,
    table::{Entries, Map, Place},
};

use super::{attach, folders::Folder, guard, path::failed, pins::PinError, shapes::Shape, sys};

/// A pin, or another entry of a folder of pins.
pub(super) struct Pin {
    pub(super) name: String,
    pub(super) path: PathBuf,
}

impl Pin {
    /// Returns the entries of a folder, sorted; none if the folder is not there.
    pub(super) fn all(folder: &Path) -> Result<Vec<Self>, PinError> {
        let read = match fs::read_dir(folder) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("read", folder)(error).into()),
        };
        let pins = read.map(|entry| {
            let entry = entry.map_err(failed("read", folder))?;
            Ok(Self {
                name: entry.file_name().to_string_lossy().into_owned(),
                path: entry.path(),
            })
        });
        let mut pins: Vec<_> = pins.collect::<Result<_, PinError>>()?;
        pins.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(pins)
    }

    /// Checks that a link is one of ours.
    pub(super) fn check_link(&self) -> Result<(), PinError> {
        let known = attach::of_pin(&self.name);
        let (program, device) = known.ok_or_else(|| self.foreign("no program of that name"))?;
        if let Some(device) = device {
            return match guard::is_guard(&self.path, device) {
                Ok(true) => Ok(()),
                Ok(false) => Err(self.foreign(format!("it is no guard of device {device}"))),
                Err(error) => Err(failed("look at", &self.path)(error).into()),
            };
        }
        let link = sys::open_pin(&self.path).map_err(failed("open", &self.path))?;
        let found = sys::link(link.as_fd()).map_err(failed("look at", &self.path))?;
        match found {
            Some(link) if (link.place, link.hook) == (Place::Cgroup, program.hook) => Ok(()),
            Some(_) | None => {
                Err(self.foreign(format!("it is no link of a cgroup's {} hook", self.name)))
            }
        }
    }

    /// Checks that a map has the shape for its name; returns its number of entries. In an older layout
    /// only the shapes of lasting maps are known.
    pub(super) fn check_map(&self, folder: Folder) -> Result<u32, PinError> {
        let is_older = folder.layout < LAYOUT_VERSION;
        let wanted = Map::named(&self.name).filter(|map| map.lasts || !is_older);
        if wanted.is_none() && !is_older {
            return Err(self.foreign("no map of that name"));
        }
        // A folder, or not a BPF object.
        let map = sys::open_pin(&self.path).map_err(failed("open", &self.path))?;
        let shape = sys::shape(map.as_fd());
        let (found, entries) = shape.map_err(|_not_a_map| self.foreign("it is no map"))?;
        match wanted {
            Some(map) if Shape::of(map) != found => {
                Err(self.foreign(format!("it is {found}, not {}", Shape::of(map))))
            }
            // A change of the config would not replace this map.
            Some(map)
                if matches!(map.entries, Entries::Fixed(_))
                    && map.entries != Entries::Fixed(entries) =>
            {
                Err(self.foreign(format!(
                    "it has {entries} entries, others than this layout's"
                )))
            }
            Some(_) | None => Ok(entries),
        }
    }

    /// Detaches the program of a link or filter, and removes the pin.
    pub(super) fn remove(&self) -> Result<(), PinError> {
        let path = &self.path;
        if let Some((_, Some(device))) = attach::of_pin(&self.name) {
            guard::remove_filter(path, device).map_err(failed("take off", path))?;
        }
        let pin = sys::open_pin(path).map_err(failed("open", path))?;
        // A map has nothing to detach, and a link whose cgroup is gone is detached already.
        if let Err(error) = sys::detach_link(pin.as_fd()) {
            tracing::debug!(%error, pin = %path.display(), "nothing to detach");
        }
        Ok(fs::remove_file(path).map_err(failed("remove", path))?)
    }

    fn foreign(&self, what: impl Into<String>) -> PinError {
        PinError::Foreign {
            path: self.path.clone(),
            what: what.into(),
        }
    }
}
