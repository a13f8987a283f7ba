//! An edge node: it can dial the cloud, but nodes in the cloud can't dial it.
//!
//! ```text
//! host 192.0.2.1 ──uplink── outside ──edge── eth0 198.51.100.2 edge
//!      2001:db8::1                           2001:db8:51::2    10.20.0.7, fd00:20::7
//! ```
//!
//! The sandbox `outside` forwards packets between the host and the edge node. Its only route to the edge node
//! is to the node's link address, which stands in for a remote site's NAT address. The addresses in the edge
//! node's Node object are unreachable from the cloud, so a connection that isn't steered fails at once.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use anyhow::Result;

use crate::{
    daemon::Daemon,
    manifest::NodeObject,
    node_network::{HOST_V4, NodeNetwork},
    pki::{Authority, PemFiles},
    pod::{Server, ServerOptions, path_to_string},
    sandbox::Sandbox,
    server::{Listener, ServerKind},
};

/// The edge node's name.
pub const EDGE_NAME: &str = "edge-7";
/// The edge node's IPv4 address, as listed in its Node object.
pub const EDGE_V4: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 7);
/// The edge node's IPv6 address, as listed in its Node object.
pub const EDGE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 7);

/// The gateway's default port.
const GATEWAY_PORT: u16 = 10_262;

/// The address ranges that contain the edge nodes' addresses. They are unreachable from the cloud.
const EDGE_RANGES: [&str; 2] = ["10.20.0.0/24", "fd00:20::/64"];

/// The edge node's IPv4 address on its link, which stands in for a remote site's NAT address.
pub const LINK_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

/// The IPv4 and IPv6 addresses on the link. Each pair consists of the address of the sandbox `outside` and
/// the edge node's address.
const LINK_ADDRESSES: [[&str; 2]; 2] = [
    ["198.51.100.1", "198.51.100.2"],
    ["2001:db8:51::1", "2001:db8:51::2"],
];

/// The priority of the routing rules that cut the link by dropping all packets on it, in both directions.
const CUT_PRIORITY: u32 = 5;

/// An edge node. Its agent is killed on drop.
#[derive(Debug)]
pub struct EdgeNode {
    agent: Daemon,
    sandbox: Sandbox,
    outside: Sandbox,
    directory: PathBuf,
    culvert: PathBuf,
}

impl EdgeNode {
    /// Creates an edge node and connects it to a cloud node's network.
    pub fn new(network: &NodeNetwork, culvert: PathBuf) -> Result<Self> {
        let sandbox = network.create_unconnected(EDGE_NAME)?;
        connect_link(network, &sandbox)?;
        let directory = network.lab().directory().join(EDGE_NAME);
        fs::create_dir_all(&directory)?;
        Ok(Self {
            agent: Daemon::new(directory.join("culvert.log")),
            sandbox,
            outside: network.outside().clone(),
            directory,
            culvert,
        })
    }

    /// Returns the edge node's sandbox, which consists of its network namespace and its cgroup.
    #[must_use]
    pub const fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Builds the edge node's Node object, with the label that marks edge nodes.
    #[must_use]
    pub fn node() -> NodeObject {
        NodeObject::new(EDGE_NAME, [EDGE_V4.into(), EDGE_V6.into()]).edge()
    }

    /// Returns the directory that contains the agent's certificate, laid out as by `culvert ca issue`.
    #[must_use]
    pub fn identity_directory(&self) -> PathBuf {
        self.directory.join("identity")
    }

    /// Returns the paths of the kubelet's certificate files, which [`EdgeNode::serve_kubelet`] creates.
    #[must_use]
    pub fn kubelet_files(&self) -> PemFiles {
        PemFiles::in_directory(&self.directory, "kubelet")
    }

    /// Starts a kubelet-like server on the edge node. Its certificate is valid for the addresses in the Node
    /// object, and is issued by a separate CA.
    pub fn serve_kubelet(&self, ports: &[u16]) -> Result<Server> {
        let files = self.kubelet_files();
        let authority = Authority::new("kubelets")?;
        let addresses = [IpAddr::from(EDGE_V4), IpAddr::from(EDGE_V6)];
        files.write(
            &authority.pem(),
            &authority.server(&format!("system:node:{EDGE_NAME}"), &addresses)?,
        )?;
        let listener = |port: &u16| Listener::new(ServerKind::Kubelet, *port);
        let options = ServerOptions {
            name: EDGE_NAME,
            stem: &self.directory.join("kubelet"),
            listeners: &ports.iter().map(listener).collect::<Vec<_>>(),
            cpu: None,
            certificate: Some(&files),
        };
        Server::start(&self.sandbox, &options)
    }

