//! Keeps the programs attached: holds their links and maps open, checks from time to time that they are attached,
//! in effect and pinned, and repairs what is not.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use aya::programs::ProgramFd;
use serde::{Deserialize, Serialize};
use tunnel_common::table::{MAPS, Program};

use super::{
    attach::{self, HeldLink, OpenCgroup},
    heartbeat::DaemonHeartbeat,
    path::failed,
    pin_directory::{PinDirectory, PinError},
    stray_programs::OtherProgram,
    sys,
};
use crate::error_chain::chain;

/// The state of the attached programs, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachmentView {
    /// The number of programs that are attached to the cgroup and in effect; `None` until the first check.
    pub in_effect: Option<usize>,
    /// The reasons why programs are not in effect, or why they or the maps are not pinned.
    pub problems: Vec<String>,
    /// The programs of others at the same hooks, each with the name of the hook.
    pub others: Vec<String>,
    /// The number of programs, links and pins that have been restored since the daemon started.
    pub restored_total: u64,
    /// A description of each program, link and pin in the last repair.
    pub last_restored: Vec<String>,
}

/// The attached programs. Clones share their state.
#[derive(Clone)]
pub struct Attachment(Arc<Mutex<AttachmentState>>);

struct AttachmentState {
    pins: Arc<PinDirectory>,
    cgroup: PathBuf,
    links: Vec<HeldLink>,
    maps: Vec<HeldMap>,
    heartbeat: Arc<DaemonHeartbeat>,
    view: AttachmentView,
    /// The programs of others, by their numbers.
    others: BTreeMap<u32, OtherProgram>,
}

/// A map that is held open, and its pin.
struct HeldMap {
    map: OwnedFd,
    pin: PathBuf,
}

impl HeldMap {
    fn open(pin: PathBuf) -> Result<Self, PinError> {
        let map = sys::open_pin(&pin).map_err(failed("open", &pin))?;
        Ok(Self { map, pin })
    }

    /// Pins the map again if its pin is missing or is another object. Returns a description of what was
    /// repaired.
    fn repair_pin(&self) -> io::Result<Option<String>> {
        let id_of = |object: BorrowedFd<'_>| sys::object_id(object).map(Some);
        attach::repair_pin(self.map.as_fd(), &self.pin, id_of)
    }
}

impl Attachment {
    /// Holds the links and the pinned maps, in a pin directory that stays locked as long as the attachment
    /// exists.
    pub(super) fn new(
        pins: Arc<PinDirectory>,
        cgroup: &Path,
        links: Vec<HeldLink>,
        heartbeat: Arc<DaemonHeartbeat>,
    ) -> Result<Self, PinError> {
        let maps = pins.maps();
        let maps = MAPS.iter().map(|map| HeldMap::open(maps.join(map.name)));
        let state = AttachmentState {
            cgroup: cgroup.to_owned(),
            maps: maps.collect::<Result<_, _>>()?,
            heartbeat,
            view: AttachmentView {
                in_effect: Some(links.len()),
                ..AttachmentView::default()
            },
            pins,
            links,
            others: BTreeMap::new(),
        };
        Ok(Self(Arc::new(Mutex::new(state))))
    }

    fn state(&self) -> MutexGuard<'_, AttachmentState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that every program is attached to the cgroup and in effect, and that the links and maps are
    /// pinned. Repairs what is not, and returns the result. Until `valid_for` has passed, other processes recognise by
    /// the maps that this daemon is running.
    #[must_use]
    pub fn check(&self, valid_for: Duration) -> AttachmentView {
        let mut state = self.state();
        let view = state.check();
        // Written last, because the check may have pinned everything in another directory.
        state.heartbeat.beat(valid_for);
        view
    }

    /// Makes other processes recognise by the maps that this daemon is running, until `valid_for` has passed.
    pub fn record_running(&self, valid_for: Duration) {
        self.state().heartbeat.beat(valid_for);
    }

    /// Replaces an attached program until the next call; returns the previous one.
    pub(super) fn replace_program(
        &self,
        row: &Program,
        program: ProgramFd,
    ) -> io::Result<ProgramFd> {
        let mut state = self.state();
        let mut links = state.links.iter_mut();
        let link = links.find(|link| link.row() == row).ok_or_else(|| {
            io::Error::other(format!(
                "program {} is not attached to the cgroup",
                row.name
            ))
        })?;
        link.replace_program(program)
    }

    /// Records what another module has restored.
    pub(super) fn record_restored(&self, what: String) {
        self.state().record_restored(vec![what]);
    }
}

