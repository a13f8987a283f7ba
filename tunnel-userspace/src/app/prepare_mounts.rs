//! `culvert prepare`: does what `culvert node` needs but may lack the privilege to do: mounts file systems, takes over the
//! programs of an earlier Culvert whose pins are missing, and writes the kernel's settings of connection tracking.

use super::{
    RoleError, cgroup_of, conntrack_settings, failed, other_error,
    state_dir::{StateDir, StateDirError},
};
use crate::{
    bpf::{self, PinDirectory, PinError},
    config::Config,
};

/// Mounts a BPF file system for the pins, and the cgroup v2 hierarchy, unless they are already mounted. Then takes
/// over or detaches programs of Culvert on the cgroup that are not pinned in the pin directory. Returns a line of
/// text about each step.
///
/// # Errors
///
/// Returns an error if a file system can't be mounted, if the configured cgroup is not a v2 cgroup, or if programs of
/// another Culvert that is running are attached to it.
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
    let mut lines = vec![bpffs, cgroups];
    lines.extend(take_over_strays(config)?);
    lines.extend(conntrack_settings::write(&config.conntrack));
    Ok(lines)
}

/// Takes over or detaches programs of Culvert that are not pinned in the pin directory. Returns a line of text if
/// there was something to do.
fn take_over_strays(config: &Config) -> Result<Option<String>, RoleError> {
    let cgroup = cgroup_of(config)?;
    // The daemon that is running takes over programs itself.
    let directory = &config.state_dir;
    let state = directory.is_dir().then(|| StateDir::lock(directory));
    let _state = match state.transpose() {
        Err(StateDirError::Locked { .. }) => return Ok(None),
        locked => locked.map_err(failed("cannot use stateDir"))?,
    };
    let pins = match PinDirectory::lock(&config.bpf.bpffs) {
        Ok(pins) => pins,
        Err(PinError::Locked { .. }) => return Ok(None),
        Err(error) => return Err(failed("cannot use bpf.bpffs")(error)),
    };
    let strays = bpf::take_over_strays(&pins, &cgroup).map_err(other_error)?;
    if strays.taken_over() > 0 {
        let programs = strays.taken_over();
        return Ok(Some(format!(
            "took over {programs} programs of an earlier Culvert and their maps"
        )));
    }
    if strays.is_empty() {
        return Ok(None);
    }
    if !pins.is_attached() {
        let programs = strays.len();
        return Ok(Some(format!(
            "left {programs} programs of an earlier Culvert attached, because none are pinned in this directory yet; \
             run this command again once the daemon is ready"
        )));
    }
    let detached = strays.detach().map_err(failed("cannot detach a program"))?;
    Ok(Some(format!(
        "detached {detached} programs of an earlier Culvert, which are not pinned in this directory"
    )))
}
