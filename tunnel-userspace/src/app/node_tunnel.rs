//! Starts the tunnel on a node: the gateway that agents connect to, and the ingress that accepts steered
//! connections.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::watch, time::sleep};

use super::certificate;
use crate::{
    admin::{EndSessions, Getter, TunnelView},
    config::Config,
    drain,
    identity::{CertificateReceiver, DenyListReceiver, DenyListStore, Role, clock},
    listen::{self, UnboundPorts},
    model::{NodeList, ObjectWarning, PodNamespaces, SteeringTargets},
    tasks::Tasks,
    tunnel::{
        AccessInputs, ClientRules, CommonSettings, FindDialled, ForwardedClients, Sessions,
        gateway::Gateway,
        ingress::{self, Ingress},
    },
};

/// The interval between two checks whether requests for a certificate are without success.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The time limit for the tunnel's tasks to stop, in addition to the time for draining streams.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A node's gateway and ingress, and the state that they share.
pub(super) struct NodeTunnel {
    identity: Option<CertificateReceiver>,
    deny_list: Option<DenyListReceiver>,
    sessions: Arc<Sessions>,
    /// The gateway and the ingress, which drain before the daemon's other tasks stop.
    tasks: Tasks,
    drain_timeout: Duration,
    /// The settings that the gateway and the ingress share, including the limit on buffered bytes.
    common: CommonSettings,
}

impl NodeTunnel {
    /// Reads the certificate and the deny list, and starts tasks that reread them when their files change. If
    /// one of them is invalid, the node still starts, and the gateway waits for a valid one.
    pub(super) fn open(config: &Config, tasks: &mut Tasks) -> Self {
        let gateway = config.tunnel.gateway.as_ref();
        let identity = gateway.and_then(|_| certificate::open(config, Role::Gateway, tasks));
        let drain_timeout = identity
            .as_ref()
            .map(|_| config.tunnel.session.drain_timeout);
        let deny_file = gateway.and_then(|gateway| gateway.deny_file.clone());
        let deny_list = deny_file.map(|path| {
            let (store, deny_list) = DenyListStore::open(path);
            tasks.start("deny list", store.run(tasks.draining()));
            deny_list
        });
        Self {
            identity,
            deny_list,
            sessions: Sessions::new(),
            tasks: Tasks::default(),
            drain_timeout: drain_timeout.unwrap_or_default(),
            common: common_settings(config),
        }
    }

    /// Returns a receiver for the warnings about edge nodes.
    pub(super) fn warnings(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.sessions.warnings()
    }

    /// Returns a getter for the tunnel's current state, which includes the steered nodes.
    pub(super) fn view(
        &self,
        steered: watch::Receiver<Arc<SteeringTargets>>,
    ) -> Getter<TunnelView> {
        let (sessions, identity) = (Arc::clone(&self.sessions), self.identity.clone());
        let deny_list = self.deny_list.clone();
        Box::new(move || TunnelView {
            nodes: sessions.nodes_with(&steered.borrow()),
            counts: sessions.counts(),
            identity: identity.as_ref().map(CertificateReceiver::state),
            deny_list: deny_list.as_ref().map(DenyListReceiver::state),
        })
    }

    /// Returns a function that ends all sessions of a node, and returns how many there were.
    pub(super) fn end_sessions(&self) -> EndSessions {
        let sessions = Arc::clone(&self.sessions);
        Box::new(move |node| sessions.end(node))
    }

    /// Waits until the gateway or the ingress ends, and returns its name or its panic message.
    pub(super) async fn ended(&mut self) -> String {
        self.tasks.ended().await
    }

    /// Returns the reason why the node is not ready while the tunnel drains, or `None` if it has nothing to
    /// drain.
    pub(super) fn drain_reason(&self) -> Option<String> {
        let seconds = self.drain_timeout.as_secs();
        (!self.drain_timeout.is_zero()).then(|| {
            format!(
                "stopping: Services and the tunnel work until no stream is open, for at most {seconds} s"
            )
        })
    }

