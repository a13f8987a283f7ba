//! An edge node: it can dial the cloud, and the cloud can't dial it.
//!
//! ```text
//! host 192.0.2.1 ──uplink── outside ──edge── eth0 198.51.100.2 edge
//!      2001:db8::1                           2001:db8:51::2    10.20.0.7, fd00:20::7
//! ```
//!
//! Outside forwards between the two, and knows the edge by its address on the link only, as the
//! cloud knows a site by the address of its NAT. The addresses of the Node lead nowhere in the
//! cloud: a connect to one of them that isn't steered fails at once.

use std::{
    fs::{self, OpenOptions},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use crate::{
    manifest::objects::NodeObject,
    pki::{Authority, Files},
    place::{Place, Process},
    pod::{Options, Server, text},
    serve::{Kind, Listener},
    topology::{HOST_V4, Topology},
};

/// The name of the edge node.
pub const EDGE: &str = "edge-7";
/// Its address, as its Node has it.
pub const EDGE_V4: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 7);
/// Its address, as its Node has it.
pub const EDGE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x20, 0, 0, 0, 0, 0, 7);

/// Where a gateway listens by default.
pub const GATEWAY: u16 = 10_262;

/// The addresses of edge nodes, which lead nowhere in the cloud.
const EDGES: [&str; 2] = ["10.20.0.0/24", "fd00:20::/64"];

/// The address of the edge on its link, as the cloud knows a site by the address of its NAT.
pub const LINK_V4: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

/// Outside and the edge on the link between them.
const LINK: [[&str; 2]; 2] = [
    ["198.51.100.1", "198.51.100.2"],
    ["2001:db8:51::1", "2001:db8:51::2"],
];

/// The rules that cut the link, both ways and without a word.
const CUT: u32 = 5;

/// How long an agent may take to end after SIGTERM or SIGKILL.
const STOP: Duration = Duration::from_secs(10);

/// An edge node. Its agent is killed when it is dropped.
#[derive(Debug)]
pub struct Edge {
    agent: Mutex<Option<Process>>,
    place: Place,
    outside: Place,
    folder: PathBuf,
    culvert: PathBuf,
    servers: AtomicU32,
}

/// How an agent is told to run.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// The gateways.
    pub gateways: Vec<SocketAddr>,
    /// What it may dial.
    pub allow: Vec<String>,
    /// How often a sign of life is asked for, and how long it may take, as the config writes it.
    pub ping: [&'static str; 2],
}

impl Default for AgentSettings {
    fn default() -> Self {
        Self {
            gateways: vec![(HOST_V4, GATEWAY).into()],
            allow: vec!["self:10250".to_owned(), "self:10255".to_owned()],
            ping: ["1s", "2s"],
        }
    }
}

impl Edge {
    /// Joins an edge node to a node's network.
    pub fn new(topology: &Topology, culvert: PathBuf) -> Result<Self> {
        let place = topology.elsewhere(EDGE)?;
        join(topology, &place)?;
        let folder = topology.lab().folder().join(EDGE);
        fs::create_dir_all(&folder)?;
        Ok(Self {
            agent: Mutex::default(),
            place,
            outside: topology.outside().clone(),
            folder,
            culvert,
            servers: AtomicU32::new(0),
        })
    }

    /// The edge node's network namespace and cgroup.
    #[must_use]
    pub const fn place(&self) -> &Place {
        &self.place
    }

    /// Its Node, labelled as an edge node.
    #[must_use]
    pub fn node() -> NodeObject {
        NodeObject::edge(EDGE, [IpAddr::from(EDGE_V4), IpAddr::from(EDGE_V6)])
    }

    /// Where the agent's certificate is expected, as `culvert ca issue` writes it.
    #[must_use]
    pub fn identity(&self) -> PathBuf {
        self.folder.join("identity")
    }

    /// The certificate of the kubelet, once one was served.
    #[must_use]
    pub fn kubelet_files(&self) -> Files {
        Files::of(&self.folder, "kubelet")
    }

    /// The authority that the kubelet's certificate comes from, once one was served.
    #[must_use]
    pub fn kubelet_ca(&self) -> PathBuf {
        Files::of(&self.folder, "kubelet").ca
    }

