//! Real Kubernetes on this machine: a cloud node with the control plane, an edge node, and on demand a
//! third. Each is a place of the laboratory in its own zone, connected by a wire.
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
//! Every process is in a control group of the laboratory, and each node has its own mount namespace, so
//! everything ends with the laboratory, however that ends.

pub mod api;
pub mod bare;
pub mod control;
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

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result};
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

/// The time limit of the slowest part of a start, on a busy machine.
const READY: Duration = Duration::from_secs(120);

/// The address of the cluster's DNS.
pub const DNS: &str = "10.96.0.10";

/// The shared parts of a cluster.
#[derive(Debug)]
pub struct Site {
    /// The wire between the nodes, and their hosts.
    pub network: Network,
    pki: Pki,
    /// The programs.
    pub kit: Kit,
    /// The folder of all logs.
    pub logs: Logs,
    /// The laboratory with the folder and the control group.
    pub lab: Lab,
}

impl Site {
    fn new(kit: Kit, logs: Logs, size: Size) -> Result<Self> {
        let lab = Lab::new()?;
        Ok(Self {
            network: Network::new(&lab, &kit, size)?,
            pki: Pki::write(&lab.folder().join("pki"))?,
            kit,
            logs,
            lab,
        })
    }
}

/// A running cluster; it is removed on drop.
#[derive(Debug)]
pub struct Cluster {
    /// The client of the API server.
    pub kubectl: Kubectl,
    /// The nodes; the first one is the cloud's.
    pub nodes: Vec<Node>,
    /// The control plane.
    pub control: Control,
    /// The service proxy.
    pub proxy: Proxy,
    /// The network, the programs and the logs.
    pub site: Site,
}

impl Cluster {
    /// Starts a cluster and waits until its nodes and its DNS are ready.
    pub fn start(kit: Kit, logs: Logs, proxy: Proxy, size: Size) -> Result<Self> {
        let site = Site::new(kit, logs, size)?;
        node::prepare(&site.lab)?;
        let (control, nodes) = start_parts(&site)?;
        let mut cluster = Self {
            kubectl: control.kubectl.clone(),
            nodes,
            control,
            proxy,
            site,
        };
        cluster.join()?;
        Ok(cluster)
    }

    /// Starts the kubelets and the service proxy, and waits until all of them are ready.
    fn join(&mut self) -> Result<()> {
        self.kubectl.apply(&objects::bootstrap())?;
        for node in &mut self.nodes {
            node.start_kubelet(&self.site)?;
            if self.proxy == Proxy::KubeProxy {
                proxy::start_kube_proxy(node, &self.site)?;
            }
        }
        for node in &self.nodes {
            let name = node.name;
            self.kubectl
                .wait_for("node", name, "Ready", READY)
                .with_context(|| format!("{name} doesn't get ready"))?;
        }
        if let Proxy::Culvert(product) = &self.proxy {
            product::deploy(product, &self.kubectl, &self.nodes, self.site.lab.folder())
                .context("the product doesn't get ready")?;
        }
        self.kubectl.rolled_out("kube-system", "deploy/coredns")?;
        let service = &["-n", "default", "get", "serviceaccount", "default"];
        wait::until(READY, || self.kubectl.run(service).is_ok())
            .context("there is no default service account")
    }

    /// Starts a capture of packets to node ports of other nodes.
    pub fn trace(&self) -> Result<Trace> {
        Trace::start(&self.site)
    }

    /// Returns the addresses of a Service, IPv4 first, with a port.
    pub fn service(&self, namespace: &str, name: &str, port: u16) -> Result<Vec<SocketAddr>> {
        let path = "jsonpath={.spec.clusterIPs[*]}";
        let words = ["-n", namespace, "get", "service", name, "-o", path];
        let said = self.kubectl.run(&words)?;
        let mut addresses = Vec::new();
        for address in said.split_whitespace() {
            addresses.push(SocketAddr::new(address.parse()?, port));
        }
        addresses.sort();
        Ok(addresses)
    }

    /// Returns the command lines that enter the nodes from a shell.
    #[must_use]
    pub fn ways_in(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            text.push_str(&format!("  {:<8} {}\n", node.name, node.way_in()));
        }
        let (kubectl, logs) = (self.kubectl.way_in(), self.site.logs.folder().display());
        text + &format!("  kubectl  {kubectl}\n  logs     {logs}\n")
    }
}

/// Starts the control plane and the nodes' runtimes concurrently, since each start is mostly waiting.
fn start_parts(site: &Site) -> Result<(Control, Vec<Node>)> {
    thread::scope(|scope| {
        let control = scope.spawn(|| Control::start(site));
        let hosts = site.network.hosts.iter().enumerate();
        let nodes = at_once(hosts, |(number, host)| Node::start(site, number, host));
        let control = control.join().ok().context("a thread panicked")?;
        Ok((control?, nodes?))
    })
}

/// Runs a function on each item concurrently; returns the first error, if any.
pub fn at_once<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    act: impl Fn(I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let act = &act;
    thread::scope(|scope| {
        let mut acting = Vec::new();
        for item in items {
            acting.push(scope.spawn(move || act(item)));
        }
        let ended = acting.into_iter().map(|thread| thread.join().ok());
        ended.map(|it| it.context("a thread panicked")?).collect()
    })
}
