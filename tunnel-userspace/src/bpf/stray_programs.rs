//! Finds programs at the hooks of a cgroup that are not pinned in this Culvert's directory: those of an earlier
//! Culvert whose pins were lost or are in another directory, and those of others.
//!
//! The programs of an earlier Culvert translate connections by maps that nobody updates any more. If this Culvert
//! has no programs and maps of its own yet, it pins those that it finds, and continues with them as after a restart.
//! Otherwise it detaches them once its own programs are attached. Only a process with CAP_SYS_ADMIN may inspect
//! programs by their numbers, so `culvert prepare` does this for a daemon without that capability.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    io::{self, ErrorKind},
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use tunnel_common::{
    LAYOUT_VERSION,
    table::{self, AttachPoint, MAPS, Map, Program},
};

use super::{
    attach::OpenCgroup,
    map_directories::{Directory, DirectoryRole},
    map_spec::MapSpec,
    path::{PathError, failed},
    pin_directory::{PinDirectory, PinError},
    sys::{self, LoadedMap},
};

/// An error that can occur when looking for programs that are not pinned.
#[derive(Debug, thiserror::Error)]
pub enum StrayError {
    /// The cgroup can't be opened.
    #[error(transparent)]
    Cgroup(#[from] PathError),
    /// The pin directory can't be used.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The kernel refused to list or open programs, links or maps.
    #[error("cannot inspect the programs on cgroup {cgroup}")]
    Inspect {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The programs belong to a Culvert that is running.
    #[error(
        "another culvert (process {pid}) has its programs on cgroup {cgroup}; stop it first, or set bpf.cgroup to \
         another cgroup"
    )]
    Running {
        /// The process.
        pid: u32,
        /// The cgroup's directory.
        cgroup: PathBuf,
    },
    /// The programs use maps of a layout that this version does not know.
    #[error(
        "cgroup {cgroup} has programs of a culvert with another layout of maps ({map} differs); run that culvert, or \
         first detach its programs by its `culvert cleanup`"
    )]
    Layout {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The map that differs.
        map: String,
    },
    /// Programs that this process may not inspect are attached to every hook.
    #[error(
        "every hook of cgroup {cgroup} has a program that is not pinned in {pins}, and this process lacks \
         CAP_SYS_ADMIN to inspect them; if they belong to an earlier culvert, run `culvert prepare` as root to take \
         them over, or `culvert cleanup` to detach them"
    )]
    Unknown {
        /// The cgroup's directory.
        cgroup: PathBuf,
        /// The pin directory.
        pins: PathBuf,
    },
}

/// A program at one of Culvert's hooks that this Culvert has not attached.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct OtherProgram {
    id: u32,
    row: &'static Program,
    owner: Owner,
}

/// The owner of a program.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Owner {
    /// Culvert. The numbers are those of the program's maps.
    Culvert(Vec<u32>),
    /// Somebody else. The text is the program's name.
    Other(String),
    /// This process may not inspect the program.
    Unknown,
}

impl OtherProgram {
    /// Inspects the program with this number at the hook of one of Culvert's programs.
    pub(super) fn inspect(id: u32, row: &'static Program) -> io::Result<Self> {
        let owner = match sys::program_by_id(id) {
            Ok(found) if found.name == row.name && found.kind == row.kind.number() => {
                if found.maps.iter().any(|id| is_origin(*id)) {
                    Owner::Culvert(found.maps)
                } else {
                    Owner::Other(found.name)
                }
            }
            Ok(found) => Owner::Other(found.name),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Owner::Unknown,
            // The program was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => Owner::Other(String::new()),
            Err(error) => return Err(error),
        };
        Ok(Self { id, row, owner })
    }

    /// Returns true if the program is known to be Culvert's.
    pub(super) const fn is_culverts(&self) -> bool {
        matches!(self.owner, Owner::Culvert(_))
    }
}

