//! Starts the task that terminates the sockets of removed backends.

use tokio::sync::watch;
use tracing::warn;

use crate::{
    bpf::SocketStorage,
    config::Config,
    error_chain::chain,
    sockets::{Terminator, TerminatorView},
    tasks::Tasks,
};

/// Starts the task if `sockets.terminate` is not empty. Services work without it, so a failure is only
/// reported.
pub(super) fn start(
    config: &Config,
    view: watch::Sender<TerminatorView>,
    removals: watch::Receiver<u64>,
    tasks: &mut Tasks,
) {
    let settings = &config.sockets;
    if settings.terminate.is_empty() {
        return;
    }
    view.send_modify(|view| view.protocols.clone_from(&settings.terminate));
    match SocketStorage::open(&config.bpf.bpffs) {
        Ok(memory) => {
            let terminator = Terminator::new(settings, config.helper_socket(), memory, view);
            tasks.start("sockets", terminator.run(removals, tasks.draining()));
        }
        Err(error) => {
            let problem = chain(&error);
            warn!(%problem, "sockets of removed backends will not be ended");
            view.send_modify(|view| view.problem = Some(problem));
        }
    }
}
