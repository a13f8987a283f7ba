//! The ending of sockets whose backend is gone.

use tokio::sync::watch;
use tracing::warn;

use crate::{
    bpf::SocketMemory,
    config::Config,
    failure::chain,
    sockets::{Ender, View},
    tasks::Tasks,
};

/// Starts it, where the config wants it. Services don't depend on it: what it can't do is told, and
/// everything else goes on.
pub(super) fn start(
    config: &Config,
    view: watch::Sender<View>,
    gone: watch::Receiver<u64>,
    tasks: &mut Tasks,
    draining: &watch::Receiver<bool>,
) {
    let settings = &config.sockets;
    if settings.end.is_empty() {
        return;
    }
    let protocols = settings.end.clone();
    match SocketMemory::open(&config.bpf.bpffs) {
        Ok(memory) => {
            view.send_modify(|view| view.protocols = protocols);
            let ender = Ender::new(settings, config.helper_socket(), memory, view);
            tasks.start("sockets", ender.run(gone, draining.clone()));
        }
        Err(error) => {
            let problem = chain(&error);
            warn!(%problem, "no sockets are ended when their backend goes");
            view.send_modify(|view| {
                view.protocols = protocols;
                view.problem = Some(problem);
            });
        }
    }
}
