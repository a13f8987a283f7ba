//! Starts a cluster that has only etcd, an API server and the hosts of two nodes, without kubelets. This is
//! enough for programs that only watch the API server.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use tunnel_tests::sandbox::Sandbox;

use super::{
    SharedParts,
    api_client::ApiClient,
    components::Components,
    control_plane::ControlPlane,
    logs::Logs,
    network::{self, NODES, Size},
};

/// A running API server and two hosts. All of them are removed on drop.
#[derive(Debug)]
pub struct MinimalCluster {
    /// Held because dropping it stops the API server.
    _control_plane: ControlPlane,
    /// The parts that the hosts share, such as the network, the programs and the logs.
    pub shared: SharedParts,
}

/// A host on which a service proxy runs.
#[derive(Clone, Debug)]
pub struct Host {
    /// The name of the host's Node object.
    pub name: &'static str,
    /// The network namespace and cgroup for processes that run on the host.
    pub sandbox: Sandbox,
    /// The cgroup that contains all of the host's processes.
    pub cgroup: PathBuf,
    /// The host's IPv4 address.
    pub address: String,
}

impl MinimalCluster {
    /// Starts etcd and the API server, and waits until the API server is ready.
    pub fn start(components: Components, logs: Logs) -> Result<Self> {
        let shared = SharedParts::new(components, logs, Size::Two)?;
        Ok(Self {
            _control_plane: ControlPlane::start_api(&shared)?,
            shared,
        })
    }

    /// Returns a host by its number.
    pub fn host(&self, number: usize) -> Result<Host> {
        let hosts = &self.shared.network.hosts;
        let sandbox = hosts
            .get(number)
            .with_context(|| format!("there is no host {number}, only {}", hosts.len()))?;
        let (name, group) = NODES[number];
        let [address, _] = network::addresses(number);
        Ok(Host {
            name,
            sandbox: sandbox.clone(),
            cgroup: self.shared.lab.cgroup().join(group),
            address,
        })
    }

    /// Connects to the API server as the administrator.
    pub fn api(&self) -> Result<ApiClient> {
        let [address, _] = network::addresses(0);
        let server = SocketAddr::new(address.parse()?, 6443);
        ApiClient::connect(self.shared.network.cloud(), server, &self.shared.pki)
    }

    /// Returns the path of a new kubeconfig for the kubelet of a node.
    pub fn kubelet_kubeconfig(&self, node: &str) -> Result<String> {
        let user = format!("system:node:{node}");
        self.shared.pki.write_user(node, &user, "system:nodes")?;
        Ok(self.shared.pki.file(&format!("{node}.kubeconfig")))
    }

    /// Returns the path of the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        self.shared.pki.file("admin.kubeconfig")
    }
}
