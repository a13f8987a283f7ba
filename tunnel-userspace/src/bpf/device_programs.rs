//! Attaches programs to devices.
//!
//! On kernels with tcx, a program is attached through a pinned link. On others, it is attached as a clsact filter
//! with a fixed priority and handle; the program is then pinned to record that the filter exists.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    mem::ManuallyDrop,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya::programs::{
    ProgramError, SchedClassifier, TcAttachType, TcError,
    tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact},
};
use nix::net::if_::if_indextoname;
use tunnel_common::table::{GUARD, IN, OUT, Program};

use super::{
    attach::{self, HeldLink},
    attachment::Attachment,
    probe::Features,
    programs::{FrameRun, Programs, to_io_error},
    sys::{self, LinkTarget},
};
use crate::net::{FILTER_HANDLE, ingress_qdiscs};

/// The filters' handle.
const HANDLE: TcHandle = TcHandle::new(0, FILTER_HANDLE);

/// The position of a program's filter.
#[derive(Clone, Copy)]
struct FilterPosition {
    hook: TcAttachType,
    /// Filters run in the order of their priorities, which are 1 to 65,535.
    priority: u16,
}

impl FilterPosition {
    /// Returns the position of a program. The guard runs before all others, and the program at egress after all others.
    fn of(row: &Program) -> Self {
        if *row == GUARD {
            Self {
                hook: TcAttachType::Ingress,
                priority: 1,
            }
        } else if *row == IN {
            Self {
                hook: TcAttachType::Ingress,
                priority: 2,
            }
        } else {
            Self {
                hook: TcAttachType::Egress,
                priority: u16::MAX,
            }
        }
    }

    /// Returns the filter on a device, whether or not it exists.
    fn link(self, device: &str) -> io::Result<SchedClassifierLink> {
        SchedClassifierLink::attached(device, self.hook, self.priority, HANDLE, None)
    }
}

/// An error that can occur when attaching or detaching a program.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub struct DeviceError {
    step: String,
    #[source]
    source: io::Error,
}

pub(super) fn failed(step: String) -> impl FnOnce(io::Error) -> DeviceError {
    move |source| DeviceError { step, source }
}