impl fmt::Display for OtherProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hook, id) = (self.row.name, self.id);
        match &self.owner {
            Owner::Culvert(_) => write!(f, "{hook}: program {id} of another Culvert"),
            Owner::Other(name) => write!(f, "{hook}: program {id} ({name})"),
            Owner::Unknown => write!(f, "{hook}: program {id}"),
        }
    }
}

/// Returns true if this is the number of a map that holds sockets' translations. Only Culvert has such a map.
fn is_origin(id: u32) -> bool {
    sys::map_by_id(id).is_ok_and(|map| is_map(&map, &table::ORIGIN))
}

fn is_map(found: &LoadedMap, row: &Map) -> bool {
    found.name == row.name && found.spec == MapSpec::from_table(row)
}

/// The programs of an earlier Culvert, to be detached once this Culvert's programs are attached.
#[derive(Debug, Default)]
#[must_use = "an earlier Culvert's programs stay in effect until they are detached"]
pub struct StrayPrograms {
    links: Vec<(&'static Program, OwnedFd)>,
    taken_over: usize,
}

impl StrayPrograms {
    /// Returns how many programs were pinned instead, so that they are replaced like those of an earlier process.
    #[must_use]
    pub const fn taken_over(&self) -> usize {
        self.taken_over
    }

    /// Returns how many programs must be detached.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.links.len()
    }

    /// Returns true if no program must be detached.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Detaches the programs, and returns how many there were.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses to detach a program.
    pub fn detach(&self) -> io::Result<usize> {
        // Programs that replace a VIP are detached before those that restore it.
        for (row, link) in self.links.iter().rev() {
            sys::detach_link(link.as_fd())
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", row.name)))?;
        }
        Ok(self.links.len())
    }
}

/// Looks for programs of Culvert on a cgroup that are not pinned in the pin directory. If the directory has no
/// programs and maps yet, pins the ones that it finds, and logs that. Otherwise returns them, to be detached.
///
/// # Errors
///
/// Returns an error if the programs belong to a process that is running, if this process may not inspect the
/// programs although each hook has one, or if the kernel refuses a request.
pub fn take_over_strays(pins: &PinDirectory, cgroup: &Path) -> Result<StrayPrograms, StrayError> {
    let Some(found) = Found::on(cgroup, pins)? else {
        return Ok(StrayPrograms::default());
    };
    if found.programs.is_empty() {
        return Ok(StrayPrograms::default());
    }
    found.check_not_running()?;
    let mut sets = found.sets()?;
    let mut taken_over = 0;
    if pins.is_empty()?
        && let Some(newest) = sets.pop()
    {
        let layout = newest.layout(cgroup)?;
        newest.pin(pins, layout)?;
        taken_over = newest.links.len();
        tracing::warn!(
            programs = newest.links.len(),
            pins = %pins.root().display(),
            cgroup = %cgroup.display(),
            "took over the attached programs and maps of an earlier Culvert, whose pins are missing here"
        );
    }
    let links = sets.into_iter().flat_map(|set| set.links);
    Ok(StrayPrograms {
        links: links.collect(),
        taken_over,
    })
}

/// Detaches all programs of Culvert on a cgroup that are not pinned in the pin directory. Returns how many there
/// were, or `None` if this process may not inspect programs.
///
/// # Errors
///
/// Returns an error if the programs belong to a process that is running, or if the kernel refuses a request.
pub fn detach_strays(
    pins: Option<&PinDirectory>,
    cgroup: &Path,
) -> Result<Option<usize>, StrayError> {
    let inspect = |source| StrayError::Inspect {
        cgroup: cgroup.to_owned(),
        source,
    };
    let known = pins.map_or_else(BTreeSet::new, pinned_programs);
    let others = others_on(cgroup, &known)?;
    if others.iter().any(|it| it.owner == Owner::Unknown) {
        return Ok(None);
    }
    let found = Found::new(cgroup, others);
    if found.programs.is_empty() {
        return Ok(Some(0));
    }
    found.check_not_running()?;
    let links = found.sets()?.into_iter().flat_map(|set| set.links);
    let strays = StrayPrograms {
        links: links.collect(),
        taken_over: 0,
    };
    strays.detach().map(Some).map_err(inspect)
}

