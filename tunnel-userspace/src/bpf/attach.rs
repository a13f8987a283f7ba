//! Attaches programs through pinned links. A link outlives the daemon, and its program can be replaced
//! atomically.

use std::{
    fs::{self, File},
    io,
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
        Program::named(name).filter(|program| program.attach_point == AttachPoint::Uplinks)?;
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
#[derive(Debug, Default)]
#[must_use = "dropping it detaches the links that are not pinned"]
pub struct Attached {
    /// The number of hooks whose program was replaced.
    pub replaced: usize,
    /// The new links, and the path at which to pin each. Dropping a link before it is pinned detaches it.
    links: Vec<(PathBuf, OwnedFd)>,
}

impl Attached {
    /// Returns how many hooks had no Culvert program before.
    #[must_use]
    pub const fn new_links(&self) -> usize {
        self.links.len()
    }

    /// Pins the new links, so that they outlive this process. Replaces any older pins at these paths, which
    /// belong to links to another cgroup.
    ///
    /// # Errors
    ///
    /// Returns an error if a pin can't be created or replaced.
    pub fn pin(self) -> io::Result<()> {
        self.links
            .iter()
            .try_for_each(|(pin, link)| replace_pin(link.as_fd(), pin))
    }
}

/// Attaches every cgroup program to a cgroup, replacing any that is already attached.
pub(super) fn attach(
    programs: &Programs,
    links: &Path,
    cgroup: &Path,
) -> Result<Attached, AttachError> {
    let directory = File::open(cgroup).map_err(path::failed("open cgroup", cgroup))?;
    let metadata = directory.metadata();
    let number = metadata.map_err(path::failed("open cgroup", cgroup))?.ino();
    let target = LinkTarget::Cgroup(directory.as_fd(), number);
    let mut attached = Attached::default();
    for row in Program::at_attach_point(AttachPoint::Cgroup) {
        let failed = |(step, source)| AttachError::Step {
            step,
            program: row.name,
            path: cgroup.to_owned(),
            source,
        };
        let program = programs.fd(row).map_err(|error| failed(("load", error)))?;
        let pin = links.join(row.name);
        match attach_program(&program, row, target, &pin).map_err(failed)? {
            AttachResult::Replaced => attached.replaced += 1,
            AttachResult::Created(link) => attached.links.push((pin, link)),
        }
    }
    Ok(attached)
}

/// The name of the step that attaches a program to a hook without a Culvert program.
const ATTACH: &str = "attach";

/// The result of attaching one program.
pub(super) enum AttachResult {
    /// An existing link's program was replaced.
    Replaced,
    /// A new link was created. Dropping it before it is pinned detaches the program.
    Created(OwnedFd),
}

/// Replaces the program of a pinned link, or creates a link if there is none. On failure, returns the step
/// that failed along with the error.
pub(super) fn attach_program(
    program: &ProgramFd,
    row: &Program,
    target: LinkTarget<'_>,
    pin: &Path,
) -> Result<AttachResult, (&'static str, io::Error)> {
    let failed = |step| move |error| (step, error);
    let existing =
        open_link(pin, target.link_info(row.hook)).map_err(failed("open the link of"))?;
    if let Some(link) = existing {
        sys::update_link(link.as_fd(), program).map_err(failed("replace"))?;
        return Ok(AttachResult::Replaced);
    }
    let created = sys::create_link(program.as_fd(), target, row.hook);
    created.map(AttachResult::Created).map_err(failed(ATTACH))
}

/// Pins a link, or a filter's program, replacing any older pin at the path.
pub(super) fn replace_pin(link: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    match sys::pin(link, pin) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(pin)?;
            sys::pin(link, pin)
        }
        other => other,
    }
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
