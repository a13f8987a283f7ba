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
    config::{self, Config},
    identity::{Files, Receiver, Role, Store},
    listen::{self, Waiting},
    model::Targets,
    tasks::Tasks,
    tunnel::{
        Limits, Registry,
        gateway::{self, Gateway},
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
        let files = config.tunnel.gateway.as_ref().and_then(|_| files(config));
        let (store, identity) = files.map(|files| Store::open(files, Role::Gateway)).unzip();
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
        let settings = gateway::Settings {
            listen: gateway.listen,
            sessions: gateway.sessions,
            handshakes: gateway.handshakes,
            handshake_timeout: gateway.handshake_timeout,
            threads: config.tunnel.session.threads,
            limits: limits(config),
            mark: Some(config.tunnel.mark),
        };
        let (identity, registry) = (identity.clone(), Arc::clone(&self.registry));
        let bind = move || Gateway::bind(settings.clone(), identity.clone(), Arc::clone(&registry));
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
        let prefixes = steering.ranges();
        let listen = listen_address(steering.port);
        let settings = ingress::Settings {
            prefixes,
            listen,
            limits: limits(config),
            mark: Some(config.tunnel.mark),
        };
        let registry = Arc::clone(&self.registry);
        let bind = move || {
            Ingress::bind(
                settings.clone(),
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

/// The files of the certificate, if the config names them.
pub(super) fn files(config: &Config) -> Option<Files> {
    let identity = config.tunnel.identity.as_ref()?;
    let config::IdentityFiles { ca, cert, key } = identity.files.clone();
    Some(Files { ca, cert, key })
}

/// Bounds of a session.
pub(super) const fn limits(config: &Config) -> Limits {
    let session = &config.tunnel.session;
    Limits {
        streams: session.streams,
        window: session.window,
        ping_every: session.ping_every,
        ping_timeout: session.ping_timeout,
        drain: session.drain,
    }
}
