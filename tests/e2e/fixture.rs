//! The fixture for Culvert's own e2e tests: a Service with backends, and clients on each node.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_cluster::{Cluster, kubectl::Kubectl};
use tunnel_tests::{
    load::{Plan, Report, StopSignal, tcp},
    sandbox::{Sandbox, connect_within},
    wait,
};

use crate::manifests::{self, NAMESPACE};

/// The time limit for all nodes to apply a change to the API server's objects.
pub(crate) const SYNC_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of backends that the Service `web` has.
pub(crate) const BACKENDS: usize = 4;

/// The port of every Service.
const PORT: u16 = 80;

/// A client in a pod or on a host.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    /// The name of the pod, or of the host's node.
    pub(crate) name: String,
    pub(crate) sandbox: Sandbox,
}

/// A cluster that contains the objects that the tests use.
#[derive(Debug)]
pub(crate) struct Fixture<'a> {
    pub(crate) cluster: &'a Cluster,
    /// Two clients on each node: a pod and the host.
    pub(crate) clients: Vec<Client>,
}

impl<'a> Fixture<'a> {
    /// Creates the objects, and waits until they are ready.
    pub(crate) fn create(cluster: &'a Cluster) -> Result<Self> {
        let kubectl = &cluster.kubectl;
        let mut objects = vec![
            manifests::namespace(),
            manifests::deployment("web", BACKENDS),
            manifests::service("web", &["TCP", "UDP"]),
        ];
        for node in &cluster.nodes {
            objects.push(manifests::client(&client_pod(node.name), node.name));
        }
        kubectl.apply(&objects.join("---\n"))?;
        kubectl.wait_for_rollout(NAMESPACE, "deploy/web")?;
        let mut clients = Vec::new();
        for node in &cluster.nodes {
            let pod = client_pod(node.name);
            let ready = "--for=condition=Ready";
            kubectl.run(&["-n", NAMESPACE, "wait", ready, "pod", &pod])?;
            clients.push(Client {
                sandbox: node.pod_sandbox(kubectl, NAMESPACE, &pod)?,
                name: pod,
            });
            clients.push(Client {
                name: node.name.to_owned(),
                sandbox: node.host.clone(),
            });
        }
        Ok(Self { cluster, clients })
    }

    pub(crate) const fn kubectl(&self) -> &Kubectl {
        &self.cluster.kubectl
    }

    /// Runs a command in the client pod on a node, and returns its output.
    pub(crate) fn exec(&self, node: &str, command: &[&str]) -> Result<String> {
        self.run_kubectl(&[&["exec", &client_pod(node), "--"], command].concat())
    }

    /// Runs `kubectl` in [`NAMESPACE`], and returns its output.
    pub(crate) fn run_kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl()
            .run(&[&["-n", NAMESPACE], arguments].concat())
    }

    /// Waits until each address of a Service responds to every client, and returns the addresses.
    pub(crate) fn wait_until_served(&self, service: &str) -> Result<Vec<SocketAddr>> {
        let addresses = self.addresses(service)?;
        for client in &self.clients {
            for to in &addresses {
                wait::until(SYNC_TIMEOUT, || client.request_names(*to, 1).failed() == 0)
                    .with_context(|| format!("{} → {service} ({to}): no response", client.name))?;
            }
        }
        Ok(addresses)
    }

    /// Runs `action` while every client connects to each address `rate` times a second, for at most `limit`.
    /// Returns a report for each client and address, or an error if any connection failed.
    pub(crate) fn under_load(
        &self,
        addresses: &[SocketAddr],
        rate: u32,
        limit: Duration,
        action: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Report>> {
        let stop = StopSignal::default();
        let (result, reports) = thread::scope(|scope| {
            let mut loads = Vec::new();
            for client in &self.clients {
                for to in addresses {
                    let plan = Plan::new(*to, rate, limit).stop_on(&stop);
                    let load = scope.spawn(move || client.load(&plan));
                    loads.push((format!("{} → {to}", client.name), load));
                }
            }
            let result = stop.stop_after(action);
            let loads = loads.into_iter();
            let reports = loads.map(|(name, load)| (name, load.join().unwrap_or_default()));
            (result, reports.collect::<Vec<(String, Report)>>())
        });
        result?;
        for (name, report) in &reports {
            ensure!(report.failed() == 0, "{name}: {:?}", report.failures);
            ensure!(report.attempts > 0, "{name}: no connect was attempted");
        }
        Ok(reports.into_iter().map(|(_, report)| report).collect())
    }

    /// Returns a Service's ClusterIPs, each combined with [`PORT`].
    pub(crate) fn addresses(&self, service: &str) -> Result<Vec<SocketAddr>> {
        self.cluster.service_addresses(NAMESPACE, service, PORT)
    }
}

impl Client {
    /// Requests the backend's name over `count` new connections.
    pub(crate) fn request_names(&self, to: SocketAddr, count: u32) -> Report {
        let rate = 200;
        let duration = Duration::from_secs(1) * count / rate;
        self.load(&Plan::new(to, rate, duration))
    }

    /// Connects over TCP within a time limit.
    pub(crate) fn connect(&self, to: SocketAddr, within: Duration) -> io::Result<()> {
        let socket = self.sandbox.socket(Domain::for_address(to), Type::STREAM)?;
        connect_within(&socket, to, within)
    }

    /// Sends the requests that a plan specifies.
    pub(crate) fn load(&self, plan: &Plan) -> Report {
        let sockets = |domain, kind| self.sandbox.socket(domain, kind);
        tcp::run_with_path(plan, "/hostname", &sockets)
    }

    /// Creates a UDP socket in the same address family as `to`.
    pub(crate) fn udp_socket(&self, to: SocketAddr) -> io::Result<UdpSocket> {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        self.sandbox.udp(any)
    }

    /// Requests the backend's name over UDP.
    pub(crate) fn request_name_by_udp(&self, to: SocketAddr) -> Result<String> {
        let socket = self.udp_socket(to)?;
        socket.send_to(b"hostname", to)?;
        let mut reply = [0; 256];
        let (length, from) = socket.recv_from(&mut reply)?;
        ensure!(from == to, "the reply is from {from}, not from {to}");
        Ok(String::from_utf8_lossy(&reply[..length]).into_owned())
    }
}

/// Returns the name of the client pod on a node.
pub(crate) fn client_pod(node: &str) -> String {
    format!("on-{node}")
}
