//! Attaches programs through pinned links. A link outlives the daemon, and its program can be replaced
//! atomically.

use std::{
    fs::{self, File},
    io, mem,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use aya::programs::ProgramFd;
use tunnel_common::table::{AttachPoint, Program};

use super::{
    path::{self, PathError},
    programs::Programs,
    sys::{self, LinkTarget},
};

/// Parses the name of a pinned link into the link's program and, for a link on an uplink, the device's index.
/// Returns `None` for any other name.
pub(super) fn parse_pin_name(name: &str) -> Option<(&'static Program, Option<u32>)> {
    let cgroup_program =
        Program::named(name).filter(|program| program.attach_point == AttachPoint::Cgroup);
    if let Some(program) = cgroup_program {
        return Some((program, None));
    }
    let (name, device) = name.rsplit_once('-')?;
    let program =
        Program::named(name).filter(|program| program.attach_point == AttachPoint::Devices)?;
    Some((program, Some(device.parse().ok()?)))
}

/// Returns the pin name for the link that attaches a program to a device.
pub(super) fn pin_name(program: &Program, device: u32) -> String {
    format!("{}-{device}", program.name)
}

/// An error that can occur when attaching a program.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The cgroup does not exist.
    #[error(transparent)]
    Cgroup(#[from] PathError),
    /// A step in attaching a program failed.
    #[error("cannot {step} program {program} on cgroup {path}{}", hint(.step, .path, .source))]
    Step {
        /// The step that failed.
        step: &'static str,
        /// The name of the program.
        program: &'static str,
        /// The cgroup's directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Returns a hint if permission to attach was denied, and an empty string for any other error.
fn hint(step: &str, path: &Path, source: &io::Error) -> String {
    if step != ATTACH || source.kind() != io::ErrorKind::PermissionDenied {
        return String::new();
    }
    let path = path.display();
    format!(
        ": a capability is missing, or another program is attached to this hook exclusively \
         (list them by `bpftool cgroup show {path}`)"
    )
}

/// The result of attaching all programs to a cgroup.
#[derive(Debug)]
#[must_use = "dropping it detaches the links that are not pinned"]
pub struct Attached {
    /// The links, of which those that are not pinned yet have no other owner.
    links: Vec<HeldLink>,
    new_links: usize,
}

impl Attached {
    /// Returns how many hooks had no Culvert program before.
    #[must_use]
    pub const fn new_links(&self) -> usize {
        self.new_links
    }

    /// Returns how many hooks had a program of Culvert that was replaced.
    #[must_use]
    pub const fn replaced(&self) -> usize {
        self.links.len() - self.new_links
    }

    /// Pins the links that are not pinned yet, so that they outlive this process. Replaces any older pins at
    /// these paths, which belong to links to another cgroup.
    ///
    /// # Errors
    ///
    /// Returns an error if a pin can't be created or replaced.
    pub fn pin(&self) -> io::Result<()> {
        let mut links = self.links.iter();
        links.try_for_each(|link| link.repair_pin().map(drop))
    }

    /// Returns the links. Dropping one that is not pinned detaches its program.
    pub(super) fn into_links(self) -> Vec<HeldLink> {
        self.links
    }
}

/// Attaches every cgroup program to a cgroup, replacing any that is already attached.
pub(super) fn attach(
    programs: &Programs,
    links: &Path,
    cgroup: &Path,
) -> Result<Attached, AttachError> {
    let directory = OpenCgroup::open(cgroup)?;
    let mut attached = Attached {
        links: Vec::new(),
        new_links: 0,
    };
    for row in Program::at_attach_point(AttachPoint::Cgroup) {
        let failed = |(step, source)| AttachError::Step {
            step,
            program: row.name,
            path: cgroup.to_owned(),
            source,
        };
        let program = programs.fd(row).map_err(|error| failed(("load", error)))?;
        let pin = links.join(row.name);
        let (link, is_new) =
            HeldLink::attach(row, program, directory.target(), pin).map_err(failed)?;
        attached.new_links += usize::from(is_new);
        attached.links.push(link);
    }
    Ok(attached)
}

/// A cgroup's directory, opened.
#[derive(Debug)]
pub(super) struct OpenCgroup {
    directory: File,
    number: u64,
}

impl OpenCgroup {
    pub(super) fn open(cgroup: &Path) -> Result<Self, PathError> {
        let directory = File::open(cgroup).map_err(path::failed("open cgroup", cgroup))?;
        let metadata = directory.metadata();
        let number = metadata.map_err(path::failed("open cgroup", cgroup))?.ino();
        Ok(Self { directory, number })
    }

    /// Returns the cgroup as the target of links.
    pub(super) fn target(&self) -> LinkTarget<'_> {
        LinkTarget::Cgroup(self.directory.as_fd(), self.number)
    }

    /// Returns the numbers of the programs that run for a hook of the cgroup. If `with_ancestors` is false,
    /// leaves out those that are attached to its ancestors.
    pub(super) fn programs(&self, row: &Program, with_ancestors: bool) -> io::Result<Vec<u32>> {
        sys::attached_programs(self.directory.as_fd(), row.hook, with_ancestors)
    }
}

/// The name of the step that attaches a program to a hook without a Culvert program.
const ATTACH: &str = "attach";

/// A link that attaches a program. It is held open, so that the program stays attached even if the pin is
/// removed.
#[derive(Debug)]
pub(super) struct HeldLink {
    row: &'static Program,
    program: ProgramFd,
    link: OwnedFd,
    pin: PathBuf,
}

impl HeldLink {
    /// Replaces the program of a pinned link, or creates a link if there is none; true if it was created.
    /// Dropping a new link before it is pinned detaches the program. On failure, returns the step that failed
    /// along with the error.
    pub(super) fn attach(
        row: &'static Program,
        program: ProgramFd,
        target: LinkTarget<'_>,
        pin: PathBuf,
    ) -> Result<(Self, bool), (&'static str, io::Error)> {
        let failed = |step| move |error| (step, error);
        let existing =
            open_link(&pin, target.link_info(row.hook)).map_err(failed("open the link of"))?;
        let is_new = existing.is_none();
        let link = match existing {
            Some(link) => {
                sys::update_link(link.as_fd(), &program).map_err(failed("replace"))?;
                link
            }
            None => sys::create_link(program.as_fd(), target, row.hook).map_err(failed(ATTACH))?,
        };
        let held = Self {
            row,
            program,
            link,
            pin,
        };
        Ok((held, is_new))
    }

    pub(super) const fn row(&self) -> &'static Program {
        self.row
    }

    /// Pins the link, replacing any older pin at the path.
    pub(super) fn pin(&self) -> io::Result<()> {
        replace_pin(self.link.as_fd(), &self.pin)
    }

    /// Returns the number of the attached program.
    pub(super) fn program_id(&self) -> io::Result<u32> {
        sys::object_id(self.program.as_fd())
    }

    /// Replaces the attached program; returns the previous one.
    pub(super) fn replace_program(&mut self, program: ProgramFd) -> io::Result<ProgramFd> {
        sys::update_link(self.link.as_fd(), &program)?;
        Ok(mem::replace(&mut self.program, program))
    }

    /// Attaches the program again if it is not attached to the target any more, and puts it back if the link
    /// runs another one. Returns a description of what was repaired.
    pub(super) fn repair(&mut self, target: LinkTarget<'_>) -> io::Result<Option<String>> {
        let name = self.row.name;
        if sys::link_info(self.link.as_fd())? != Some(target.link_info(self.row.hook)) {
            self.link = sys::create_link(self.program.as_fd(), target, self.row.hook)?;
            return Ok(Some(format!("program {name} was detached")));
        }
        let ids = sys::link_ids(self.link.as_fd())?;
        if ids.map(|ids| ids.program) == Some(self.program_id()?) {
            return Ok(None);
        }
        sys::update_link(self.link.as_fd(), &self.program)?;
        Ok(Some(format!("program {name} had been replaced by another")))
    }

    /// Pins the link again if its pin is missing or is another object. Returns a description of what was
    /// repaired.
    pub(super) fn repair_pin(&self) -> io::Result<Option<String>> {
        let id_of = |object: BorrowedFd<'_>| Ok(sys::link_ids(object)?.map(|ids| ids.link));
        repair_pin(self.link.as_fd(), &self.pin, id_of)
    }
}

/// Pins a map, a link, or a filter's program, replacing any older pin at the path.
pub(super) fn replace_pin(object: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    match sys::pin(object, pin) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(pin)?;
            sys::pin(object, pin)
        }
        other => other,
    }
}

