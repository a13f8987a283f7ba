//! Starts the tunnel on a node: the gateway that agents connect to, and the ingress that accepts steered
//! connections.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    admin::{Getter, TunnelView},
    config::Config,
    identity::{CertificateReceiver, CertificateStore, Role},
    listen::{self, UnboundPorts},
    model::SteeringTargets,
    tasks::Tasks,
    tunnel::{
        CommonSettings, Sessions,
        gateway::Gateway,
        ingress::{self, Ingress},
    },
};

/// The state that a node's gateway and ingress share.
pub(super) struct NodeTunnel {
    identity: Option<CertificateReceiver>,
    sessions: Arc<Sessions>,
}

impl NodeTunnel {
    /// Reads the certificate, and starts a task that rereads it when its files change. If the certificate is
    /// invalid, the node still starts, and the gateway waits for a valid one.
    pub(super) fn open(config: &Config, tasks: &mut Tasks) -> Self {
        let certificate = config.tunnel.identity.as_ref();
        let certificate = certificate.filter(|_| config.tunnel.gateway.is_some());
        let identity = certificate.map(|it| {
            let (store, identity) = CertificateStore::open(it.files.clone(), Role::Gateway);
            tasks.start("identity", store.run(tasks.draining()));
            identity
        });
        Self {
            identity,
            sessions: Sessions::new(),
        }
    }

    /// Returns a getter for the tunnel's current state, which includes the steered nodes.
    pub(super) fn view(
        &self,
        steered: watch::Receiver<Arc<SteeringTargets>>,
    ) -> Getter<TunnelView> {
        let (sessions, identity) = (Arc::clone(&self.sessions), self.identity.clone());
        Box::new(move || TunnelView {
            nodes: sessions.nodes_with(&steered.borrow()),
            counts: sessions.counts(),
            identity: identity.as_ref().map(CertificateReceiver::state),
        })
    }

    /// Returns how long open streams may take to finish during the drain.
    pub(super) fn drain_timeout(&self, config: &Config) -> Duration {
        let identity = self.identity.as_ref();
        identity.map_or(Duration::ZERO, |_| config.tunnel.session.drain_timeout)
    }

    /// Starts the gateway, if the config has one. Agents can connect before the data path is ready.
    pub(super) fn start_gateway(
        &self,
        config: &Config,
        unbound_ports: &UnboundPorts,
        tasks: &mut Tasks,
    ) {
        let (Some(settings), Some(identity)) = (&config.tunnel.gateway, &self.identity) else {
            return;
        };
        let name = format!("gateway {}", settings.listen);
        let (settings, common) = (settings.clone(), common_settings(config));
        let (identity, sessions) = (identity.clone(), Arc::clone(&self.sessions));
        let bind = move || {
            let (identity, sessions) = (identity.clone(), Arc::clone(&sessions));
            Gateway::bind(settings.clone(), common.clone(), identity, sessions)
        };
        let draining = tasks.draining();
        let serving =
            listen::bind_and_serve(name, bind, unbound_ports.clone(), draining, Gateway::run);
        tasks.start("gateway", serving);
    }

    /// Starts the ingress, which accepts steered connections. `targets` maps the index in a steering address
    /// to a node and port; `inside` contains the links from which the ingress accepts connections.
    pub(super) fn start_ingress(
        &self,
        config: &Config,
        targets: watch::Receiver<Arc<SteeringTargets>>,
        inside: watch::Receiver<Arc<BTreeSet<u32>>>,
        unbound_ports: &UnboundPorts,
        tasks: &mut Tasks,
    ) {
        let Some(steering) = &config.tunnel.steering else {
            return;
        };
        let listen = listen_address(steering.ingress_port);
        let settings = ingress::IngressSettings {
            prefixes: steering.ranges(),
            listen,
        };
        let (common, sessions) = (common_settings(config), Arc::clone(&self.sessions));
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
        let serving =
            listen::bind_and_serve(name, bind, unbound_ports.clone(), draining, Ingress::run);
        tasks.start("ingress", serving);
    }
}

/// Returns the address to listen on for a port: `[::]`, which covers both families, or `0.0.0.0` if the host
/// has no IPv6.
fn listen_address(port: u16) -> SocketAddr {
    let has_v6 = std::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    if has_v6 {
        (Ipv6Addr::UNSPECIFIED, port).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, port).into()
    }
}

/// Returns the settings that the ingress, the gateway and the agent share.
pub(super) fn common_settings(config: &Config) -> CommonSettings {
    CommonSettings {
        limits: config.tunnel.session.clone(),
        mark: Some(config.tunnel.socket_mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_the_tunnel_get_the_mark_of_the_config() {
        let config = Config::parse("tunnel: { socketMark: 0x20000 }").expect("good");

        assert_eq!(common_settings(&config).mark, Some(0x2_0000));
    }
}