    /// Drains the tunnel: serves new streams as long as others are open, for at most
    /// `tunnel.session.drainTimeout`, and then ends all sessions.
    pub(super) async fn drain(self) {
        // `drainTimeout` has no upper limit, so the sum may overflow.
        let limit = STOP_TIMEOUT.saturating_add(self.drain_timeout);
        self.tasks.finish(limit).await;
    }

    /// Starts the gateway, if the config has one. Agents can connect before the data path is ready. `nodes` are
    /// the names of the Nodes in the sources.
    pub(super) fn start_gateway(
        &mut self,
        config: &Config,
        nodes: watch::Receiver<NodeList>,
        unbound_ports: &UnboundPorts,
    ) {
        let (Some(settings), Some(identity)) = (&config.tunnel.gateway, &self.identity) else {
            return;
        };
        let name = format!("gateway {}", settings.listen);
        let (settings, common) = (settings.clone(), self.common.clone());
        let (identity, sessions) = (identity.clone(), Arc::clone(&self.sessions));
        let warned = warn_of_requests(
            identity.clone(),
            Arc::clone(&sessions),
            config.node_name.as_str().into(),
            self.tasks.draining(),
        );
        self.tasks.start("certificate warnings", warned);
        let access = AccessInputs {
            deny_list: self.deny_list.clone().unwrap_or_default(),
            // Without steering, the API server's source reads only this node's own Node.
            nodes: config.tunnel.steering.is_some().then_some(nodes),
        };
        let bind = move || {
            let (identity, sessions) = (identity.clone(), Arc::clone(&sessions));
            let (settings, common) = (settings.clone(), common.clone());
            Gateway::bind(settings, common, identity, sessions, access.clone())
        };
        let draining = self.tasks.draining();
        let serving =
            listen::bind_and_serve(name, bind, unbound_ports.clone(), draining, Gateway::run);
        self.tasks.start("gateway", serving);
    }

    /// Starts the ingress, which accepts steered connections. `targets` maps the index in a steering address
    /// to a node and port; `inside` contains the links from which the ingress accepts connections, `find_dialled` finds
    /// what clients of translated packets have dialled, and `pods` contains the namespaces of this node's Pods.
    pub(super) fn start_ingress(
        &mut self,
        config: &Config,
        targets: watch::Receiver<Arc<SteeringTargets>>,
        (inside, find_dialled): (watch::Receiver<Arc<BTreeSet<u32>>>, FindDialled),
        pods: watch::Receiver<Arc<PodNamespaces>>,
        unbound_ports: &UnboundPorts,
    ) {
        let Some(steering) = &config.tunnel.steering else {
            return;
        };
        let listen = listen_address(steering.ingress_port);
        let settings = ingress::IngressSettings {
            prefixes: steering.ranges(),
            listen,
            allow: steering.allow.as_deref().map(ClientRules::parse),
            pods,
            forwarded: ForwardedClients::new(steering.forwarded_ranges(), find_dialled),
        };
        let (common, sessions) = (self.common.clone(), Arc::clone(&self.sessions));
        let bind = move || {
            Ingress::bind(
                settings.clone(),
                common.clone(),
                targets.clone(),
                inside.clone(),
                Arc::clone(&sessions),
            )
        };
        let (name, draining) = (format!("ingress {listen}"), self.tasks.draining());
        let serving =
            listen::bind_and_serve(name, bind, unbound_ports.clone(), draining, Ingress::run);
        self.tasks.start("ingress", serving);
    }
}

/// Warns once this node's requests for the gateway's certificate have been without success for an hour.
async fn warn_of_requests(
    identity: CertificateReceiver,
    sessions: Arc<Sessions>,
    node: Arc<str>,
    mut draining: watch::Receiver<bool>,
) {
    loop {
        let request = identity.state().request.unwrap_or_default();
        if let Some(problem) = request.lasting_problem(clock::now()) {
            let text = format!("the gateway has got no certificate for an hour: {problem}");
            sessions.warn_of_requests(&node, Some(text));
        } else if request.problem.is_none() {
            sessions.warn_of_requests(&node, None);
        }
        tokio::select! {
            () = sleep(WARNING_INTERVAL) => {}
            () = drain::begun(&mut draining) => return,
        }
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
    CommonSettings::new(
        config.tunnel.session.clone(),
        Some(config.tunnel.socket_mark),
    )
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
