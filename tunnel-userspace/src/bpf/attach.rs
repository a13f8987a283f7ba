//! Programs on a cgroup, by pinned links: they stay when the daemon ends, and a program is
//! replaced by another with no moment without one.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use aya::{Ebpf, programs::ProgramFd};
use tunnel_common::names;

use super::sys;

/// A hook of a cgroup. The numbers are those of `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Hook {
    Connect4 = 10,
    Connect6 = 11,
    Sendmsg4 = 14,
    Sendmsg6 = 15,
    Recvmsg4 = 19,
    Recvmsg6 = 20,
    Getpeername4 = 29,
    Getpeername6 = 30,
    SockRelease = 34,
}

impl Hook {
    /// The hook that a program is named after.
    pub(super) fn of_program(name: &str) -> Option<Self> {
        Some(match name {
            "connect4" => Self::Connect4,
            "connect6" => Self::Connect6,
            "sendmsg4" => Self::Sendmsg4,
            "sendmsg6" => Self::Sendmsg6,
            "recvmsg4" => Self::Recvmsg4,
            "recvmsg6" => Self::Recvmsg6,
            "getpeername4" => Self::Getpeername4,
            "getpeername6" => Self::Getpeername6,
            "sock_release" => Self::SockRelease,
            _ => return None,
        })
    }

    /// The number of the hook.
    #[expect(
        clippy::as_conversions,
        reason = "a field-less enum with small numbers"
    )]
    pub(super) const fn attach_type(self) -> u32 {
        self as u32
    }
}

/// A program could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The cgroup is not there.
    #[error("cannot open cgroup {path}")]
    Cgroup {
        /// The folder of the cgroup.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The object has no such program.
    #[error("the object has no program {program}")]
    NoProgram {
        /// The name of the program.
        program: &'static str,
    },
    /// The hook is not to be had.
    #[error(
        "cannot attach program {program} on cgroup {path}: the right is missing, or another \
         program holds the hook exclusively (bpftool cgroup show {path})"
    )]
    Refused {
        /// The name of the program.
        program: &'static str,
        /// The folder of the cgroup.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A step of attaching failed.
    #[error("cannot {step} program {program} on cgroup {path}")]
    Step {
        /// What was tried.
        step: &'static str,
        /// The name of the program.
        program: &'static str,
        /// The folder of the cgroup.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// How the programs came to be attached.
#[derive(Debug, Default)]
#[must_use = "links that are not pinned end with it"]
pub struct Attached {
    /// Hooks whose program was replaced.
    pub replaced: usize,
    /// Links that were made, and where they are to be pinned. Until they are, they end with this
    /// value, and what was pinned there stays.
    links: Vec<(PathBuf, OwnedFd)>,
}

impl Attached {
    /// How many hooks had no program of ours.
    #[must_use]
    pub const fn new_links(&self) -> usize {
        self.links.len()
    }

    /// Pins the new links, so that they outlive this process. What was pinned in their place, a
    /// link to a cgroup that is no longer ours, ends.
    ///
    /// # Errors
    ///
    /// The file system refused.
    pub fn pin(self) -> io::Result<()> {
        self.links
            .iter()
            .try_for_each(|(pin, link)| pin_in_place(link, pin))
    }
}

/// Attaches every program to the cgroup, or puts it in the place of the one that is there.
pub(super) fn attach(ebpf: &Ebpf, links: &Path, cgroup: &Path) -> Result<Attached, AttachError> {
    let no_cgroup = |source| AttachError::Cgroup {
        path: cgroup.to_owned(),
        source,
    };
    let folder = File::open(cgroup).map_err(no_cgroup)?;
    let number = folder.metadata().map_err(no_cgroup)?.ino();
    let mut attached = Attached::default();
    for name in names::PROGRAMS {
        let (Some(hook), Some(program)) = (Hook::of_program(name), ebpf.program(name)) else {
            return Err(AttachError::NoProgram { program: name });
        };
        let failed = |step| {
            move |source| AttachError::Step {
                step,
                program: name,
                path: cgroup.to_owned(),
                source,
            }
        };
        let program: &ProgramFd = program
            .fd()
            .map_err(io::Error::other)
            .map_err(failed("load"))?;
        let pin = links.join(name);
        if let Some(link) = open_link(&pin, number, hook).map_err(failed("open the link of"))? {
            sys::update_link(link.as_fd(), program).map_err(failed("replace"))?;
            attached.replaced = attached.replaced.saturating_add(1);
            continue;
        }
        let made = sys::create_link(program, folder.as_fd(), hook.attach_type());
        let link = made.map_err(|source| {
            if source.kind() == io::ErrorKind::PermissionDenied {
                let path = cgroup.to_owned();
                AttachError::Refused {
                    program: name,
                    path,
                    source,
                }
            } else {
                failed("attach")(source)
            }
        })?;
        attached.links.push((pin, link));
    }
    Ok(attached)
}

/// Pins a link where an older one may be pinned.
fn pin_in_place(link: &OwnedFd, pin: &Path) -> io::Result<()> {
    match sys::pin(link.as_fd(), pin) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(pin)?;
            sys::pin(link.as_fd(), pin)
        }
        other => other,
    }
}

/// The pinned link of a hook, if it leads to that cgroup. A link to another cgroup, one that was
/// removed or one that the config no longer names, is not ours to update.
fn open_link(pin: &Path, cgroup: u64, hook: Hook) -> io::Result<Option<OwnedFd>> {
    let link = match sys::open_pin(pin) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let wanted = sys::CgroupLink {
        cgroup,
        attach_type: hook.attach_type(),
    };
    Ok((sys::cgroup_link(link.as_fd())? == Some(wanted)).then_some(link))
}
