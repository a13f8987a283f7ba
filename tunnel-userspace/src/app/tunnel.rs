//! The tunnel's parts of a node: the gateway that agents connect to, and the ingress that steered
//! connects land on.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tracing::warn;

use crate::{
    admin::TunnelViews,
    config::{self, Config},
    drain,
    identity::{Files, Receiver, Role, Store},
    model::Targets,
    tasks::Tasks,
    tunnel::{
        Error, Limits, Registry,
        gateway::{self, Gateway},
        ingress::{self, Ingress},
    },
};

/// How long until a port that is taken is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// What the ingress is told of what is steered to it.
pub(super) struct Steered {
    /// What each index of a steering address stands for.
    pub(super) targets: watch::Receiver<Arc<Targets>>,
    /// The links that steered connects come by.
    pub(super) inside: watch::Receiver<Arc<BTreeSet<u32>>>,
}

/// Ports that are not ours yet, and why.
type Waiting = watch::Sender<BTreeMap<String, String>>;

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
            if let Some(gateway) = bound(&name, bind, &waiting, draining.clone()).await {
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
            if let Some(ingress) = bound(&name, bind, &waiting, draining.clone()).await {
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

/// Binds, as often as it takes; nothing if the drain begins before. Services go on meanwhile.
async fn bound<T>(
    name: &str,
    bind: impl Fn() -> Result<T, Error>,
    waiting: &Waiting,
    mut draining: watch::Receiver<bool>,
) -> Option<T> {
    loop {
        match bind() {
            Ok(listener) => {
                waiting.send_if_modified(|names| names.remove(name).is_some());
                return Some(listener);
            }
            Err(error) => waiting.send_if_modified(|names| {
                let mut reason = error.to_string();
                if let Some(source) = std::error::Error::source(&error) {
                    reason = format!("{reason}: {source}");
                }
                let is_new = names.get(name) != Some(&reason);
                if is_new {
                    warn!(name, reason, "cannot listen, trying again until it is free");
                    names.insert(name.to_owned(), reason);
                }
                is_new
            }),
        };
        tokio::select! {
            () = sleep(RETRY) => {}
            () = drain::begun(&mut draining) => return None,
        }
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
