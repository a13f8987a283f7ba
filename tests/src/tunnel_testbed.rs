//! A cloud node and an edge node that are connected by a tunnel, with a kubelet-like server on the edge node.

use std::{
    ffi::OsString,
    fs::{self, Permissions},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustls::ClientConfig;

use crate::{
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_NAME, EDGE_V4, EDGE_V6, EdgeNode},
    fake_kubelet::client::Client,
    node::Node,
    pki,
    pod::{Pod, Server, path_to_string},
    sandbox::{COMMAND_TIMEOUT, RESPONSE_TIMEOUT, Sandbox},
    shared_fixture::Fixture,
    wait,
};

/// The ports of a kubelet.
pub const KUBELET_PORTS: [u16; 2] = [10_250, 10_255];
/// A port on the edge node that is steered only while a ConfigMap lists it.
pub const FURTHER_PORT: u16 = 9100;

/// The time limit for an agent to connect or reconnect. Its attempts are spread out over several seconds.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// A cloud node and an edge node. Everything is removed on drop.
#[derive(Debug)]
pub struct TunnelTestbed {
    kubelet: Server,
    tls: Arc<ClientConfig>,
    edge: EdgeNode,
    node: Node,
}

impl TunnelTestbed {
    /// Creates both nodes, including certificates and manifests, but starts neither the daemon nor the agent.
    pub fn prepare(settings: InstanceSettings) -> Result<Self> {
        let settings = InstanceSettings {
            tunnel: true,
            ..settings
        };
        let node = Node::with_settings(settings)?;
        let edge = EdgeNode::new(node.network(), node.program().to_owned())?;
        let directory = node.network().lab().directory().join("ca");
        let ca = |arguments: &[&str]| run_ca(node.host(), node.program(), arguments, &directory);
        issue_certificates([&node.identity_directory(), &edge.identity_directory()], ca)?;
        node.apply(EdgeNode::node())?;
        let [secure, plain] = KUBELET_PORTS;
        let kubelet = edge.serve_kubelet(&[secure, plain, FURTHER_PORT])?;
        let tls = pki::client_config(&edge.kubelet_files().ca)?;
        Ok(Self {
            kubelet,
            tls,
            edge,
            node,
        })
    }

    /// Creates both nodes, starts the daemon and the agent, and waits until the kubelet is reachable.
    pub fn new() -> Result<Self> {
        let testbed = Self::prepare(InstanceSettings::from_environment()?)?;
        testbed.start()?;
        Ok(testbed)
    }

    /// Starts the daemon and the agent, and waits until the kubelet is reachable.
    pub fn start(&self) -> Result<()> {
        self.node.start()?;
        self.edge.start_agent(KUBELET_PORTS)?;
        self.wait_for_kubelet()
    }

    /// Returns the cloud node's pod in which clients run.
    pub fn pod(&self) -> Result<Arc<Pod>> {
        self.node.pod("client")
    }

    /// Waits until the kubelet responds to clients on the cloud node's host and in its pod. A new pod's first
    /// packet may be lost, and is then retransmitted only after a second.
    pub fn wait_for_kubelet(&self) -> Result<()> {
        let mut last = None;
        let pod = self.pod()?;
        let ask = || {
            self.request_healthz(self.node.host())?;
            self.request_healthz(&pod)
        };
        wait::until(CONNECT_LIMIT, || match ask() {
            Ok(()) => true,
            Err(error) => {
                last = Some(error);
                false
            }
        })
        .with_context(|| {
            let (node, edge) = (self.node.logs(), self.edge.agent().logs());
            format!("the kubelet doesn't respond: {last:?}\n{node}\n{edge}")
        })
    }

    /// Sends a health check request to the kubelet from a sandbox, over a new connection.
    pub fn request_healthz(&self, sandbox: &Sandbox) -> Result<()> {
        let to = Self::addr_v4(KUBELET_PORTS[0]);
        self.client(sandbox.connect(to)?, to)?.healthz().map(drop)
    }

    /// Creates a kubelet client that uses a connection to one of the edge node's addresses.
    pub fn client(&self, stream: TcpStream, dialled: SocketAddr) -> Result<Client> {
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        let client = Client::handshake(stream, dialled.ip(), Arc::clone(&self.tls))?;
        client.set_timeout(RESPONSE_TIMEOUT)?;
        Ok(client)
    }

    #[must_use]
    pub const fn addr_v4(port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(EDGE_V4), port)
    }

    #[must_use]
    pub const fn addr_v6(port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V6(EDGE_V6), port)
    }

    #[must_use]
    pub const fn node(&self) -> &Node {
        &self.node
    }

    #[must_use]
    pub const fn edge(&self) -> &EdgeNode {
        &self.edge
    }

    #[must_use]
    pub const fn kubelet(&self) -> &Server {
        &self.kubelet
    }
}

impl Fixture for TunnelTestbed {}

/// The certificate directories of a gateway and of an agent, with the name, mode and contents of each file.
type Identities = [Vec<(OsString, Permissions, Vec<u8>)>; 2];

/// The certificates that `culvert ca` issued for the first pair of nodes in this process. Later pairs reuse
/// them.
static IDENTITIES: Mutex<Option<Identities>> = Mutex::new(None);

/// Writes certificates to the directories of a gateway and of an agent.
fn issue_certificates(directories: [&Path; 2], ca: impl Fn(&[&str]) -> Result<()>) -> Result<()> {
    let mut identities = IDENTITIES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(identities) = &*identities else {
        let [gateway, agent] = directories.map(path_to_string);
        ca(&["init"])?;
        ca(&["issue", "gateway", "--out", &gateway?])?;
        ca(&["issue", "agent", "--node", EDGE_NAME, "--out", &agent?])?;
        *identities = Some([
            read_directory(directories[0])?,
            read_directory(directories[1])?,
        ]);
        return Ok(());
    };
    for (directory, files) in directories.iter().zip(identities) {
        fs::create_dir_all(directory)?;
        for (name, permissions, content) in files {
            let path = directory.join(name);
            fs::write(&path, content)?;
            fs::set_permissions(&path, permissions.clone())?;
        }
    }
    Ok(())
}

fn read_directory(directory: &Path) -> Result<Vec<(OsString, Permissions, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let permissions = entry.metadata()?.permissions();
        files.push((entry.file_name(), permissions, fs::read(entry.path())?));
    }
    Ok(files)
}

/// Runs a `culvert ca` subcommand on the CA in `directory`.
fn run_ca(sandbox: &Sandbox, culvert: &Path, arguments: &[&str], directory: &Path) -> Result<()> {
    let mut argv = vec![path_to_string(culvert)?, "ca".to_owned()];
    argv.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    argv.extend(["--dir".to_owned(), path_to_string(directory)?]);
    let output = sandbox.command(&argv).start()?.finish(COMMAND_TIMEOUT)?;
    ensure!(
        output.exit.is_success(),
        "`{}` failed: {output:?}",
        argv.join(" ")
    );
    Ok(())
}
