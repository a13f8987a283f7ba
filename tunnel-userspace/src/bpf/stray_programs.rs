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

use tunnel_common::table::{self, AttachPoint, Map, Program};

use super::{
    attach::{self, OpenCgroup},
    heartbeat::{Heartbeat, PinDirectoryId},
    map_spec::MapSpec,
    open_maps::process_with_map,
    pin_aliases::PinAliases,
    pin_directory::PinDirectory,
    stray_error::StrayError,
    stray_set::StraySet,
    sys::{self, LinkIds, LinkInfo, LoadedMap},
};

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

pub(super) fn is_map(found: &LoadedMap, row: &Map) -> bool {
    found.name == row.name && found.spec == MapSpec::from_table(row)
}

/// The programs of an earlier Culvert, to be detached once this Culvert's programs are attached.
#[derive(Debug, Default)]
#[must_use = "an earlier Culvert's programs stay in effect until they are detached"]
pub struct StrayPrograms {
    links: Vec<(String, OwnedFd)>,
    /// The pins of these programs and their maps in other directories.
    pins: Vec<PinAliases>,
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

    /// Detaches the programs, and removes the pins that other directories have of them. Returns how many programs there
    /// were.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses to detach a program.
    pub fn detach(&self) -> io::Result<usize> {
        // Programs that replace a VIP are detached before those that restore it.
        for (name, link) in self.links.iter().rev() {
            sys::detach_link(link.as_fd())
                .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
        }
        for pins in &self.pins {
            pins.remove();
        }
        Ok(self.links.len())
    }