    /// Starts `culvert agent`, which reads its certificate from [`EdgeNode::identity_directory`]. It may dial
    /// the given ports on the edge node.
    pub fn start_agent(&self, ports: [u16; 2]) -> Result<()> {
        let (config, state) = (
            self.directory.join("culvert.yaml"),
            self.directory.join("state"),
        );
        fs::create_dir_all(&state)?;
        let content = format!(
            "nodeName: {EDGE_NAME}\n\
             stateDir: {state}\n\
             tunnel:\n\
             \x20 agent:\n\
             \x20   gateways: [\"{HOST_V4}:{GATEWAY_PORT}\"]\n\
             \x20   allowedTargets: {allow:?}\n\
             {end}",
            state = state.display(),
            allow = ports.map(|port| format!("self:{port}")),
            end = identity_and_session_config(&self.identity_directory()),
        );
        fs::write(&config, content)?;
        let [culvert, config] = [path_to_string(&self.culvert)?, path_to_string(&config)?];
        let argv = [culvert, "agent".to_owned(), "--config".to_owned(), config];
        self.agent.start(&self.sandbox, &argv)
    }

    #[must_use]
    pub const fn agent(&self) -> &Daemon {
        &self.agent
    }

    /// Cuts the link, so that packets in both directions are silently dropped.
    pub fn cut_link(&self) -> Result<()> {
        self.change_drop_rules("add")
    }

    /// Restores the link.
    pub fn restore_link(&self) -> Result<()> {
        self.change_drop_rules("del")
    }

    fn change_drop_rules(&self, action: &str) -> Result<()> {
        for (family, [_, edge]) in ["-4", "-6"].iter().zip(LINK_ADDRESSES) {
            for packets in ["iif edge", &format!("to {edge}")] {
                let command =
                    format!("ip {family} rule {action} pref {CUT_PRIORITY} {packets} blackhole");
                self.outside.run(&command.split(' ').collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }
}

/// Formats the config sections that gateways and agents share: the paths of the certificate files, and the
/// session timers.
pub(crate) fn identity_and_session_config(identity: &Path) -> String {
    let PemFiles { ca, cert, key } = PemFiles::issued(identity);
    format!(
        "\x20 identity: {{ files: {{ ca: {ca}, cert: {cert}, key: {key} }} }}\n\
         \x20 session: {{ pingInterval: 1s, pingTimeout: 2s, drainTimeout: 1s }}\n",
        ca = ca.display(),
        cert = cert.display(),
        key = key.display(),
    )
}

fn connect_link(network: &NodeNetwork, edge: &Sandbox) -> Result<()> {
    let outside = network.outside();
    for forwarding in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
        outside.sysctl(forwarding, "1")?;
    }
    let [edges4, edges6] = EDGE_RANGES;
    network.host().ip(&format!(
        "route add unreachable {edges4}\nroute add unreachable {edges6}\n"
    ))?;
    let [[near4, far4], [near6, far6]] = LINK_ADDRESSES;
    let pid = edge.pid();
    outside.ip(&format!(
        "route add unreachable {edges4}\n\
             route add unreachable {edges6}\n\
             link add edge type veth peer name eth0 netns {pid}\n\
             link set edge up\n\
             addr add {near4}/24 dev edge\n\
             addr add {near6}/64 dev edge nodad\n"
    ))?;
    edge.ip(&format!(
        "link set lo up\n\
             link set eth0 up\n\
             addr add {far4}/24 dev eth0\n\
             addr add {far6}/64 dev eth0 nodad\n\
             addr add {EDGE_V4}/32 dev eth0\n\
             addr add {EDGE_V6}/128 dev eth0 nodad\n\
             route add default via {near4} src {far4}\n\
             route add default via {near6} src {far6}\n"
    ))
}
