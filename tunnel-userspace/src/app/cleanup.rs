//! `culvert cleanup`: removes everything that `culvert node` created, and nothing else.

use std::{fs, io::ErrorKind, path::PathBuf};

use super::{
    RoleError, cgroup_of, failed, other_error,
    state_dir::{StateDir, lock_path, marker_path},
};
use crate::{
    bpf::{self, LeftPins, PinDirectory},
    config::Config,
    net, reconcile,
};

/// Removes the programs, maps, routes and files that `culvert node` created with this config. Returns a line
/// of text for each item that was removed or left alone.
///
/// # Errors
///
/// Returns an error if a daemon is still running with this config, or if an item can't be removed.
pub fn cleanup(config: &Config) -> Result<Vec<String>, RoleError> {
    let mut lines = Vec::new();
    let (pins, directory) = (&config.bpf.bpffs, &config.state_dir);
    let pins_lock = pins.exists().then(|| PinDirectory::lock(pins));
    let pins_lock = pins_lock.transpose().map_err(other_error)?;
    let state = directory.is_dir().then(|| StateDir::lock(directory));
    let _state = state.transpose().map_err(other_error)?;
    // This comes first, because it fails if the programs belong to a process that is running.
    lines.extend(detach_strays(config, pins_lock.as_ref())?);
    // Routes are removed before the guards, so that outsiders can never reach a steering prefix.
    let routes = remove_routes(config)?;
    if routes > 0 {
        lines.push(format!("removed {routes} routes"));
    }
    if let Some(pins_lock) = &pins_lock {
        let LeftPins { foreign, newer } = pins_lock.remove().map_err(other_error)?;
        let links = pins.join("links");
        let mut left = foreign.iter().chain(&newer);
        if !left.any(|path| path.starts_with(&links)) {
            let pins = pins.display();
            lines.push(format!("removed the programs and maps of {pins}"));
        }
        let describe = |what: &'static str| {
            move |path: PathBuf| format!("left alone, {what}: {}", path.display())
        };
        lines.extend(foreign.into_iter().map(describe("not created by Culvert")));
        let by_newer = "created by a newer Culvert, whose `culvert cleanup` removes it";
        lines.extend(newer.into_iter().map(describe(by_newer)));
    }
    let marker = marker_path(directory);
    // The state directory is removed last, and only if a daemon created it.
    let own_directory = marker.exists().then(|| directory.clone());
    let sockets = [config.admin_socket(), config.helper_socket()];
    let files = sockets
        .into_iter()
        .chain([reconcile::held_addresses_path(directory)])
        .chain([config.objects_snapshot(), marker, lock_path(directory)]);
    for path in files.chain(own_directory) {
        let removed = if path == *directory {
            fs::remove_dir(&path)
        } else {
            fs::remove_file(&path)
        };
        let item = path.display();
        // This process itself creates the lock, if there was none.
        let is_lock = path == lock_path(directory);
        match removed.map_err(|error| (error.kind(), error)) {
            Ok(()) if is_lock => {}
            Ok(()) => lines.push(format!("removed {item}")),
            Err((ErrorKind::NotFound, _)) => {}
            Err((ErrorKind::DirectoryNotEmpty, _)) => {
                lines.push(format!("left alone, not empty: {item}"));
            }
            Err((_, error)) => return Err(failed(format!("cannot remove {item}"))(error)),
        }
    }
    if lines.is_empty() {
        lines.push("nothing to remove".to_owned());
    }
    Ok(lines)
}

/// Detaches the programs of Culvert that are attached to the cgroup, but pinned nowhere or in another directory.
/// Returns a line of text if there were any, or if they can't be found.
fn detach_strays(
    config: &Config,
    pins: Option<&PinDirectory>,
) -> Result<Option<String>, RoleError> {
    let Ok(cgroup) = cgroup_of(config) else {
        return Ok(None);
    };
    if !cgroup.exists() {
        return Ok(None);
    }
    let detached = bpf::detach_strays(&config.bpf.bpffs, pins, &cgroup).map_err(other_error)?;
    let cgroup = cgroup.display();
    Ok(match detached {
        Some(0) => None,
        Some(count) => Some(format!(
            "detached {count} programs of Culvert from {cgroup} that were not pinned in this directory"
        )),
        None => Some(format!(
            "left alone, cannot be inspected without CAP_SYS_ADMIN: programs on {cgroup} that are pinned elsewhere"
        )),
    })
}

/// Removes the routes for the steering prefixes, and returns how many there were.
fn remove_routes(config: &Config) -> Result<usize, RoleError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("cannot start the async runtime"))?;
    let record = net::record_path(&config.state_dir);
    runtime
        .block_on(net::remove_routes(&record))
        .map_err(other_error)
}
