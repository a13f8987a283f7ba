//! Programs at their hooks, by pinned links: links outlive the daemon, and replace a program by another
//! with no moment without one.

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
use tunnel_common::table::{Place, Program};

use super::{
    path::{self, PathError},
    programs::Programs,
    sys::{self, Target},
};

/// Returns the program of a link that is pinned under this name, and the device of a link at an uplink;
/// none if no program has such a link.
pub(super) fn of_pin(name: &str) -> Option<(&'static Program, Option<u32>)> {
    let at_cgroup = Program::named(name).filter(|program| program.place == Place::Cgroup);
    if let Some(program) = at_cgroup {
        return Some((program, None));
    }
    let (name, device) = name.rsplit_once('-')?;
    let program = Program::named(name).filter(|program| program.place == Place::Uplinks)?;
    Some((program, Some(device.parse().ok()?)))
}

/// Returns the name of the pin of a program's link at a device.
pub(super) fn pin_at(program: &Program, device: u32) -> String {
    format!("{}-{device}", program.name)
}

/// The error of attaching a program.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The cgroup does not exist.
    #[error(transparent)]
    Cgroup(#[from] PathError),
    /// A step of attaching failed.
    #[error("cannot {step} program {program} on cgroup {path}{}", hint(.step, .path, .source))]
    Step {
        /// The step that failed.
        step: &'static str,
        /// The name of the program.
        program: &'static str,
        /// The folder of the cgroup.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Returns the hint for a permission error at the attach; an empty text for other errors.
fn hint(step: &str, path: &Path, source: &io::Error) -> String {
    if step != ATTACH || source.kind() != io::ErrorKind::PermissionDenied {
        return String::new();
    }
    let path = path.display();
    format!(
        ": the right is missing, or another program holds the hook exclusively \
         (bpftool cgroup show {path})"
    )
}

/// The result of attaching all programs of a cgroup.
#[derive(Debug, Default)]
#[must_use = "links that are not pinned end with it"]
pub struct Attached {
    /// The number of hooks whose program was replaced.
    pub replaced: usize,
    /// New links and the paths of their pins. Until they are pinned, they end with this value, and older
    /// pins stay.
    links: Vec<(PathBuf, OwnedFd)>,
}

impl Attached {
    /// Returns the number of hooks that had no program of ours.
    #[must_use]
    pub const fn new_links(&self) -> usize {
        self.links.len()
    }

    /// Pins the new links, so that they outlive this process. Older pins at these paths, links to a
    /// cgroup that is no longer ours, end.
    ///
    /// # Errors
    ///
    /// The file system refused.
    pub fn pin(self) -> io::Result<()> {
        self.links
            .iter()
            .try_for_each(|(pin, link)| pin_in_place(link.as_fd(), pin))
    }
}

/// Attaches every program of a cgroup, or replaces the one that is attached.
pub(super) fn attach(
    programs: &Programs,
    links: &Path,
    cgroup: &Path,
) -> Result<Attached, AttachError> {
    let folder = File::open(cgroup).map_err(path::failed("open cgroup", cgroup))?;
    let metadata = folder.metadata();
    let number = metadata.map_err(path::failed("open cgroup", cgroup))?.ino();
    let target = Target::Cgroup(folder.as_fd(), number);
    let mut attached = Attached::default();
    for row in Program::of_place(Place::Cgroup) {
        let failed = |(step, source)| AttachError::Step {
            step,
            program: row.name,
            path: cgroup.to_owned(),
            source,
        };
        let program = programs.fd(row).map_err(|error| failed(("load", error)))?;
        let pin = links.join(row.name);
        match put(&program, row, target, &pin).map_err(failed)? {
            Put::Replaced => attached.replaced += 1,
            Put::Made(link) => attached.links.push((pin, link)),
        }
    }
    Ok(attached)
}

/// The step of attaching a program to a hook without one.
const ATTACH: &str = "attach";

/// The result of attaching one program.
pub(super) enum Put {
    /// The previous program was replaced.
    Replaced,
    /// A new link was created, which ends unless it is pinned.
    Made(OwnedFd),
}

/// Replaces the program of a pinned link, or creates a link. An error comes with the step that failed.
pub(super) fn put(
    program: &ProgramFd,
    row: &Program,
    target: Target<'_>,
    pin: &Path,
) -> Result<Put, (&'static str, io::Error)> {
    let failed = |step| move |error| (step, error);
    let there = open_link(pin, target.link(row.hook)).map_err(failed("open the link of"))?;
    if let Some(link) = there {
        sys::update_link(link.as_fd(), program).map_err(failed("replace"))?;
        return Ok(Put::Replaced);
    }
    let made = sys::create_link(program.as_fd(), target, row.hook);
    made.map(Put::Made).map_err(failed(ATTACH))
}

/// Pins a link, or the program of a filter, and replaces an older pin at the path.
pub(super) fn pin_in_place(link: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    match sys::pin(link, pin) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(pin)?;
            sys::pin(link, pin)
        }
        other => other,
    }
}

/// Opens the pinned link, if it is the wanted one. A link to another cgroup, a detached link, or one
/// that the config no longer names, is not ours to update.
fn open_link(pin: &Path, wanted: sys::Link) -> io::Result<Option<OwnedFd>> {
    let link = match sys::open_pin(pin) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok((sys::link(link.as_fd())? == Some(wanted)).then_some(link))
}

#[cfg(test)]
mod tests {
    use tunnel_common::table::{GUARD, SOCK_RELEASE};

    use super::*;

    #[test]
    fn a_pin_is_known_by_its_program_and_its_device() {
        assert_eq!(of_pin("sock_release"), Some((&SOCK_RELEASE, None)));
        assert_eq!(of_pin(&pin_at(&GUARD, 7)), Some((&GUARD, Some(7))));
        let others = "guard sock_release-7 guard- guard-x connect5 guard-7-7";
        for name in others.split(' ') {
            assert_eq!(of_pin(name), None, "{name}");
        }
    }
}
