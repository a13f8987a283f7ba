//! `culvert cleanup`: removes everything that a node ever made, and nothing else.

use std::{fs, io, path::PathBuf};

use crate::{
    app::state::{State, StateError, marker},
    bpf::{PinError, Pins},
    config::Config,
    net,
};

/// Something could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum CleanupError {
    /// The pins are held, or can't be removed.
    #[error(transparent)]
    Pins(#[from] PinError),
    /// The folder of state is held, or can't be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The routes can't be removed.
    #[error(transparent)]
    Routes(#[from] net::NetError),
    /// The routes can't be asked for.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// A file can't be removed.
    #[error("cannot remove {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// Removes programs, maps and files of a node with that config. Gives a line for each thing done
/// or left.
///
/// # Errors
///
/// A daemon still runs with the config, or something can't be removed.
pub fn cleanup(config: &Config) -> Result<Vec<String>, CleanupError> {
    let mut lines = Vec::new();
    let pins = &config.bpf.bpffs;
    let held = pins.exists().then(|| Pins::hold(pins)).transpose()?;
    let state = config
        .state_dir
        .is_dir()
        .then(|| State::hold(&config.state_dir));
    let _held = state.transpose()?;
    // Routes go before the guards do.
    let routes = remove_routes(config)?;
    if routes > 0 {
        lines.push(format!("removed {routes} routes"));
    }
    if let Some(held) = held {
        let foreign = held.remove()?;
        if !foreign
            .iter()
            .any(|path| path.starts_with(pins.join("links")))
        {
            lines.push(format!(
                "removed the programs and maps of {}",
                pins.display()
            ));
        }
        let left = |path: PathBuf| format!("left alone, not Culvert's: {}", path.display());
        lines.extend(foreign.into_iter().map(left));
    }
    let marker = marker(&config.state_dir);
    let is_ours = marker.exists();
    let sockets = [config.admin_socket(), config.helper_socket()];
    for path in sockets.into_iter().chain([config.kept_objects(), marker]) {
        match fs::remove_file(&path) {
            Ok(()) => lines.push(format!("removed {}", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(CleanupError::File { path, source }),
        }
    }
    if is_ours {
        match fs::remove_dir(&config.state_dir) {
            Ok(()) => lines.push(format!("removed {}", config.state_dir.display())),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                lines.push(format!(
                    "left alone, not empty: {}",
                    config.state_dir.display()
                ));
            }
            Err(source) => {
                return Err(CleanupError::File {
                    path: config.state_dir.clone(),
                    source,
                });
            }
        }
    }
    if lines.is_empty() {
        lines.push("there was nothing to remove".to_owned());
    }
    Ok(lines)
}

/// Removes the routes to the steering prefixes; says how many there were.
fn remove_routes(config: &Config) -> Result<usize, CleanupError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CleanupError::Runtime)?;
    let record = net::record(&config.state_dir);
    Ok(runtime.block_on(net::remove_routes(&record))?)
}