/// Programs of Culvert that are attached directly to a cgroup and not pinned in the pin directory.
struct Found {
    cgroup: PathBuf,
    programs: Vec<OtherProgram>,
}

impl Found {
    /// Finds the programs. Returns `None` if this process may not inspect the programs at a hook.
    fn on(cgroup: &Path, pins: &PinDirectory) -> Result<Option<Self>, StrayError> {
        let others = others_on(cgroup, &pinned_programs(pins))?;
        let is_unknown = |it: &&OtherProgram| it.owner == Owner::Unknown;
        let hooks: BTreeSet<_> = others
            .iter()
            .filter(is_unknown)
            .map(|it| it.row.hook)
            .collect();
        if !hooks.is_empty() {
            let all = Program::at_attach_point(AttachPoint::Cgroup).count();
            return if hooks.len() == all {
                Err(StrayError::Unknown {
                    cgroup: cgroup.to_owned(),
                    pins: pins.root().to_owned(),
                })
            } else {
                Ok(None)
            };
        }
        Ok(Some(Self::new(cgroup, others)))
    }

    fn new(cgroup: &Path, mut programs: Vec<OtherProgram>) -> Self {
        programs.retain(OtherProgram::is_culverts);
        Self {
            cgroup: cgroup.to_owned(),
            programs,
        }
    }

    fn maps(&self) -> BTreeSet<u32> {
        let maps = self.programs.iter().map(OtherProgram::maps);
        maps.flatten().copied().collect()
    }

