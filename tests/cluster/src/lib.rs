//! Real Kubernetes on this machine: a cloud node with the control plane, an edge node, and on demand a
//! third, each a place of the laboratory and in a zone of its own, with a wire between them.
//!
//! ```text
//! node-a  cloud, control plane   172.30.0.1  fd00:30:0::1   pods 10.244.0.0/24 fd00:244:0::/64
//!    │ up0
//!  wire   router between them    .254        ::fe           `Network::set_outbound_only`
//!    │ up0 of each
//! node-b  edge                   172.30.1.1  fd00:30:1::1   pods 10.244.1.0/24 fd00:244:1::/64
//! node-c  cloud, `Size::Three`   172.30.2.1  fd00:30:2::1   pods 10.244.2.0/24 fd00:244:2::/64
//! ```
//!
//! Every process is in a control group of the laboratory, and a node has a mount namespace of its
//! own, so all of it ends with the laboratory, whatever ends that.

pub mod api;
pub mod bare;
mod control;
mod control_groups;
pub mod ginkgo;
pub mod kit;
pub mod kubectl;
pub mod logs;
pub mod network;
pub mod node;
mod objects;
mod pki;
pub mod product;
pub mod proxy;
pub mod trace;

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use tunnel_tests::{lab::Lab, wait};

use self::{
    control::Control,
    kit::Kit,
    kubectl::Kubectl,
    logs::Logs,
    network::{Network, Size},
    node::Node,
    pki::Pki,
    proxy::Proxy,
    trace::Trace,
};

/// How long the slowest part of a start may take on a busy machine.
const READY: Duration = Duration::from_secs(120);

/// The address of the cluster's DNS.
pub const DNS: &str = "10.96.0.10";

/// What the parts of a cluster share while they start.
struct Site<'a> {
    lab: &'a Lab,
    kit: &'a Kit,
    logs: &'a Logs,
    pki: &'a Pki,
}

/// A cluster that is up. All of it goes when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    kubectl: Kubectl,
    nodes: Vec<Node>,
    control: Control,
    network: Network,
    logs: Logs,
    proxy: Proxy,
    kit: Kit,
    lab: Lab,
}

impl Cluster {
    /// Starts a cluster and waits until its nodes and its DNS are ready.
    ///
    /// # Errors
    ///
    /// Without the rights of root, or when a part of it doesn't get ready.
    pub fn start(kit: Kit, logs: Logs, proxy: Proxy, size: Size) -> Result<Self> {
        let lab = Lab::new()?;
        node::prepare(&lab)?;
        let network = Network::new(&lab, &kit, size)?;
        let pki = Pki::write(&lab.folder().join("pki"))?;
        let site = Site {
            lab: &lab,
            kit: &kit,
            logs: &logs,
            pki: &pki,
        };
        let (control, nodes) = start_parts(&site, &network)?;
        let kubectl = control.kubectl().clone();
        let mut cluster = Self {
            kubectl,
            nodes,
            control,
            network,
            logs,
            proxy,
            kit,
            lab,
        };
        cluster.join(&pki)?;
        Ok(cluster)
    }

    /// Has kubelets join, starts what serves Services, and waits for all of it.
    fn join(&mut self, pki: &Pki) -> Result<()> {
        self.kubectl.apply(&objects::bootstrap())?;
        let site = Site {
            lab: &self.lab,
            kit: &self.kit,
            logs: &self.logs,
            pki,
        };
        for node in &mut self.nodes {
            node.start_kubelet(&site)?;
            if self.proxy == Proxy::KubeProxy {
                proxy::start_kube_proxy(node, &site)?;
            }
        }
        for node in &self.nodes {
            let name = node.name();
            self.kubectl
                .wait_for("node", name, "Ready", READY)
                .with_context(|| format!("{name} doesn't get ready"))?;
        }
        if let Proxy::Culvert(product) = &self.proxy {
            product::deploy(product, &self.kubectl, &self.nodes, self.lab.folder())
                .context("the product doesn't get ready")?;
        }
        self.kubectl.rolled_out("kube-system", "deploy/coredns")?;
        let service = &["-n", "default", "get", "serviceaccount", "default"];
        wait::until(READY, || self.kubectl.run(service).is_ok())
            .context("there is no default service account")
    }

    /// Asks the API server.
    #[must_use]
    pub const fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// Captures what asks for node ports from other nodes.
    ///
    /// # Errors
    ///
    /// When tcpdump doesn't begin.
    pub fn trace(&self) -> Result<Trace> {
        Trace::start(self.network.router(), &self.kit, &self.logs)
    }

    /// Kills the API server.
    ///
    /// # Errors
    ///
    /// When it doesn't run.
    pub fn stop_api_server(&self) -> Result<()> {
        self.control.stop_api_server()
    }

    /// Starts the API server again, and waits until it answers.
    ///
    /// # Errors
    ///
    /// When it doesn't.
    pub fn start_api_server(&self) -> Result<()> {
        self.control.start_api_server()
    }

    /// The nodes, the cloud's first.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of this name.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn node(&self, name: &str) -> Result<&Node> {
        let mut nodes = self.nodes.iter();
        nodes
            .find(|node| node.name() == name)
            .with_context(|| format!("there is no {name}"))
    }

    /// The wire between the nodes.
    #[must_use]
    pub const fn network(&self) -> &Network {
        &self.network
    }

    /// What serves Services.
    #[must_use]
    pub const fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Where every part writes what it says.
    #[must_use]
    pub const fn logs(&self) -> &Logs {
        &self.logs
    }

    /// The programs.
    #[must_use]
    pub const fn kit(&self) -> &Kit {
        &self.kit
    }

    /// A folder that goes with the cluster.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.lab.folder()
    }

    /// The addresses of a Service, IPv4 first, with a port.
    ///
    /// # Errors
    ///
    /// When there is no such Service.
    pub fn service(&self, namespace: &str, name: &str, port: u16) -> Result<Vec<SocketAddr>> {
        let path = "jsonpath={.spec.clusterIPs[*]}";
        let said = self
            .kubectl
            .run(&["-n", namespace, "get", "service", name, "-o", path])?;
        let mut addresses = said
            .split_whitespace()
            .map(|address| Ok(SocketAddr::new(address.parse::<IpAddr>()?, port)))
            .collect::<Result<Vec<_>>>()?;
        addresses.sort();
        Ok(addresses)
    }

    /// How to get into the nodes from a shell.
    #[must_use]
    pub fn ways_in(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            text.push_str(&format!("  {:<8} {}\n", node.name(), node.way_in()));
        }
        text.push_str(&format!("  kubectl  {}\n", self.kubectl.way_in()));
        text.push_str(&format!("  logs     {}\n", self.logs.folder().display()));
        text
    }
}

/// The control plane and the nodes' runtimes at the same time: each waits for its own.
fn start_parts(site: &Site<'_>, network: &Network) -> Result<(Control, Vec<Node>)> {
    thread::scope(|scope| {
        let control = scope.spawn(|| Control::start(site, network.cloud()));
        let mut starting = Vec::new();
        for (number, host) in network.hosts().iter().enumerate() {
            let host = host.clone();
            starting.push(scope.spawn(move || Node::start(site, number, host)));
        }
        let mut nodes = Vec::new();
        for node in starting {
            nodes.push(node.join().unwrap_or_else(|_| Err(panicked()))?);
        }
        let control = control.join().unwrap_or_else(|_| Err(panicked()))?;
        Ok((control, nodes))
    })
}

fn panicked() -> anyhow::Error {
    anyhow!("a thread of the start panicked")
}
