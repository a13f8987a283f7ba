//! Finds the cgroup v2 hierarchy, and checks that a directory is in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::path::{PathError, failed};

/// An error that can occur when finding or checking a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The directory or the mount table can't be read.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The directory is not a cgroup.
    #[error("{path} is not a directory of a cgroup v2 hierarchy")]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// No cgroup v2 hierarchy is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted; mount one first: \
         mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified"
    )]
    None,
}

/// Checks that a path is a directory in a cgroup v2 hierarchy.
///
/// # Errors
///
/// Returns an error if the path is on another file system or can't be read.
pub fn check(path: &Path) -> Result<(), CgroupError> {
    let found = statfs(path).map_err(|error| failed("inspect cgroup", path)(error.into()))?;
    if found.filesystem_type() == CGROUP2_SUPER_MAGIC {
        return Ok(());
    }
    let path = path.to_owned();
    Err(CgroupError::Foreign { path })
}

/// Returns the mount point of the cgroup v2 hierarchy. There may be v1 hierarchies as well.
///
/// # Errors
///
/// Returns an error if no cgroup v2 hierarchy is mounted, or if the mount table can't be read.
pub fn find_root() -> Result<PathBuf, CgroupError> {
    let table = Path::new("/proc/self/mounts");
    let mounts = fs::read_to_string(table).map_err(failed("read", table))?;
    root_in(&mounts).ok_or(CgroupError::None)
}

/// Returns the mount point of the first cgroup2 mount in the mount table, which escapes spaces as `\040`.
fn root_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (point, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| point.replace("\\040", " ").into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_v2_hierarchy_is_found_next_to_v1() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/my\\040unified cgroup2 rw 0 0\n";

        assert_eq!(root_in(mounts), Some("/sys/fs/cgroup/my unified".into()));
        assert_eq!(root_in("cgroup /sys/fs/cgroup cgroup rw,cpu 0 0\n"), None);
    }
}