    fn add(&mut self, set: StraySet, pins: PinAliases) {
        self.links.extend(set.links);
        self.pins.push(pins);
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
    check_pins_not_in_use(pins)?;
    let mut strays = StrayPrograms::default();
    let Some(found) = Found::on(cgroup, pins)? else {
        return Ok(strays);
    };
    if found.programs.is_empty() {
        return Ok(strays);
    }
    found.check_not_running()?;
    let mut sets = found.sets_with_aliases(pins.root())?;
    if pins.is_empty()?
        && let Some((newest, aliases)) = sets.pop()
    {
        let layout = newest.layout(cgroup)?;
        newest.pin(pins, layout)?;
        strays.taken_over = newest.links.len();
        tracing::warn!(
            programs = newest.links.len(),
            pins = %pins.root().display(),
            cgroup = %cgroup.display(),
            "took over the attached programs and maps of an earlier Culvert, whose pins are missing here"
        );
        remove_earlier_pins(&newest, &aliases);
    }
    for (set, aliases) in sets {
        strays.add(set, aliases);
    }
    Ok(strays)
}

/// Removes the pins of a set of programs in the earlier Culvert's pin directory. If that directory can't be reached,
/// only logs that.
fn remove_earlier_pins(set: &StraySet, aliases: &PinAliases) {
    let removed = aliases.remove();
    for directory in &removed {
        let directory = directory.display();
        tracing::warn!(%directory, "removed the earlier pins of these programs and maps");
    }
    if removed.is_empty()
        && let Some(earlier) = set.last_pins()
    {
        tracing::warn!(
            %earlier,
            "the earlier pin directory is not on this mount of a BPF file system; if it still exists elsewhere, remove \
             it by `rm -r`, because `culvert cleanup` with the earlier config would detach programs that are in use"
        );
    }
}

/// Returns an error if a running Culvert with another pin directory uses the maps that are pinned in this one. The
/// caller has locked this directory.
fn check_pins_not_in_use(pins: &PinDirectory) -> Result<(), StrayError> {
    // Without such a map, no daemon has written its heartbeat.
    let Ok(heartbeat) = Heartbeat::open(&pins.maps()) else {
        return Ok(());
    };
    match heartbeat.running(Some(pins.id()?)) {
        Ok(Some(daemon)) => Err(StrayError::RunningWithPins {
            pins: pins.root().to_owned(),
            daemon: daemon.pins,
            valid_for: daemon.valid_for,
        }),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// Detaches all programs of Culvert on a cgroup that are not pinned in the pin directory `root`, which is locked if it
/// exists. Returns how many there were, or `None` if this process may not inspect programs.
///
/// # Errors
///
/// Returns an error if the programs belong to a process that is running, or if the kernel refuses a request.
pub fn detach_strays(
    root: &Path,
    pins: Option<&PinDirectory>,
    cgroup: &Path,
) -> Result<Option<usize>, StrayError> {
    let inspect = |source| StrayError::Inspect {
        cgroup: cgroup.to_owned(),
        source,
    };
    pins.map_or(Ok(()), check_pins_not_in_use)?;
    let known = pins.map_or_else(BTreeSet::new, pinned_programs);
    let others = others_on(cgroup, &known)?;
    if others.iter().any(|it| it.owner == Owner::Unknown) {
        return Ok(None);
    }
    let own = pins.map(PinDirectory::id).transpose()?;
    let found = Found::new(cgroup, others, known, own);
    if found.programs.is_empty() {
        return Ok(Some(0));
    }
    found.check_not_running()?;
    let mut strays = StrayPrograms::default();
    for (set, aliases) in found.sets_with_aliases(root)? {
        strays.add(set, aliases);
    }
    strays.detach().map(Some).map_err(inspect)
}

/// Programs of Culvert that are attached directly to a cgroup and not pinned in the pin directory.
struct Found {
    cgroup: PathBuf,
    programs: Vec<OtherProgram>,
    /// The numbers of the programs that are pinned in the pin directory.
    pinned: BTreeSet<u32>,
    /// The number that identifies the pin directory.
    own: Option<PinDirectoryId>,
}

impl Found {
    /// Finds the programs. Returns `None` if this process may not inspect the programs at a hook.
    fn on(cgroup: &Path, pins: &PinDirectory) -> Result<Option<Self>, StrayError> {
        let pinned = pinned_programs(pins);
        let others = others_on(cgroup, &pinned)?;
        let unknown = others.iter().filter(|it| it.owner == Owner::Unknown);
        let hooks: BTreeSet<_> = unknown.clone().map(|it| it.row.hook).collect();
        if !hooks.is_empty() {
            let all = Program::at_attach_point(AttachPoint::Cgroup).count();
            if hooks.len() == all {
                return Err(StrayError::Unknown {
                    cgroup: cgroup.to_owned(),
                    pins: pins.root().to_owned(),
                });
            }
            let unknown: Vec<_> = unknown.map(ToString::to_string).collect();
            tracing::warn!(
                programs = unknown.join("; "),
                cgroup = %cgroup.display(),
                "other programs are attached, which can't be inspected without CAP_SYS_ADMIN; if they belong to an \
                 earlier Culvert, stop this daemon, run `culvert prepare` as root, and start this daemon again"
            );
            return Ok(None);
        }
        Ok(Some(Self::new(cgroup, others, pinned, Some(pins.id()?))))
    }

    fn new(
        cgroup: &Path,
        mut programs: Vec<OtherProgram>,
        pinned: BTreeSet<u32>,
        own: Option<PinDirectoryId>,
    ) -> Self {
        programs.retain(OtherProgram::is_culverts);
        Self {
            cgroup: cgroup.to_owned(),
            programs,
            pinned,
            own,
        }
    }

    fn maps(&self) -> BTreeSet<u32> {
        let maps = self.programs.iter().map(OtherProgram::maps);
        maps.flatten().copied().collect()
    }

    /// Returns an error if a running process has one of the programs' maps open that only a daemon opens, or if such a
    /// map has the heartbeat of a daemon.
    fn check_not_running(&self) -> Result<(), StrayError> {
        let (mut daemon_maps, mut steered) = (BTreeSet::new(), Vec::new());
        for id in self.maps() {
            let Some(map) = self.map(id)? else { continue };
            if map.name == table::HOST.name {
                daemon_maps.insert(id);
            } else if is_map(&map, &table::STEERED) {
                steered.push(map);
            }
        }
        let cgroup = self.cgroup.clone();
        if let Some(pid) = process_with_map(&daemon_maps) {
            return Err(StrayError::Running { pid, cgroup });
        }
        for LoadedMap { id: map, fd, .. } in steered {
            let running = Heartbeat::of_map(fd).and_then(|it| it.running(self.own));
            let running = running.map_err(|error| self.inspect_error(error.source))?;
            if let Some(daemon) = running {
                return Err(StrayError::RunningElsewhere {
                    cgroup,
                    daemon: daemon.pins,
                    map,
                    valid_for: daemon.valid_for,
                });
            }
        }
        Ok(())
    }

    /// Returns the programs as sets, each with its pins in other directories, which are locked. Returns an error if
    /// another process has locked one of these directories.
    fn sets_with_aliases(&self, root: &Path) -> Result<Vec<(StraySet, PinAliases)>, StrayError> {
        let with_aliases = |set: StraySet| {
            let aliases = PinAliases::find(root, &set.object_ids());
            let aliases = aliases.map_err(|pins| StrayError::Locked {
                cgroup: self.cgroup.clone(),
                pins,
            })?;
            Ok((set, aliases))
        };
        self.sets()?.into_iter().map(with_aliases).collect()
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
                set.links
                    .extend(link.map(|link| (program.row.name.to_owned(), link)));
            }
        }
        let mut sets: Vec<_> = sets.into_values().collect();
        self.add_uplink_programs(&links, &mut sets)?;
        Ok(sets)
    }

    /// Adds the programs on uplinks that share maps with a set. Programs that are attached as filters have no links, and
    /// are not found.
    fn add_uplink_programs(
        &self,
        links: &[(LinkIds, LinkInfo)],
        sets: &mut [StraySet],
    ) -> Result<(), StrayError> {
        let attached = links.iter().filter(|(ids, info)| {
            info.attach_point == AttachPoint::Devices && !self.pinned.contains(&ids.program)
        });
        for (ids, info) in attached {
            // The program may have been removed meanwhile.
            let Ok(program) = sys::program_by_id(ids.program) else {
                continue;
            };
            let row = Program::named(&program.name).filter(|row| {
                row.attach_point == AttachPoint::Devices && row.kind.number() == program.kind
            });
            let shares = |set: &&mut StraySet| {
                let mut maps = program.maps.iter();
                maps.any(|id| set.maps.get(id).is_some_and(|map| !map.name.contains('.')))
            };
            let device = u32::try_from(info.target_id).unwrap_or_default();
            if let Some(row) = row
                && device != 0
                && let Some(set) = sets.iter_mut().find(shares)
                && let Some(link) =
                    sys::link_by_id(ids.link).map_err(|error| self.inspect_error(error))?
            {
                for id in &program.maps {
                    set.maps.extend(self.map(*id)?.map(|map| (*id, map)));
                }
                set.links.push((attach::pin_name(row, device), link));
            }
        }
        Ok(())
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
