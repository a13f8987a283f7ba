//! The tunnel's parts of a node: the gateway that agents connect to, and the ingress that accepts
//! steered connects.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    admin::{Query, TunnelView},
    config::Config,
    identity::{Receiver, Role, Store},
    listen::{self, Waiting},
    model::Targets,
    tasks::Tasks,
    tunnel::{
        Common, Sessions,
        gateway::Gateway,
        ingress::{self, Ingress},
    },
};

/// The gateway of a node, and the state that its ingress needs.
pub(super) struct Tunnel {
    identity: Option<Receiver>,
    sessions: Arc<Sessions>,
}

impl Tunnel {
    /// Reads the certificate, and re-reads it when its files change. An invalid one stops nothing: the
    /// error is reported, and the gateway waits for a valid one.
    pub(super) fn open(config: &Config, tasks: &mut Tasks) -> Self {
        let certificate = config.tunnel.identity.as_ref();
        let certificate = certificate.filter(|_| config.tunnel.gateway.is_some());
        let identity = certificate.map(|it| {
            let (store, identity) = Store::open(it.files.clone(), Role::Gateway);
            tasks.start("identity", store.run(tasks.draining()));
            identity
        });
        Self {
            identity,
            sessions: Sessions::new(),
        }
    }

    /// Returns a function that reads the state of the tunnel, and of the steered nodes.
    pub(super) fn view(&self, steered: watch::Receiver<Arc<Targets>>) -> Query<TunnelView> {
        let (sessions, identity) = (Arc::clone(&self.sessions), self.identity.clone());
        Box::new(move || TunnelView {
            nodes: sessions.nodes_with(&steered.borrow()),
            counts: sessions.counts(),
            identity: identity.as_ref().map(Receiver::state),
        })
    }

    /// Returns the time that streams may go on after the drain began.
    pub(super) fn patience(&self, config: &Config) -> Duration {
        let identity = self.identity.as_ref();
        identity.map_or(Duration::ZERO, |_| config.tunnel.session.drain_timeout)
    }

    /// Starts the gateway, if the config has one. It runs before the data path is ready, so that agents
    /// may connect meanwhile.
    pub(super) fn start_gateway(&self, config: &Config, waiting: &Waiting, tasks: &mut Tasks) {
        let (Some(settings), Some(identity)) = (&config.tunnel.gateway, &self.identity) else {
            return;
        };
        let name = format!("gateway {}", settings.listen);
        let (settings, common) = (settings.clone(), common(config));
        let (identity, sessions) = (identity.clone(), Arc::clone(&self.sessions));
        let bind = move || {
            let (identity, sessions) = (identity.clone(), Arc::clone(&sessions));
            Gateway::bind(settings.clone(), common.clone(), identity, sessions)
        };
        let draining = tasks.draining();
        let serving = listen::serve(name, bind, waiting.clone(), draining, Gateway::run);
        tasks.start("gateway", serving);
    }

    /// Starts the ingress: the listener of steered connects. `targets` has the node and port of each
    /// index in a steering address, `inside` the links on which steered connects arrive.
    pub(super) fn start_ingress(
        &self,
        config: &Config,
        targets: watch::Receiver<Arc<Targets>>,
        inside: watch::Receiver<Arc<BTreeSet<u32>>>,
        waiting: &Waiting,
        tasks: &mut Tasks,
    ) {
        let Some(steering) = &config.tunnel.steering else {
            return;
        };
        let listen = listen_address(steering.ingress_port);
        let settings = ingress::Settings {
            prefixes: steering.ranges(),
            listen,
        };
        let (common, sessions) = (common(config), Arc::clone(&self.sessions));
        let bind = move || {
            Ingress::bind(
                settings.clone(),
                common.clone(),
                targets.clone(),
                inside.clone(),
                Arc::clone(&sessions),
            )
        };
        let (name, draining) = (format!("ingress {listen}"), tasks.draining());
        let serving = listen::serve(name, bind, waiting.clone(), draining, Ingress::run);
        tasks.start("ingress", serving);
    }
}

/// Returns a listening address for both families if the kernel has both.
fn listen_address(port: u16) -> SocketAddr {
    let has_v6 = std::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    if has_v6 {
        (Ipv6Addr::UNSPECIFIED, port).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, port).into()
    }
}

/// Returns the settings common to all roles of the tunnel.
pub(super) fn common(config: &Config) -> Common {
    Common {
        limits: config.tunnel.session.clone(),
        mark: Some(config.tunnel.socket_mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tunnel_marks_its_sockets_as_the_config_says() {
        let config = Config::parse("tunnel: { socketMark: 0x20000 }").expect("good");

        assert_eq!(common(&config).mark, Some(0x2_0000));
    }
}
