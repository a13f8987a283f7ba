//! `culvert cleanup`: removes everything that `culvert node` created, and nothing else.

use std::{fs, io::ErrorKind, path::PathBuf};

use super::{
    RoleError, failed, other_error,
    state_dir::{StateDir, marker_path},
};
use crate::{bpf::PinDirectory, config::Config, net};

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
    // Routes are removed before the guards, so that outsiders can never reach a steering prefix.
    let routes = remove_routes(config)?;
    if routes > 0 {
        lines.push(format!("removed {routes} routes"));
    }
    if let Some(pins_lock) = pins_lock {
        let foreign = pins_lock.remove().map_err(other_error)?;
        let links = pins.join("links");
        if !foreign.iter().any(|path| path.starts_with(&links)) {
            let pins = pins.display();
            lines.push(format!("removed the programs and maps of {pins}"));
        }
        let left_alone =
            |path: PathBuf| format!("left alone, not created by Culvert: {}", path.display());
        lines.extend(foreign.into_iter().map(left_alone));
    }
    let marker = marker_path(directory);
    // The state directory is removed last, and only if a daemon created it.
    let own_directory = marker.exists().then(|| directory.clone());
    let sockets = [config.admin_socket(), config.helper_socket()];
    let files = sockets
        .into_iter()
        .chain([config.objects_snapshot(), marker]);
    for path in files.chain(own_directory) {
        let removed = if path == *directory {
            fs::remove_dir(&path)
        } else {
            fs::remove_file(&path)
        };
        let item = path.display();
        match removed.map_err(|error| (error.kind(), error)) {
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
