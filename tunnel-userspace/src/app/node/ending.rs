//! The ending of sockets whose backend is gone.

use tokio::sync::watch;
use tracing::warn;
use tunnel_common::addr::Protocol;

use crate::{
    bpf::SocketMemory,
    config::{Config, Transport},
    failure::chain,
    sockets::{Ender, Settings, View},
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
    let settings = settings(config);
    if settings.protocols.is_empty() {
        return;
    }
    let named = config.sockets.named();
    match SocketMemory::open(&config.bpf.bpffs) {
        Ok(memory) => {
            view.send_modify(|view| view.protocols = named);
            let ender = Ender::new(settings, memory, view);
            tasks.start("sockets", ender.run(gone, draining.clone()));
        }
        Err(error) => {
            let problem = chain(&error);
            warn!(%problem, "no sockets are ended when their backend goes");
            view.send_modify(|view| {
                view.protocols = named;
                view.problem = Some(problem);
            });
        }
    }
}

fn settings(config: &Config) -> Settings {
    let number = |transport: &Transport| match transport {
        Transport::Udp => Protocol::UDP,
        Transport::Tcp => Protocol::TCP,
    };
    Settings {
        protocols: config.sockets.end.iter().map(number).collect(),
        pods: config.sockets.pods,
        helper: config.helper_socket(),
    }
}
