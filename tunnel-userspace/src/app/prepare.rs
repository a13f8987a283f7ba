//! `culvert prepare`: what a node needs and has no right to do itself.

use crate::{
    bpf::{self, CgroupError, MountError},
    config::Config,
};

/// A node with that config can't start here.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A file system can't be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The config names a cgroup that isn't one.
    #[error("cannot use bpf.cgroup")]
    Cgroup(#[source] CgroupError),
}

/// Mounts a BPF file system for the pins of a node with that config, and the cgroup v2 hierarchy,
/// where they are not. Gives a line for each.
///
/// # Errors
///
/// One can't be mounted, or the cgroup in the config is none.
pub fn prepare(config: &Config) -> Result<Vec<String>, PrepareError> {
    let pins = config.bpf.bpffs.display();
    let bpffs = match bpf::mount_bpffs(&config.bpf.bpffs)? {
        Some(point) => format!("mounted a BPF file system on {}", point.display()),
        None => format!("{pins} is on a BPF file system"),
    };
    let cgroups = match &config.bpf.cgroup.0 {
        Some(path) => {
            bpf::check_cgroup(path).map_err(PrepareError::Cgroup)?;
            format!("{} is a cgroup", path.display())
        }
        None => match bpf::mount_cgroups()? {
            Some(point) => format!("mounted the cgroup v2 hierarchy on {}", point.display()),
            None => "the cgroup v2 hierarchy is mounted".to_owned(),
        },
    };
    Ok(vec![bpffs, cgroups])
}
