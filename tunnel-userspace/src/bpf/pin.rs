//! Checks and removes a single pin.

use std::{
    fs, io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use tunnel_common::{
    LAYOUT_VERSION,
    table::{AttachPoint, Entries, Map},
};

use super::{
    attach, device_programs, map_directories::Directory, map_spec::MapSpec, path::failed,
    pin_directory::PinError, sys,
};

/// Detaches the program of a pinned link immediately. The pin stays.
///
/// # Errors
///
/// Returns an error if there is no such pin, if it is not a link, or if the link is already detached.
pub fn detach_pinned_link(pin: &Path) -> io::Result<()> {
    let link = sys::open_pin(pin)?;
    sys::detach_link(link.as_fd())
}

/// An entry in the pin directory or in one of its subdirectories: a pin, or something foreign.
pub(super) struct Pin {
    pub(super) name: String,
    pub(super) path: PathBuf,
}

impl Pin {
    /// Returns the entries of a directory, sorted by name, or none if the directory is missing.
    pub(super) fn all(directory: &Path) -> Result<Vec<Self>, PinError> {
        let read = match fs::read_dir(directory) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("read", directory)(error).into()),
        };
        let pins = read.map(|entry| {
            let entry = entry.map_err(failed("read", directory))?;
            Ok(Self {
                name: entry.file_name().to_string_lossy().into_owned(),
                path: entry.path(),
            })
        });
        let mut pins: Vec<_> = pins.collect::<Result<_, PinError>>()?;
        pins.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(pins)
    }

    /// Checks that the pin is a link that Culvert created.
    pub(super) fn check_link(&self) -> Result<(), PinError> {
        let known = attach::parse_pin_name(&self.name);
        let (program, device) =
            known.ok_or_else(|| self.foreign("Culvert has no program of that name"))?;
        if let Some(device) = device {
            return match device_programs::is_program_of(program, &self.path, device) {
                Ok(true) => Ok(()),
                Ok(false) => Err(self.foreign(format!(
                    "it is not the program {} of device {device}",
                    program.name
                ))),
                Err(error) => Err(failed("inspect", &self.path)(error).into()),
            };
        }
        let link = sys::open_pin(&self.path).map_err(failed("open", &self.path))?;
        let found = sys::link_info(link.as_fd()).map_err(failed("inspect", &self.path))?;
        match found {
            Some(link) if (link.attach_point, link.hook) == (AttachPoint::Cgroup, program.hook) => {
                Ok(())
            }
            Some(_) | None => Err(self.foreign(format!(
                "it is not a link to the hook {} of a cgroup",
                self.name
            ))),
        }
    }

    /// Checks that the pin is a map with the type, sizes and flags that its name calls for; returns its
    /// number of entries. If the directory has an older layout, only the maps that all layouts share can be
    /// checked.
    pub(super) fn check_map(&self, directory: Directory) -> Result<u32, PinError> {
        let is_older = directory.layout < LAYOUT_VERSION;
        let wanted = Map::named(&self.name).filter(|map| map.is_lasting || !is_older);
        if wanted.is_none() && !is_older {
            return Err(self.foreign("Culvert has no map of that name"));
        }
        // This fails for a directory, and for a file that is not a BPF object.
        let map = sys::open_pin(&self.path).map_err(failed("open", &self.path))?;
        let shape = sys::map_spec(map.as_fd());
        let (found, entries) = shape.map_err(|_not_a_map| self.foreign("it is not a map"))?;
        match wanted {
            Some(map) if MapSpec::from_table(map) != found => {
                Err(self.foreign(format!("it is {found}, not {}", MapSpec::from_table(map))))
            }
            // This map's size doesn't depend on the config, so a different size means that it is some other
            // map.
            Some(map)
                if matches!(map.entries, Entries::Fixed(_))
                    && map.entries != Entries::Fixed(entries) =>
            {
                Err(self.foreign(format!(
                    "it has {entries} entries, which is another number than in this layout"
                )))
            }
            Some(_) | None => Ok(entries),
        }
    }

    /// Detaches the program if the pin is for a link or a filter, and removes the pin.
    pub(super) fn remove(&self) -> Result<(), PinError> {
        let path = &self.path;
        if let Some((program, Some(device))) = attach::parse_pin_name(&self.name) {
            device_programs::remove_filter(program, path, device)
                .map_err(failed("detach the filter of", path))?;
        }
        // Maps can't be detached, and links to a removed cgroup are already detached.
        if let Err(error) = detach_pinned_link(path) {
            tracing::debug!(%error, pin = %path.display(), "nothing to detach");
        }
        Ok(fs::remove_file(path).map_err(failed("remove", path))?)
    }

    fn foreign(&self, difference: impl Into<String>) -> PinError {
        PinError::Foreign {
            path: self.path.clone(),
            difference: difference.into(),
        }
    }
}
