//! Starts Kubernetes clusters on the local machine. A cluster has a cloud node with the control plane, an
//! edge node and, optionally, a second cloud node. Each node is a sandbox in the lab; a router connects the
//! nodes.
//!
//! ```text
//! node-a  cloud, control plane   172.30.0.1  fd00:30:0::1   pods 10.244.0.0/24 fd00:244:0::/64
//!    │ up0
//! router                         .254        ::fe           `Network::set_outbound_only`
//!    │ up0 of each
//! node-b  edge                   172.30.1.1  fd00:30:1::1   pods 10.244.1.0/24 fd00:244:1::/64
//! node-c  cloud, `Size::Three`   172.30.2.1  fd00:30:2::1   pods 10.244.2.0/24 fd00:244:2::/64
//! ```
//!
//! Every process is in one of the lab's cgroups, and each node has its own mount namespace, so everything is
//! removed along with the lab, even if the process that owns the lab is killed.

pub mod api_client;
mod bootstrap_objects;
pub mod components;
mod control_groups;
pub mod control_plane;
pub mod culvert_deployment;
pub mod ginkgo;
pub mod kubectl;
pub mod logs;
pub mod minimal_cluster;
pub mod network;
pub mod node;
mod pki;
pub mod proxy;

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result};
use tunnel_tests::{lab::Lab, wait};

use self::{
    components::Components,
    control_plane::ControlPlane,
    kubectl::Kubectl,
    logs::Logs,
    network::{Network, Size},
    node::Node,
    pki::Pki,
    proxy::Proxy,
};

/// The time limit for nodes and objects to become ready, even on a busy machine.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// The ClusterIP of the cluster's DNS Service.
pub const DNS: &str = "10.96.0.10";

/// The parts that the control plane and all nodes share.
#[derive(Debug)]
pub struct SharedParts {
    /// The nodes' hosts, and the router between them.
    pub network: Network,
    pki: Pki,
    /// The cluster's programs and images.
    pub components: Components,
    /// The directory for all logs.
    pub logs: Logs,
    /// The lab, which provides the cluster's directory and cgroup.
    pub lab: Lab,
}

impl SharedParts {
    fn new(components: Components, logs: Logs, size: Size) -> Result<Self> {
        let lab = Lab::new()?;
        Ok(Self {
            network: Network::new(&lab, &components, size)?,
            pki: Pki::create(&lab.directory().join("pki"))?,
            components,
            logs,
            lab,
        })
    }
}

/// A running cluster. It is removed on drop.
#[derive(Debug)]
pub struct Cluster {
    pub kubectl: Kubectl,
    /// The nodes; the first one runs the control plane.
    pub nodes: Vec<Node>,
    pub control_plane: ControlPlane,
    pub proxy: Proxy,
    /// The parts that the nodes share, such as the network, the programs and the logs.
    pub shared: SharedParts,
}

impl Cluster {
    /// Starts a cluster, and waits until its nodes and its DNS are ready.
    pub fn start(components: Components, logs: Logs, proxy: Proxy, size: Size) -> Result<Self> {
        let shared = SharedParts::new(components, logs, size)?;
        node::prepare(&shared.lab)?;
        let (control_plane, nodes) = start_parts(&shared)?;
        let mut cluster = Self {
            kubectl: control_plane.kubectl.clone(),
            nodes,
            control_plane,
            proxy,
            shared,
        };
        cluster.start_kubelets()?;
        Ok(cluster)
    }

    /// Starts the kubelets and the service proxy, and waits until the nodes, the proxy and DNS are ready.
    fn start_kubelets(&mut self) -> Result<()> {
        self.kubectl.apply(&bootstrap_objects::all())?;
        for node in &mut self.nodes {
            node.start_kubelet(&self.shared)?;
            if self.proxy == Proxy::KubeProxy {
                proxy::start_kube_proxy(node, &self.shared)?;
            }
        }
        for node in &self.nodes {
            let name = node.name;
            self.kubectl
                .wait_for("node", name, "Ready", READY_TIMEOUT)
                .with_context(|| format!("the node {name} did not become ready"))?;
        }
        if let Proxy::Culvert(deployment) = &self.proxy {
            let scratch = self.shared.lab.directory();
            culvert_deployment::deploy(deployment, &self.kubectl, &self.nodes, scratch)
                .context("Culvert did not become ready")?;
        }
        self.kubectl
            .wait_for_rollout("kube-system", "deploy/coredns")?;
        let account = &["-n", "default", "get", "serviceaccount", "default"];
        wait::until(READY_TIMEOUT, || self.kubectl.run(account).is_ok())
            .context("the default service account was not created")
    }

    /// Returns a Service's ClusterIPs, each combined with the given port, IPv4 first.
    pub fn service_addresses(
        &self,
        namespace: &str,
        name: &str,
        port: u16,
    ) -> Result<Vec<SocketAddr>> {
        let path = "jsonpath={.spec.clusterIPs[*]}";
        let arguments = ["-n", namespace, "get", "service", name, "-o", path];
        let output = self.kubectl.run(&arguments)?;
        let mut addresses = Vec::new();
        for address in output.split_whitespace() {
            addresses.push(SocketAddr::new(address.parse()?, port));
        }
        addresses.sort();
        Ok(addresses)
    }

    /// Returns commands that a user can type to enter the nodes and to run `kubectl`.
    #[must_use]
    pub fn shell_commands(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            text.push_str(&format!("  {:<8} {}\n", node.name, node.shell_command()));
        }
        let kubectl = self.kubectl.shell_command();
        let logs = self.shared.logs.directory().display();
        text + &format!("  kubectl  {kubectl}\n  logs     {logs}\n")
    }
}

/// Starts the control plane and all nodes' container runtimes concurrently.
fn start_parts(shared: &SharedParts) -> Result<(ControlPlane, Vec<Node>)> {
    thread::scope(|scope| {
        let control_plane = scope.spawn(|| ControlPlane::start(shared));
        let hosts = shared.network.hosts.iter().enumerate();
        let nodes = run_concurrently(hosts, |(number, host)| Node::start(shared, number, host));
        let control_plane = control_plane.join().ok().context("a thread panicked")?;
        Ok((control_plane?, nodes?))
    })
}

/// Runs a function on every item, with a separate thread for each. Returns the results in order, or the first
/// error.
pub fn run_concurrently<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    function: impl Fn(I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let function = &function;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for item in items {
            threads.push(scope.spawn(move || function(item)));
        }
        let results = threads.into_iter().map(|thread| thread.join().ok());
        results
            .map(|result| result.context("a thread panicked")?)
            .collect()
    })
}
