//! The file systems that a node needs, mounted where they are not: for a start with the rights to do
//! it, before the daemon runs without.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, SYSFS_MAGIC},
};

use super::{
    cgroup::{self, CgroupError},
    path::{PathError, existing, failed, file_system},
};

/// Where the kernel gives cgroups a place.
const CGROUPS: &str = "/sys/fs/cgroup";
/// The same, where hierarchies of v1 are in that place.
const BESIDE: &str = "/sys/fs/cgroup/unified";

/// A file system can't be mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The place can't be looked at, or made.
    #[error(transparent)]
    Place(#[from] PathError),
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
    if file_system(existing(pins))? == BPF_FS_MAGIC {
        return Ok(None);
    }
    let point = pins.parent().unwrap_or(pins);
    mount_on(point, "bpf", MsFlags::empty(), Some("mode=700")).map(Some)
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
            let is_free = file_system(Path::new(CGROUPS))? == SYSFS_MAGIC;
            let point = Path::new(if is_free { CGROUPS } else { BESIDE });
            mount_on(point, "cgroup2", MsFlags::MS_RELATIME, None).map(Some)
        }
        Err(error) => Err(error.into()),
    }
}

/// Mounts a file system with the flags that systemd gives both.
fn mount_on(
    point: &Path,
    kind: &'static str,
    flags: MsFlags,
    options: Option<&str>,
) -> Result<PathBuf, MountError> {
    fs::create_dir_all(point).map_err(failed("make", point))?;
    let flags = flags | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
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
