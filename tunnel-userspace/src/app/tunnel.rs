//! The tunnel's parts of a node: the gateway that agents connect to, and the ingress that steered
//! connects land on.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    admin::TunnelViews,
    config::Config,
    identity::{Receiver, Role, Store},
    listen::{self, Waiting},
    model::Targets,
    tasks::Tasks,
    tunnel::{
        Common, Registry,
        gateway::Gateway,
        ingress::{self, Ingress},
    },
};

/// What the ingress is told of what is steered to it.
pub(super) struct Steered {
    /// What each index of a steering address stands for.
    pub(super) targets: watch::Receiver<Arc<Targets>>,
    /// The links that steered connects come by.
    pub(super) inside: watch::Receiver<Arc<BTreeSet<u32>>>,
}

/// The gateway of a node, and what its ingress needs.
pub(super) struct Tunnel {
    store: Option<Store>,
    identity: Option<Receiver>,
    registry: Arc<Registry>,
}

impl Tunnel {
    /// Reads the certificate. One that can't be used stops nothing: it is told, and the gateway
    /// waits for a better one.
    pub(super) fn open(config: &Config) -> Self {
        let certificate = config.tunnel.identity.as_ref();
        let certificate = certificate.filter(|_| config.tunnel.gateway.is_some());
        let opened = certificate.map(|it| Store::open(it.files.clone(), Role::Gateway));
        let (store, identity) = opened.unzip();
        Self {
            store,
            identity,
            registry: Registry::new(),
        }
    }

    /// What is shown of it, and of the nodes that are steered.
    pub(super) fn views(&self, steered: watch::Receiver<Arc<Targets>>) -> TunnelViews {
        let (nodes, counts) = (Arc::clone(&self.registry), Arc::clone(&self.registry));
        let identity = self.identity.clone();
        TunnelViews {
            nodes: Box::new(move || nodes.nodes_with(&steered.borrow())),
            counts: Box::new(move || counts.counts()),
            identity: Box::new(move || identity.as_ref().map(Receiver::state)),
        }
    }

    /// How long its streams may go on after the drain began.
    pub(super) const fn patience(&self, config: &Config) -> Duration {
        if self.identity.is_some() {
            config.tunnel.session.drain
        } else {
            Duration::ZERO
        }
    }

    /// Starts the gateway, if the config has one. It runs before the data path is ready: agents may
    /// connect meanwhile.
    pub(super) fn start_gateway(
        &mut self,
        config: &Config,
        waiting: &Waiting,
        tasks: &mut Tasks,
        draining: &watch::Receiver<bool>,
    ) {
        let (Some(gateway), Some(identity)) = (&config.tunnel.gateway, &self.identity) else {
            return;
        };
        if let Some(store) = self.store.take() {
            tasks.start("identity", store.run(draining.clone()));
        }
        let (settings, common) = (gateway.clone(), common(config));
        let (identity, registry) = (identity.clone(), Arc::clone(&self.registry));
        let bind = move || {
            let (identity, registry) = (identity.clone(), Arc::clone(&registry));
            Gateway::bind(settings.clone(), common.clone(), identity, registry)
        };
        let name = format!("gateway {}", gateway.listen);
        let (waiting, draining) = (waiting.clone(), draining.clone());
        tasks.start("gateway", async move {
            if let Some(gateway) = listen::bound(&name, bind, &waiting, &mut draining.clone()).await
            {
                gateway.run(draining).await;
            }
        });
    }

    /// Starts the ingress: the listener of steered connects.
    pub(super) fn start_ingress(
        &self,
        config: &Config,
        steered: Steered,
        waiting: &Waiting,
        tasks: &mut Tasks,
        draining: &watch::Receiver<bool>,
    ) {
        let Some(steering) = &config.tunnel.steering else {
            return;
        };
        let Steered { targets, inside } = steered;
        let listen = listen_address(steering.port);
        let settings = ingress::Settings {
            prefixes: steering.ranges(),
            listen,
        };
        let (common, registry) = (common(config), Arc::clone(&self.registry));
        let bind = move || {
            Ingress::bind(
                settings.clone(),
                common.clone(),
                targets.clone(),
                inside.clone(),
                Arc::clone(&registry),
            )
        };
        let name = format!("ingress {listen}");
        let (waiting, draining) = (waiting.clone(), draining.clone());
        tasks.start("ingress", async move {
            if let Some(ingress) = listen::bound(&name, bind, &waiting, &mut draining.clone()).await
            {
                ingress.run(draining).await;
            }
        });
    }
}

/// Both families on one socket, where the kernel has both.
fn listen_address(port: u16) -> SocketAddr {
    let has_v6 = std::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    if has_v6 {
        (Ipv6Addr::UNSPECIFIED, port).into()
    } else {
        (Ipv4Addr::UNSPECIFIED, port).into()
    }
}

/// What every role of the tunnel is told.
pub(super) fn common(config: &Config) -> Common {
    Common {
        limits: config.tunnel.session.clone(),
        mark: Some(config.tunnel.mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tunnel_marks_its_sockets_as_the_config_says() {
        let config = Config::parse("tunnel: { mark: 0x20000 }").expect("good");

        assert_eq!(common(&config).mark, Some(0x2_0000));
    }
}
