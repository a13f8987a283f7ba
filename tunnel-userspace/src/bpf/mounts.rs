//! The file systems that a node needs, mounted where they are not: for a start with the rights to do
//! it, before the daemon runs without.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, FsType, SYSFS_MAGIC, statfs},
};

use super::cgroup::{self, CgroupError};

/// Where the kernel gives cgroups a place.
const CGROUPS: &str = "/sys/fs/cgroup";
/// The same, where hierarchies of v1 are in that place.
const BESIDE: &str = "/sys/fs/cgroup/unified";

/// A file system can't be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The place can't be looked at, or made.
    #[error("cannot {step} {path}")]
    Place {
        /// What was tried.
        step: &'static str,
        /// The place.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The kernel refused it.
    #[error("cannot mount {kind} on {path}, which takes CAP_SYS_ADMIN")]
    Mount {
        /// The kind of file system.
        kind: &'static str,
        /// The place.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The table of mounts can't be read.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// Mounts a BPF file system around the folder of pins, if it is not on one; says where.
///
/// # Errors
///
/// The kernel refuses it.
pub fn mount_bpffs(pins: &Path) -> Result<Option<PathBuf>, MountError> {
    let there = pins.ancestors().find(|path| path.exists());
    if kind(there.unwrap_or(pins))? == BPF_FS_MAGIC {
        return Ok(None);
    }
    let point = pins.parent().unwrap_or(pins);
    mount_on(point, "bpf").map(Some)
}

/// Mounts the cgroup v2 hierarchy, if it is nowhere; says where.
///
/// # Errors
///
/// The kernel refuses it.
pub fn mount_cgroups() -> Result<Option<PathBuf>, MountError> {
    match cgroup::find_root() {
        Ok(_) => Ok(None),
        Err(CgroupError::None) => {
            let is_free = kind(Path::new(CGROUPS))? == SYSFS_MAGIC;
            let point = if is_free { CGROUPS } else { BESIDE };
            mount_on(Path::new(point), "cgroup2").map(Some)
        }
        Err(error) => Err(error.into()),
    }
}

fn kind(path: &Path) -> Result<FsType, MountError> {
    let found = statfs(path).map_err(io::Error::from);
    let found = found.map_err(failed("look at", path))?;
    Ok(found.filesystem_type())
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MountError {
    let path = path.to_owned();
    move |source| MountError::Place { step, path, source }
}

fn mount_on(point: &Path, kind: &'static str) -> Result<PathBuf, MountError> {
    fs::create_dir_all(point).map_err(failed("make", point))?;
    // As systemd mounts both.
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let mut options = None;
    if kind == "bpf" {
        options = Some("mode=700");
    } else {
        flags |= MsFlags::MS_RELATIME;
    }
    let path = point.to_owned();
    match mount(Some(kind), point, Some(kind), flags, options) {
        Ok(()) => Ok(path),
        Err(error) => Err(MountError::Mount {
            kind,
            path,
            source: error.into(),
        }),
    }
}
