//! `culvert prepare`: mounts the file systems that `culvert node` needs but may lack the privilege to mount.

use super::{RoleError, failed, other_error};
use crate::{bpf, config::Config};

/// Mounts a BPF file system for the pins, and the cgroup v2 hierarchy, unless they are already mounted.
/// Returns a line of text about each file system.
///
/// # Errors
///
/// Returns an error if a file system can't be mounted, or if the configured cgroup is not a v2 cgroup.
pub fn prepare_mounts(config: &Config) -> Result<Vec<String>, RoleError> {
    let pins = config.bpf.bpffs.display();
    let bpffs = match bpf::mount_bpffs(&config.bpf.bpffs).map_err(other_error)? {
        Some(point) => format!("mounted a BPF file system on {}", point.display()),
        None => format!("{pins} is already on a BPF file system"),
    };
    let cgroups = match &config.bpf.cgroup.0 {
        Some(path) => {
            bpf::check_cgroup(path).map_err(failed("cannot use bpf.cgroup"))?;
            format!("{} is a cgroup", path.display())
        }
        None => match bpf::mount_cgroups().map_err(other_error)? {
            Some(point) => format!("mounted the cgroup v2 hierarchy on {}", point.display()),
            None => "the cgroup v2 hierarchy is already mounted".to_owned(),
        },
    };
    Ok(vec![bpffs, cgroups])
}