    /// Returns an error if a running process has one of the programs' maps open that only a daemon opens.
    fn check_not_running(&self) -> Result<(), StrayError> {
        let mut daemon_maps = BTreeSet::new();
        for id in self.maps() {
            if self
                .map(id)?
                .is_some_and(|map| map.name == table::HOST.name)
            {
                daemon_maps.insert(id);
            }
        }
        match process_with_map(&daemon_maps) {
            Some(pid) => Err(StrayError::Running {
                pid,
                cgroup: self.cgroup.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Returns the programs as sets that share their maps, the newest last.
    fn sets(&self) -> Result<Vec<StraySet>, StrayError> {
        let inspect = |source| self.inspect_error(source);
        let mut sets: BTreeMap<u32, StraySet> = BTreeMap::new();
        let links = sys::loaded_links().map_err(inspect)?;
        for program in &self.programs {
            let mut maps = BTreeMap::new();
            for id in program.maps() {
                maps.extend(self.map(*id)?.map(|map| (*id, map)));
            }
            let origin = maps.values().find(|map| is_map(map, &table::ORIGIN));
            let Some(key) = origin.map(|map| map.id) else {
                continue;
            };
            let set = sets.entry(key).or_default();
            set.maps.extend(maps);
            let its = links.iter().filter(|(ids, info)| {
                ids.program == program.id && info.attach_point == AttachPoint::Cgroup
            });
            for (ids, _) in its {
                let link = sys::link_by_id(ids.link).map_err(inspect)?;
                set.links.extend(link.map(|link| (program.row, link)));
            }
        }
        Ok(sets.into_values().collect())
    }

    /// Opens a map. Returns `None` if it has been removed meanwhile.
    fn map(&self, id: u32) -> Result<Option<LoadedMap>, StrayError> {
        match sys::map_by_id(id) {
            Ok(map) => Ok(Some(map)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.inspect_error(error)),
        }
    }

    fn inspect_error(&self, source: io::Error) -> StrayError {
        StrayError::Inspect {
            cgroup: self.cgroup.clone(),
            source,
        }
    }
}

impl OtherProgram {
    fn maps(&self) -> &[u32] {
        match &self.owner {
            Owner::Culvert(maps) => maps,
            Owner::Other(_) | Owner::Unknown => &[],
        }
    }
}

/// The links and maps of one earlier Culvert.
#[derive(Default)]
struct StraySet {
    links: Vec<(&'static Program, OwnedFd)>,
    maps: BTreeMap<u32, LoadedMap>,
}

impl StraySet {
    /// Returns the layout of the maps. For all older layouts, returns the one before this version's, because only
    /// the maps that all layouts share are used.
    fn layout(&self, cgroup: &Path) -> Result<u32, StrayError> {
        let named = |row: &Map| self.maps.values().find(|map| map.name == row.name);
        let found: Vec<_> = MAPS
            .iter()
            .filter_map(|row| Some((row, named(row)?)))
            .collect();
        // A newer layout has all of this layout's lasting maps, or changes one of them.
        let is_complete = found.len() == MAPS.len();
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
    fn pin(&self, pins: &PinDirectory, layout: u32) -> Result<(), PinError> {
        let directory = Directory::new(layout, DirectoryRole::Current);
        let directory = pins.root().join(directory.to_string());
        pins.create_directories(&directory)?;
        // Maps for constants have a dot in their names, and are not pinned.
        let maps = self.maps.values().filter(|map| !map.name.contains('.'));
        for map in maps {
            let pin = directory.join(&map.name);
            sys::pin(map.fd.as_fd(), &pin).map_err(failed("pin", &pin))?;
        }
        for (row, link) in &self.links {
            let pin = pins.links().join(row.name);
            sys::pin(link.as_fd(), &pin).map_err(failed("pin", &pin))?;
        }
        Ok(())
    }
}

/// Returns the programs at the hooks of a cgroup, except those with the given numbers and those attached to the
/// cgroup's ancestors.
fn others_on(cgroup: &Path, known: &BTreeSet<u32>) -> Result<Vec<OtherProgram>, StrayError> {
    let inspect = |source| StrayError::Inspect {
        cgroup: cgroup.to_owned(),
        source,
    };
    let open = OpenCgroup::open(cgroup)?;
    let mut others = Vec::new();
    for row in Program::at_attach_point(AttachPoint::Cgroup) {
        let ids = open.programs(row, false).map_err(inspect)?;
        for id in ids.into_iter().filter(|id| !known.contains(id)) {
            others.push(OtherProgram::inspect(id, row).map_err(inspect)?);
        }
    }
    Ok(others)
}

/// Returns the numbers of the programs whose links are pinned in the pin directory.
fn pinned_programs(pins: &PinDirectory) -> BTreeSet<u32> {
    let entries = fs::read_dir(pins.links()).into_iter().flatten().flatten();
    let program = |entry: fs::DirEntry| {
        let link = sys::open_pin(&entry.path()).ok()?;
        Some(sys::link_ids(link.as_fd()).ok()??.program)
    };
    entries.filter_map(program).collect()
}

/// Returns a process, other than this one, that has one of these maps open, from `/proc/<pid>/fdinfo`.
fn process_with_map(ids: &BTreeSet<u32>) -> Option<u32> {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| *pid != own && has_map_open(*pid, ids))
}

fn has_map_open(pid: u32, ids: &BTreeSet<u32>) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    entries.into_iter().flatten().flatten().any(|entry| {
        let is_map = fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().contains("bpf-map"));
        let number = entry.file_name();
        let path = format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy());
        let read = |path: String| fs::read_to_string(path).unwrap_or_default();
        is_map && map_id_in(&read(path)).is_some_and(|id| ids.contains(&id))
    })
}

/// Returns the map's number from the text of `/proc/<pid>/fdinfo/<fd>`.
fn map_id_in(text: &str) -> Option<u32> {
    let id = text.lines().find_map(|line| line.strip_prefix("map_id:"));
    id?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_open_map_is_found() {
        let text =
            "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nmap_type:\t2\nmap_id:\t4711\nfrozen:\t0\n";

        assert_eq!(map_id_in(text), Some(4711));
        assert_eq!(map_id_in("pos:\t0\n"), None);
    }
}
