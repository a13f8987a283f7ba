//! Mounts the file systems that a node needs, if they are missing. `culvert prepare` does this with the
//! necessary privileges, so that the daemon can start without them.

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
    path::{PathError, failed, file_system_type, nearest_existing},
};

/// The usual mount point for cgroups.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The mount point for cgroup v2 if v1 hierarchies occupy the usual one.
const CGROUP_UNIFIED: &str = "/sys/fs/cgroup/unified";

/// An error that can occur when mounting a file system.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mount point can't be read or created.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The kernel refused the mount.
    #[error("cannot mount {kind} on {path} (this needs CAP_SYS_ADMIN)")]
    Mount {
        /// The type of the file system.
        kind: &'static str,
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mount table can't be read.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// Mounts a BPF file system for the pin directory, unless the directory is already on one. Returns the mount
/// point if a file system was mounted.
///
/// # Errors
///
/// Returns an error if the kernel refuses the mount.
pub fn mount_bpffs(pins: &Path) -> Result<Option<PathBuf>, MountError> {
    if file_system_type(nearest_existing(pins))? == BPF_FS_MAGIC {
        return Ok(None);
    }
    let point = pins.parent().unwrap_or(pins);
    mount_on(point, "bpf", MsFlags::empty(), Some("mode=700")).map(Some)
}

/// Mounts the cgroup v2 hierarchy, unless it is already mounted. Returns the mount point if the hierarchy was
/// mounted by this call.
///
/// # Errors
///
/// Returns an error if the kernel refuses the mount.
pub fn mount_cgroups() -> Result<Option<PathBuf>, MountError> {
    match cgroup::find_root() {
        Ok(_) => Ok(None),
        Err(CgroupError::None) => {
            let is_free = file_system_type(Path::new(CGROUP_ROOT))? == SYSFS_MAGIC;
            let point = Path::new(if is_free { CGROUP_ROOT } else { CGROUP_UNIFIED });
            mount_on(point, "cgroup2", MsFlags::MS_RELATIME, None).map(Some)
        }
        Err(error) => Err(error.into()),
    }
}

/// Mounts a file system with the options that systemd uses.
fn mount_on(
    point: &Path,
    kind: &'static str,
    flags: MsFlags,
    options: Option<&str>,
) -> Result<PathBuf, MountError> {
    fs::create_dir_all(point).map_err(failed("create", point))?;
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