impl AttachmentState {
    fn check(&mut self) -> AttachmentView {
        let (mut restored, mut problems) = (Vec::new(), Vec::new());
        let in_effect = self.check_programs(&mut restored, &mut problems);
        if let Err(problem) = self.repair_pins(&mut restored) {
            problems.push(format!(
                "the programs stay in effect only while this process runs: {problem}"
            ));
        }
        self.record_restored(restored);
        self.view.in_effect = Some(in_effect);
        self.view.problems = problems;
        self.view.clone()
    }

    fn record_restored(&mut self, restored: Vec<String>) {
        if restored.is_empty() {
            return;
        }
        let what = restored.join("; ");
        tracing::warn!(what, "restored programs, links or pins that were missing");
        self.view.restored_total += u64::try_from(restored.len()).unwrap_or(u64::MAX);
        self.view.last_restored = restored;
    }

    /// Attaches programs that were detached, and returns how many programs are in effect.
    fn check_programs(&mut self, restored: &mut Vec<String>, problems: &mut Vec<String>) -> usize {
        let cgroup = match OpenCgroup::open(&self.cgroup) {
            Ok(cgroup) => cgroup,
            Err(error) => {
                problems.push(chain(&error));
                return 0;
            }
        };
        let (mut in_effect, mut others) = (0, Vec::new());
        for link in &mut self.links {
            let name = link.row().name;
            match check_program(link, &cgroup, &mut others) {
                Ok(repair) => {
                    in_effect += 1;
                    restored.extend(repair);
                }
                Err(error) => problems.push(format!("program {name} is not in effect: {error}")),
            }
        }
        self.name_others(&others, problems);
        in_effect
    }

    /// Describes the programs of others at the same hooks. Those of another Culvert on the same cgroup are a
    /// problem, because they translate connections by other maps.
    fn name_others(&mut self, found: &[FoundProgram], problems: &mut Vec<String>) {
        let ids: BTreeSet<u32> = found.iter().map(|it| it.id).collect();
        self.others.retain(|id, _| ids.contains(id));
        let mut hooks = BTreeSet::new();
        for FoundProgram { id, row, is_direct } in found {
            if !self.others.contains_key(id)
                && let Ok(program) = OtherProgram::inspect(*id, row)
            {
                tracing::info!(%program, "another program is attached to a hook of Culvert");
                self.others.insert(*id, program);
            }
            let program = self.others.get(id);
            if *is_direct && program.is_some_and(OtherProgram::is_culverts) {
                hooks.insert(row.name);
            }
        }
        if !hooks.is_empty() {
            let hooks = hooks.into_iter().collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "another Culvert has programs on cgroup {} ({hooks}), which may send connections elsewhere; stop it, \
                 and restart this daemon to replace its programs",
                self.cgroup.display()
            ));
        }
        self.view.others = self.others.values().map(ToString::to_string).collect();
    }

    /// Pins the links and maps whose pins are missing. If the directory is missing, or another file system
    /// was mounted there, creates and locks it first.
    fn repair_pins(&self, restored: &mut Vec<String>) -> Result<(), String> {
        if self.pins.relock().map_err(|error| chain(&error))? {
            restored.push(format!(
                "the directory {} was missing",
                self.pins.root().display()
            ));
        }
        self.pins
            .create_directories(&self.pins.maps())
            .map_err(|error| chain(&error))?;
        let links = self.links.iter().map(HeldLink::repair_pin);
        let maps = self.maps.iter().map(HeldMap::repair_pin);
        let mut first = Ok(());
        for repair in maps.chain(links) {
            match repair {
                Ok(repair) => restored.extend(repair),
                Err(error) => {
                    first = first.and_then(|()| {
                        Err(format!(
                            "cannot pin in {}: {error}",
                            self.pins.root().display()
                        ))
                    });
                }
            }
        }
        first
    }
}

/// A program of somebody else at one of the hooks.
struct FoundProgram {
    id: u32,
    row: &'static Program,
    /// True if the program is attached to the cgroup itself, not to an ancestor.
    is_direct: bool,
}

/// Repairs a link, and checks that its program is in effect. Adds the programs of others at the same hook to
/// `others`. Returns a description of what was repaired.
fn check_program(
    link: &mut HeldLink,
    cgroup: &OpenCgroup,
    others: &mut Vec<FoundProgram>,
) -> io::Result<Option<String>> {
    let repair = link.repair(cgroup.target())?;
    let own = link.program_id()?;
    let row = link.row();
    let effective = cgroup.programs(row, true)?;
    let is_in_effect = effective.contains(&own);
    if effective.len() > usize::from(is_in_effect) {
        let direct = cgroup.programs(row, false)?;
        let foreign = effective.iter().filter(|id| **id != own);
        others.extend(foreign.map(|id| FoundProgram {
            id: *id,
            row,
            is_direct: direct.contains(id),
        }));
    }
    if is_in_effect {
        Ok(repair)
    } else {
        Err(io::Error::other(
            "the kernel does not run it for the cgroup",
        ))
    }
}