/// Pins an object again if its pin is missing or is another object, which `id_of` distinguishes. Returns a
/// description of what was repaired.
pub(super) fn repair_pin(
    object: BorrowedFd<'_>,
    pin: &Path,
    id_of: impl Fn(BorrowedFd<'_>) -> io::Result<Option<u32>>,
) -> io::Result<Option<String>> {
    match sys::open_pin(pin) {
        Ok(found) if id_of(found.as_fd())? == id_of(object)? => return Ok(None),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    replace_pin(object, pin)?;
    Ok(Some(format!("the pin {} was missing", pin.display())))
}

/// Opens a pinned link. Returns `None` if there is no pin, or if the link is detached or has another target.
fn open_link(pin: &Path, wanted: sys::LinkInfo) -> io::Result<Option<OwnedFd>> {
    let link = match sys::open_pin(pin) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((sys::link_info(link.as_fd())? == Some(wanted)).then_some(link))
}

#[cfg(test)]
mod tests {
    use tunnel_common::table::{GUARD, SOCK_RELEASE};

    use super::*;

    #[test]
    fn the_name_of_a_pin_has_its_program_and_device() {
        assert_eq!(parse_pin_name("sock_release"), Some((&SOCK_RELEASE, None)));
        assert_eq!(
            parse_pin_name(&pin_name(&GUARD, 7)),
            Some((&GUARD, Some(7)))
        );
        let others = "guard sock_release-7 guard- guard-x connect5 guard-7-7";
        for name in others.split(' ') {
            assert_eq!(parse_pin_name(name), None, "{name}");
        }
    }
}
