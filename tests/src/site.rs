//! A cloud node and an edge node with a tunnel between them, and a kubelet-like server on the edge node.

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
    edge::{EDGE, EDGE_V4, EDGE_V6, Edge},
    instance::Settings,
    kubelet::client::Client,
    node::Node,
    pki,
    place::{ANSWER, COMMAND, Place},
    pod::{Pod, Server, text},
    shared::Fixture,
    wait,
};

/// The ports of a kubelet.
pub const KUBELET: [u16; 2] = [10_250, 10_255];
/// A port of the edge node that is steered only if a ConfigMap lists it.
pub const FURTHER: u16 = 9100;

/// The time limit for an agent to connect or reconnect: its attempts are spread over some seconds.
pub const CONNECTED: Duration = Duration::from_secs(30);

/// A cloud node and an edge node. Everything is removed on drop.
#[derive(Debug)]
pub struct Site {
    kubelet: Server,
    tls: Arc<ClientConfig>,
    edge: Edge,
    node: Node,
}

impl Site {
    /// Creates both nodes, with certificates and manifests; doesn't start the daemon and the agent.
    pub fn set(settings: Settings) -> Result<Self> {
        let settings = Settings {
            tunnel: true,
            ..settings
        };
        let node = Node::with(settings)?;
        let edge = Edge::new(node.topology(), node.program().to_owned())?;
        let folder = node.topology().lab().folder().join("ca");
        let ca = |words: &[&str]| issue(node.host(), node.program(), words, &folder);
        identify([&node.identity(), &edge.identity()], ca)?;
        node.apply(Edge::node())?;
        let [secure, plain] = KUBELET;
        let kubelet = edge.serve_kubelet(&[secure, plain, FURTHER])?;
        let tls = pki::trusting(&edge.kubelet_files().ca)?;
        Ok(Self {
            kubelet,
            tls,
            edge,
            node,
        })
    }

    /// Creates both nodes, starts the daemon and the agent, and waits until the kubelet can be reached.
    pub fn new() -> Result<Self> {
        let site = Self::set(Settings::from_environment()?)?;
        site.start()?;
        Ok(site)
    }

    /// Starts the daemon and the agent, and waits until the kubelet can be reached.
    pub fn start(&self) -> Result<()> {
        self.node.start()?;
        self.edge.start_agent(KUBELET)?;
        self.until_served()
    }

    /// Returns the pod that clients run in.
    pub fn pod(&self) -> Result<Arc<Pod>> {
        self.node.pod("client")
    }

    /// Waits until the kubelet responds to clients on the host of the cloud node and in its pod. The
    /// first packet of a new pod may be lost, and is retransmitted only after a second.
    pub fn until_served(&self) -> Result<()> {
        let mut last = None;
        let pod = self.pod()?;
        let ask = || {
            self.ask(self.node.host())?;
            self.ask(&pod)
        };
        wait::until(CONNECTED, || match ask() {
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

    /// Sends a request to the kubelet from a sandbox, over a new connection.
    pub fn ask(&self, place: &Place) -> Result<()> {
        let to = Self::at4(KUBELET[0]);
        self.client(place.connect(to)?, to)?.healthz().map(drop)
    }

    /// Creates a client of the kubelet over a connection to an address of the edge node.
    pub fn client(&self, stream: TcpStream, dialled: SocketAddr) -> Result<Client> {
        stream.set_read_timeout(Some(ANSWER))?;
        let client = Client::over(stream, dialled.ip(), Arc::clone(&self.tls))?;
        client.patience(ANSWER)?;
        Ok(client)
    }

    #[must_use]
    pub const fn at4(port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(EDGE_V4), port)
    }

    #[must_use]
    pub const fn at6(port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V6(EDGE_V6), port)
    }

    #[must_use]
    pub const fn node(&self) -> &Node {
        &self.node
    }

    #[must_use]
    pub const fn edge(&self) -> &Edge {
        &self.edge
    }

    #[must_use]
    pub const fn kubelet(&self) -> &Server {
        &self.kubelet
    }
}

impl Fixture for Site {}

/// The certificate folders of a gateway and of an agent: names, modes and contents of their files.
type Identities = [Vec<(OsString, Permissions, Vec<u8>)>; 2];

/// The certificates that `culvert ca` issued to the first pair of nodes in this process; later ones reuse
/// them.
static IDENTITIES: Mutex<Option<Identities>> = Mutex::new(None);

/// Fills the certificate folders of a gateway and of an agent.
fn identify(folders: [&Path; 2], ca: impl Fn(&[&str]) -> Result<()>) -> Result<()> {
    let mut identities = IDENTITIES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(identities) = &*identities else {
        let [gateway, agent] = folders.map(text);
        ca(&["init"])?;
        ca(&["issue", "gateway", "--out", &gateway?])?;
        ca(&["issue", "agent", "--node", EDGE, "--out", &agent?])?;
        *identities = Some([read(folders[0])?, read(folders[1])?]);
        return Ok(());
    };
    for (folder, files) in folders.iter().zip(identities) {
        fs::create_dir_all(folder)?;
        for (name, permissions, content) in files {
            let path = folder.join(name);
            fs::write(&path, content)?;
            fs::set_permissions(&path, permissions.clone())?;
        }
    }
    Ok(())
}

fn read(folder: &Path) -> Result<Vec<(OsString, Permissions, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let permissions = entry.metadata()?.permissions();
        files.push((entry.file_name(), permissions, fs::read(entry.path())?));
    }
    Ok(files)
}

/// Runs a subcommand of `culvert ca` for the CA in a folder.
fn issue(place: &Place, culvert: &Path, words: &[&str], folder: &Path) -> Result<()> {
    let mut argv = vec![text(culvert)?, "ca".to_owned()];
    argv.extend(words.iter().map(|word| (*word).to_owned()));
    argv.extend(["--dir".to_owned(), text(folder)?]);
    let output = place.command(&argv).start()?.finish(COMMAND)?;
    ensure!(output.exit.is_success(), "`{}` failed: {output:?}", argv.join(" "));
    Ok(())
}