    /// Starts a kubelet-like server on ports of the edge, with a certificate of an authority of its
    /// own for the addresses of the Node.
    pub fn serve_kubelet(&self, ports: &[u16]) -> Result<Server> {
        let files = self.kubelet_files();
        let authority = Authority::new("kubelets")?;
        let addresses = [IpAddr::from(EDGE_V4), IpAddr::from(EDGE_V6)];
        files.write(
            &authority.pem(),
            &authority.server(&format!("system:node:{EDGE}"), &addresses)?,
        )?;
        let listener = |port: &u16| Listener::new(Kind::Kubelet, *port);
        let listeners: Vec<_> = ports.iter().map(listener).collect();
        self.start_server(&listeners, None, Some(&files))
    }

    /// Starts any other servers on the edge.
    pub fn serve(&self, listeners: &[Listener], cpu: Option<u32>) -> Result<Server> {
        self.start_server(listeners, cpu, None)
    }

    fn start_server(
        &self,
        listeners: &[Listener],
        cpu: Option<u32>,
        certificate: Option<&Files>,
    ) -> Result<Server> {
        let number = self.servers.fetch_add(1, Ordering::Relaxed);
        let options = Options {
            name: EDGE,
            stem: &self.folder.join(format!("server-{number}")),
            listeners,
            cpu,
            certificate,
        };
        Server::start(&self.place, &options)
    }

    fn config(&self, settings: &AgentSettings) -> Result<String> {
        let AgentSettings {
            gateways,
            allow,
            ping: [every, within],
        } = settings;
        let Files { ca, cert, key } = Files::issued(&self.identity());
        Ok(format!(
            "nodeName: {EDGE}\n\
             stateDir: {state}\n\
             tunnel:\n\
             \x20 agent:\n\
             \x20   gateways: {gateways:?}\n\
             \x20   allow: {allow:?}\n\
             \x20 identity: {{ files: {{ ca: {ca}, cert: {cert}, key: {key} }} }}\n\
             \x20 session: {{ pingEvery: {every}, pingTimeout: {within}, drain: 1s }}\n",
            state = self.folder.join("state").display(),
            gateways = gateways.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ca = text(&ca)?,
            cert = text(&cert)?,
            key = text(&key)?,
        ))
    }

    /// Starts `culvert agent`; its certificate lies in [`Edge::identity`].
    pub fn start_agent(&self, settings: &AgentSettings) -> Result<()> {
        let config = self.folder.join("culvert.yaml");
        fs::create_dir_all(self.folder.join("state"))?;
        fs::write(&config, self.config(settings)?)?;
        let [culvert, config] = [text(&self.culvert)?, text(&config)?];
        let words = [culvert, "agent".to_owned(), "--config".to_owned(), config];
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.join("culvert.log"))?;
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(agent.is_none(), "the agent runs already");
        *agent = Some(self.place.command(&words).log(log).start()?);
        Ok(())
    }

    /// What all agents here logged.
    #[must_use]
    pub fn logs(&self) -> String {
        let bytes = fs::read(self.folder.join("culvert.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The number of the agent's process, while it runs.
    #[must_use]
    pub fn agent_pid(&self) -> Option<i32> {
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        agent.as_ref().map(Process::pid)
    }

    /// Sends the agent a signal.
    pub fn signal_agent(&self, signal: Signal) -> Result<()> {
        let agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        agent.as_ref().context("no agent runs")?.signal(signal)
    }

    /// Ends the agent, with SIGTERM or SIGKILL.
    pub fn end_agent(&self, signal: Signal) -> Result<()> {
        self.signal_agent(signal)?;
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        let agent = agent.take().context("no agent runs")?;
        agent.wait(STOP).map(drop)
    }

    /// Cuts the link: whatever is sent, either way, is lost without a word.
    pub fn cut(&self) -> Result<()> {
        self.rules("add")
    }

    /// Brings the link back.
    pub fn mend(&self) -> Result<()> {
        self.rules("del")
    }

    fn rules(&self, act: &str) -> Result<()> {
        let pref = CUT.to_string();
        for (family, [_, edge]) in ["-4", "-6"].iter().zip(LINK) {
            for which in [["iif", "edge"], ["to", edge]] {
                let [key, value] = which;
                let words = [
                    "ip",
                    family,
                    "rule",
                    act,
                    "pref",
                    &pref,
                    key,
                    value,
                    "blackhole",
                ];
                self.outside.run(&words)?;
            }
        }
        Ok(())
    }
}

fn join(topology: &Topology, edge: &Place) -> Result<()> {
    let outside = topology.outside();
    for forwarding in ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"] {
        outside.sysctl(forwarding, "1")?;
    }
    let [edges4, edges6] = EDGES;
    topology.host().ip(&format!(
        "route add unreachable {edges4}\nroute add unreachable {edges6}\n"
    ))?;
    let [[near4, far4], [near6, far6]] = LINK;
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
