//! `culvert sockets`: the helper process that terminates sockets in pods for the daemon.

use tokio::sync::watch;
use tracing::info;

use super::{RoleError, descriptor_limit, failed, shutdown_signals::ShutdownSignals};
use crate::{bpf::SocketStorage, config::Config, sockets};

/// Runs the helper until SIGTERM, SIGINT or SIGHUP. The daemon may start later, or restart in the meantime.
///
/// # Errors
///
/// Returns an error if this process lacks the privileges to enter the pods' network namespaces.
pub async fn sockets_helper(config: Config) -> Result<(), RoleError> {
    if let Some(why) = sockets::obstacle_to_entering() {
        return Err(failed("cannot end sockets in pods")(why));
    }
    descriptor_limit::raise();
    let mut stop = ShutdownSignals::new().map_err(failed("cannot wait for signals"))?;
    let (_drain, draining) = watch::channel(false);
    let bpffs = config.bpf.bpffs.clone();
    let socket = config.helper_socket();
    let help = sockets::run_helper(&socket, move || SocketStorage::open(&bpffs), draining);
    tokio::select! {
        () = stop.wait() => {}
        () = help => {}
    }
    info!("stopping");
    Ok(())
}