/// Programs for devices, and the devices that they are attached to.
pub(super) struct DevicePrograms {
    /// The rows of the programs, in the order in which they are attached.
    rows: &'static [Program],
    programs: Programs,
    /// The logging variant of a program, which replaces the plain one.
    logging: Option<(&'static Program, Programs)>,
    links: PathBuf,
    features: Features,
    /// The devices to which this process has attached a program, by its name, each with its link. A filter has no link.
    attached: BTreeMap<(u32, &'static str), Option<HeldLink>>,
    /// Those that could not be repaired, and may not be in effect.
    broken: BTreeSet<(u32, &'static str)>,
    /// The devices that have all programs.
    complete: BTreeSet<u32>,
    /// The view that shows what was restored.
    attachment: Option<Attachment>,
}

impl DevicePrograms {
    pub(super) fn new(
        rows: &'static [Program],
        programs: Programs,
        logging: Option<(&'static Program, Programs)>,
        (links, features): (PathBuf, Features),
    ) -> Self {
        let pins = pins(&links, rows);
        let devices = pins.iter().map(|pin| pin.device);
        let has = |device: u32, row: &Program| {
            let mut pins = pins.iter();
            pins.any(|pin| pin.device == device && pin.row == row)
        };
        let complete = devices.filter(|device| rows.iter().all(|row| has(*device, row)));
        Self {
            rows,
            programs,
            logging,
            complete: complete.collect(),
            links,
            features,
            attached: BTreeMap::new(),
            broken: BTreeSet::new(),
            attachment: None,
        }
    }

    /// Makes the programs show what they restore in the view of the attached programs.
    pub(super) fn set_attachment(&mut self, attachment: Attachment) {
        self.attachment = Some(attachment);
    }

    /// Returns the object whose program with this row is attached.
    fn object_of(&self, row: &Program) -> &Programs {
        match &self.logging {
            Some((logging, programs)) if *logging == row => programs,
            Some(_) | None => &self.programs,
        }
    }

    /// Runs a program on a frame.
    pub(super) fn run(&self, row: &Program, frame: &[u8]) -> io::Result<FrameRun> {
        self.object_of(row).run(row, frame)
    }

    /// Attaches the programs to every device. If `reattach` is true, repairs those that are already attached.
    pub(super) fn attach(
        &mut self,
        devices: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), DeviceError> {
        self.attached
            .retain(|(device, _), _| devices.contains_key(device));
        self.broken
            .retain(|(device, _)| devices.contains_key(device));
        self.complete.clear();
        let mut qdiscs = IngressQdiscs::default();
        let mut first = Ok(());
        for (device, name) in devices {
            for row in self.rows {
                if !reattach && self.is_in_effect(row, *device) {
                    continue;
                }
                // Continues with the other devices after a failure. The next program on this one may need the one that failed.
                if let Err(error) = self.attach_to(row, *device, name, &mut qdiscs) {
                    first = first.and(Err(error));
                    break;
                }
            }
            if self.rows.iter().all(|row| self.is_in_effect(row, *device)) {
                self.complete.insert(*device);
            }
        }
        first
    }

    /// Returns true if this process has attached a program to a device, and the last repair didn't fail.
    fn is_in_effect(&self, row: &Program, device: u32) -> bool {
        let key = (device, row.name);
        self.attached.contains_key(&key) && !self.broken.contains(&key)
    }

    /// Returns the devices that have all programs: after [`Self::attach`] those to which it has attached them, and before it
    /// those to which an earlier process has, by their pins.
    pub(super) const fn complete_links(&self) -> &BTreeSet<u32> {
        &self.complete
    }

    /// Attaches a program to a device, or repairs it. A link stays attached even if it can't be pinned.
    fn attach_to(
        &mut self,
        row: &'static Program,
        device: u32,
        name: &str,
        qdiscs: &mut IngressQdiscs,
    ) -> Result<(), DeviceError> {
        let pin = self.links.join(attach::pin_name(row, device));
        let attached = if self.features.tcx {
            self.attach_link(row, device, name, pin)
        } else {
            self.broken.insert((device, row.name));
            let attached = self.attach_filter(row, (device, name), &pin, qdiscs);
            attached.map(|()| {
                self.broken.remove(&(device, row.name));
                self.record_attached(row, device, name, None);
            })
        };
        let program = row.name;
        attached.map_err(failed(format!("attach program {program} to device {name}")))
    }

    fn attach_link(
        &mut self,
        row: &'static Program,
        device: u32,
        name: &str,
        pin: PathBuf,
    ) -> io::Result<()> {
        let guard = self.guard_before(row, device);
        let target = match &guard {
            Some(guard) => LinkTarget::DeviceBehind(device, guard.as_fd()),
            None => LinkTarget::Device(device),
        };
        let key = (device, row.name);
        if let Some(Some(held)) = self.attached.get_mut(&key) {
            self.broken.insert(key);
            let restored = held.repair(target)?;
            self.broken.remove(&key);
            for what in restored.into_iter().chain(held.repair_pin()?) {
                match &self.attachment {
                    Some(attachment) => attachment.record_restored(what),
                    None => tracing::warn!(what, "restored"),
                }
            }
            return Ok(());
        }
        let program = self.object_of(row).fd(row)?;
        let attached = HeldLink::attach(row, program, target, pin);
        let (link, is_new) = attached.map_err(|(_, error)| error)?;
        let pinned = if is_new { link.pin() } else { Ok(()) };
        self.record_attached(row, device, name, Some(link));
        pinned
    }

    /// Returns the link of the guard on a device, if a program must run right behind it.
    fn guard_before(&self, row: &Program, device: u32) -> Option<OwnedFd> {
        if *row != IN {
            return None;
        }
        let link = sys::open_pin(&self.links.join(attach::pin_name(&GUARD, device))).ok()?;
        let info = sys::link_info(link.as_fd()).ok()??;
        (info == LinkTarget::Device(device).link_info(GUARD.hook)).then_some(link)
    }

    fn record_attached(
        &mut self,
        row: &'static Program,
        device: u32,
        name: &str,
        link: Option<HeldLink>,
    ) {
        if self.attached.insert((device, row.name), link).is_none() {
            tracing::info!(device = %name, program = row.name, "attached");
        }
    }

    fn attach_filter(
        &self,
        row: &Program,
        (device, name): (u32, &str),
        pin: &Path,
        qdiscs: &mut IngressQdiscs,
    ) -> io::Result<()> {
        let position = FilterPosition::of(row);
        match qdisc_add_clsact(name) {
            Ok(()) => {}
            Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {
                qdiscs.check(position.hook, device)?;
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        let existing = position.link(name)?;
        let options = TcAttachOptions::Netlink(NlOptions {
            priority: position.priority,
            handle: HANDLE,
            classid: None,
        });
        let filter = |program: &mut SchedClassifier| {
            // `attach_to_link` fails if there is no filter to replace.
            let id = program
                .attach_to_link(existing)
                .or_else(|_no_filter| program.attach_with_options(name, position.hook, options));
            let id = id.map_err(to_io_error)?;
            // The filter must outlive this process, but dropping the link would remove it.
            let _kept = ManuallyDrop::new(program.take_link(id).map_err(to_io_error)?);
            Ok(())
        };
        self.object_of(row).with_classifier(row, filter)?;
        // The pin is created only after the filter is attached. If either is missing, both are created again.
        let program = self.object_of(row).fd(row)?;
        let id_of = |object: BorrowedFd<'_>| sys::object_id(object).map(Some);
        attach::repair_pin(program.as_fd(), pin, id_of).map(drop)
    }

    /// Returns the indices of the links to which an earlier or this process has attached a program, including links that
    /// no longer exist.
    pub(super) fn attached_links(&self) -> BTreeSet<u32> {
        self.pins().into_iter().map(|pin| pin.device).collect()
    }

    /// Detaches the programs from all other devices.
    pub(super) fn remove_unused(
        &mut self,
        devices: &BTreeMap<u32, String>,
    ) -> Result<(), DeviceError> {
        let mut all = Ok(());
        for Pin { row, device, path } in self.pins() {
            if devices.contains_key(&device) {
                continue;
            }
            self.attached.remove(&(device, row.name));
            let removed = remove_filter(row, &path, device).and_then(|()| fs::remove_file(&path));
            let removed = removed.map_err(failed(format!(
                "detach program {} from the device with index {device}",
                row.name
            )));
            all = all.and(removed);
        }
        all
    }

    /// Describes the programs of others on devices, as far as they are attached through tcx. They run beside these programs.
    pub(super) fn others(&self, devices: &BTreeMap<u32, String>) -> Vec<String> {
        if !self.features.tcx {
            return Vec::new();
        }
        let mut others = Vec::new();
        for (device, name) in devices {
            let own: BTreeSet<u32> = self.programs_of_pins(*device).collect();
            for (hook, direction) in [(IN.hook, "ingress"), (OUT.hook, "egress")] {
                // A device that was just removed has no programs.
                let found = sys::programs_on_device(*device, hook).unwrap_or_default();
                for id in found.into_iter().filter(|id| !own.contains(id)) {
                    let program = sys::program_by_id(id).map(|program| program.name);
                    let program = program.unwrap_or_else(|_no_permission| id.to_string());
                    others.push(format!("program {program} on {name} ({direction})"));
                }
            }
        }
        others
    }

    /// Returns the numbers of Culvert's programs on a device, the guard included.
    fn programs_of_pins(&self, device: u32) -> impl Iterator<Item = u32> {
        let rows = [GUARD, IN, OUT].into_iter();
        rows.filter_map(move |row| {
            program_of_pin(&self.links.join(attach::pin_name(&row, device))).ok()
        })
    }

    /// Returns the pins of these programs.
    fn pins(&self) -> Vec<Pin> {
        pins(&self.links, self.rows)
    }
}

/// The kinds of the devices' qdiscs for packets that arrive, by the indices of the devices. They are read when they are first
/// needed, since the kernel lists only those of all devices.
#[derive(Default)]
struct IngressQdiscs(Option<BTreeMap<u32, String>>);

impl IngressQdiscs {
    /// Returns an error if a device's existing qdisc can't have a filter at a hook. The kernel adds filters for egress to the
    /// qdisc `ingress`, too, but they run for packets that arrive (`ingress_tcf_block` in the kernel's net/sched/sch_ingress.c).
    fn check(&mut self, hook: TcAttachType, device: u32) -> io::Result<()> {
        if hook != TcAttachType::Egress {
            return Ok(());
        }
        let kinds = match self.0.take() {
            Some(kinds) => kinds,
            None => ingress_qdiscs()?,
        };
        match self.0.insert(kinds).get(&device) {
            Some(kind) if kind != "clsact" => Err(io::Error::other(format!(
                "it has the qdisc {kind}, at which no filters for packets that leave run; replace it by clsact"
            ))),
            Some(_) | None => Ok(()),
        }
    }
}

/// The pin of a program that is attached to a device.
struct Pin {
    row: &'static Program,
    device: u32,
    path: PathBuf,
}

/// Returns the pins of programs in the directory for links.
fn pins(links: &Path, rows: &[Program]) -> Vec<Pin> {
    let Ok(entries) = fs::read_dir(links) else {
        return Vec::new();
    };
    let pins = entries.flatten().filter_map(|entry| {
        let (row, device) = attach::parse_pin_name(entry.file_name().to_str()?)?;
        let (device, path) = (device?, entry.path());
        rows.contains(row).then_some(Pin { row, device, path })
    });
    pins.collect()
}

/// Returns the number of the program that a pin attaches: by a link, or by a filter, whose pin is the program.
fn program_of_pin(pin: &Path) -> io::Result<u32> {
    let object = sys::open_pin(pin)?;
    match sys::link_ids(object.as_fd())? {
        Some(ids) => Ok(ids.program),
        None => sys::object_id(object.as_fd()),
    }
}

/// Returns true if a pin is a program for a device: a tcx link to that device, a tcx link to a removed device, or a
/// filter's pinned program.
pub(super) fn is_program_of(row: &Program, pin: &Path, device: u32) -> io::Result<bool> {
    let object = sys::open_pin(pin)?;
    if let Some(found) = sys::link_info(object.as_fd())? {
        let wanted = LinkTarget::Device(device).link_info(row.hook);
        return Ok(found == wanted
            || found
                == sys::LinkInfo {
                    target_id: 0,
                    ..wanted
                });
    }
    sys::is_classifier(object.as_fd(), row.name)
}

/// Removes the filter that runs a pinned program, if the pin is a program and the device exists.
pub(super) fn remove_filter(row: &Program, pin: &Path, device: u32) -> io::Result<()> {
    let object = sys::open_pin(pin)?;
    if !sys::is_classifier(object.as_fd(), row.name)? {
        return Ok(());
    }
    // For a removed device, nix returns an empty name instead of an error.
    let name = if_indextoname(device).unwrap_or_default();
    if name.is_empty() {
        return Ok(());
    }
    let existing = FilterPosition::of(row).link(&name.to_string_lossy())?;
    match aya::programs::links::Link::detach(existing) {
        // The filter, its qdisc or the device may already have been removed.
        Err(ProgramError::NetlinkError(error))
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)
            ) =>
        {
            Ok(())
        }
        detached => detached.map_err(to_io_error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_for_packets_that_leave_needs_a_qdisc_that_runs_it() {
        let kinds = [(2, "ingress"), (3, "clsact")];
        let kinds = kinds.map(|(device, kind)| (device, kind.to_owned()));
        let mut qdiscs = IngressQdiscs(Some(BTreeMap::from(kinds)));
        for device in 2..=4 {
            let arriving = qdiscs.check(TcAttachType::Ingress, device);
            arriving.expect("every qdisc runs filters for packets that arrive");
            let leaving = qdiscs.check(TcAttachType::Egress, device);
            assert_eq!(leaving.is_ok(), device != 2, "{leaving:?}");
        }
        // No list is read for packets that arrive.
        let mut unread = IngressQdiscs::default();
        let arriving = unread.check(TcAttachType::Ingress, 2);
        arriving.expect("every qdisc runs filters for packets that arrive");
        assert!(unread.0.is_none());
    }
}
