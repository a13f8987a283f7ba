//! `culvert sockets`: the helper of a node's daemon that ends sockets in pods.

use std::io;

use tokio::sync::watch;
use tracing::info;

use super::stop::Stop;
use crate::{bpf::SocketMemory, config::Config, sockets};

/// The helper could not start.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    /// It lacks the rights that it is there for.
    #[error("cannot end sockets in pods: {0}")]
    Rights(String),
    /// Signals can't be waited for.
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
}

/// Runs until SIGTERM, SIGINT or SIGHUP, whether a daemon runs or not.
///
/// # Errors
///
/// This process has not the rights to enter the network namespaces of pods.
pub async fn sockets(config: Config) -> Result<(), HelperError> {
    if let Some(why) = sockets::obstacle() {
        return Err(HelperError::Rights(why));
    }
    let mut stop = Stop::new().map_err(HelperError::Signals)?;
    let (drain, draining) = watch::channel(false);
    let bpffs = config.bpf.bpffs.clone();
    let socket = config.helper_socket();
    let help = sockets::help(&socket, move || SocketMemory::open(&bpffs), draining);
    tokio::select! {
        () = stop.wait() => {}
        () = help => {}
    }
    drop(drain);
    info!("stopping");
    Ok(())
}
