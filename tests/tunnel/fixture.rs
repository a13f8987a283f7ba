//! The fixture for these tests: a tunnel over loopback, and helper functions for its clients.

mod clients;
mod memory_limit;

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tunnel_common::{addr::Address, steering::Prefix};
use tunnel_tests::{
    manifest::{Manifest, NodeObject},
    pki::{Authority, CertifiedKey, PemFiles, Validity},
    tunnel_process::{
        AgentSettings, CloudSettings, CloudState, MachineClock, Target, TunnelProcess,
    },
    wait,
};
use tunnel_userspace::tunnel::{SessionLimits, agent, gateway};

pub(crate) use self::{
    clients::{
        dial, echo, expect_fast_echoes, expect_refused, expect_reset, fill_buffers, until_unchanged,
    },
    memory_limit::MEMORY_LIMIT,
};
use crate::targets::{Behaviour, Server};

/// The time limit for a reply, and for effects that don't depend on a timeout.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// The time limit for reconnecting. An agent waits a few seconds between attempts.
pub(crate) const RECONNECT_LIMIT: Duration = Duration::from_secs(20);

/// The steering prefix. It needs no route, because all of 127.0.0.0/8 is local.
const PREFIX: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(127, 19, 0, 0)), 16);

/// The gateway's limit on concurrent handshakes, and the timeout for each of them.
pub(crate) const HANDSHAKES: usize = 16;
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout for an agent's connection attempt to a target.
const DIAL_TIMEOUT: Duration = Duration::from_secs(3);

/// The gateway's deny list, and the directory with the manifests of Nodes.
const DENY_FILE: &str = "deny";
const MANIFESTS: &str = "manifests";

const ANY_LOOPBACK_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// A test's settings for its tunnel.
pub(crate) struct TunnelSettings {
    /// The nodes, each with the targets that clients may dial on it.
    pub(crate) nodes: Vec<(&'static str, Vec<SocketAddr>)>,
    /// The allow-list for every agent. If it is `None`, each agent allows the targets on its own node.
    pub(crate) allow: Option<Vec<SocketAddr>>,
    /// The gateway's limit on concurrent handshakes.
    pub(crate) handshakes: usize,
    /// The timeout for each of them.
    pub(crate) handshake_timeout: Duration,
    /// The time after which the gateway ends the sessions of a node without a Node object; `None` if the gateway
    /// reads no Nodes.
    pub(crate) missing_node_timeout: Option<Duration>,
    /// The limits for sessions on the gateway.
    pub(crate) gateway_limits: SessionLimits,
    /// The limits for sessions on the agents.
    pub(crate) agent_limits: SessionLimits,
    /// The limits on open files of the gateway's process and of the agents' processes.
    pub(crate) open_files: [Option<u64>; 2],
    /// The number of seconds by which the agents' clocks are ahead of the true time.
    pub(crate) agents_ahead: i64,
}

impl TunnelSettings {
    /// Returns settings with a single node, named `a`, that has the given targets.
    pub(crate) fn of(targets: &[SocketAddr]) -> Self {
        Self::nodes(vec![("a", targets.to_vec())])
    }

    pub(crate) fn nodes(nodes: Vec<(&'static str, Vec<SocketAddr>)>) -> Self {
        let limits = SessionLimits {
            ping_interval: Duration::from_secs(1),
            // A busy machine may leave a process without CPU time for seconds.
            ping_timeout: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(1),
            ..SessionLimits::default()
        };
        Self {
            nodes,
            allow: None,
            handshakes: HANDSHAKES,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            missing_node_timeout: None,
            agent_limits: limits.clone(),
            gateway_limits: limits,
            open_files: [None; 2],
            agents_ahead: 0,
        }
    }

    /// Starts the tunnel with one agent for each node, and waits until all agents are connected.
    pub(crate) fn start(self) -> Result<Tunnel> {
        let mut tunnel = self.without_agents()?;
        for (node, _) in tunnel.settings.nodes.clone() {
            tunnel.start_agent(node)?;
        }
        Ok(tunnel)
    }

    /// Starts only the gateway and the ingress.
    pub(crate) fn without_agents(self) -> Result<Tunnel> {
        let directory = tempfile::tempdir()?;
        let authority = Authority::new("tunnel")?;
        let files = PemFiles::in_directory(directory.path(), "gateway");
        files.write(&authority.pem(), &authority.gateway(Validity::Current)?)?;
        let all = self.nodes.iter();
        let all = all.flat_map(|(node, targets)| targets.iter().map(|at| (*node, *at)));
        let targets = (0..).zip(all).map(|(index, (node, at))| Target {
            index,
            node: node.to_owned(),
            at,
        });
        let deny_file = directory.path().join(DENY_FILE);
        fs::write(&deny_file, "")?;
        let manifests = directory.path().join(MANIFESTS);
        fs::create_dir(&manifests)?;
        for (node, _) in &self.nodes {
            let Manifest { file, text } = NodeObject::new(node, []).edge().into();
            fs::write(manifests.join(file), text)?;
        }
        let mut cloud_settings = CloudSettings {
            gateway: gateway::GatewaySettings {
                listen: ANY_LOOPBACK_PORT,
                max_sessions: 1000,
                max_pending_handshakes: self.handshakes,
                handshake_timeout: self.handshake_timeout,
                deny_file: Some(deny_file),
                missing_node_timeout: self.missing_node_timeout.unwrap_or_default(),
            },
            manifests: self.missing_node_timeout.map(|_| manifests),
            ingress: ANY_PORT,
            prefix: PREFIX,
            targets: targets.collect(),
            certificate: (&files).into(),
            session: self.gateway_limits.clone(),
            open_files: self.open_files[0],
        };
        let cloud =
            TunnelProcess::start("cloud", &directory.path().join("cloud"), &cloud_settings)?;
        let record = cloud.cloud_state()?;
        // If a test restarts the cloud end, the new process uses the same ports.
        cloud_settings.gateway.listen = record.gateway;
        cloud_settings.ingress =
            SocketAddr::new(cloud_settings.ingress.ip(), record.ingress.port());
        Ok(Tunnel {
            agents: Vec::new(),
            cloud: Some(cloud),
            cloud_settings,
            authority,
            settings: self,
            directory,
        })
    }
}

/// A tunnel. Dropping it kills all of its processes.
pub(crate) struct Tunnel {
    agents: Vec<(String, TunnelProcess)>,
    cloud: Option<TunnelProcess>,
    cloud_settings: CloudSettings,
    authority: Authority,
    settings: TunnelSettings,
    directory: TempDir,
}

impl Tunnel {
    pub(crate) const fn authority(&self) -> &Authority {
        &self.authority
    }

    pub(crate) const fn gateway(&self) -> SocketAddr {
        self.cloud_settings.gateway.listen
    }

    /// Makes agents that are started from now on connect to another gateway.
    pub(crate) const fn set_gateway(&mut self, gateway: SocketAddr) {
        self.cloud_settings.gateway.listen = gateway;
    }

    /// Returns the paths of the certificate files for the gateway, or for a node's agent.
    pub(crate) fn files(&self, stem: &str) -> PemFiles {
        PemFiles::in_directory(self.directory.path(), stem)
    }

    /// Writes the last time that the agents' machines remember.
    pub(crate) fn remember_time(&self, time: Timestamp) -> Result<()> {
        Ok(fs::write(
            self.directory.path().join("last-time"),
            time.to_string(),
        )?)
    }

    /// Replaces the gateway's deny list, without waiting until it is in effect.
    pub(crate) fn deny(&self, list: &str) -> Result<()> {
        Ok(fs::write(self.directory.path().join(DENY_FILE), list)?)
    }

    /// Returns the path of a node's manifest.
    fn manifest(&self, node: &str) -> PathBuf {
        let file = format!("{node}.yaml");
        self.directory.path().join(MANIFESTS).join(file)
    }

    /// Creates a node's Node object for the gateway.
    pub(crate) fn create_node(&self, node: &str) -> Result<()> {
        let Manifest { text, .. } = NodeObject::new(node, []).edge().into();
        Ok(fs::write(self.manifest(node), text)?)
    }

    /// Deletes a node's Node object.
    pub(crate) fn delete_node(&self, node: &str) -> Result<()> {
        Ok(fs::remove_file(self.manifest(node))?)
    }

    /// Starts a node's agent, and waits until it is connected.
    pub(crate) fn start_agent(&mut self, node: &str) -> Result<()> {
        let pair = self.authority.agent(node, Validity::Current)?;
        self.launch_agent(node, &pair)?;
        self.until_connected(node)
    }

    /// Starts an agent with the given certificate and an allow-list for the given node.
    pub(crate) fn launch_agent(&mut self, node: &str, pair: &CertifiedKey) -> Result<()> {
        let stem = format!("agent-{node}");
        let files = self.files(&stem);
        files.write(&self.authority.pem(), pair)?;
        let own = self.settings.nodes.iter();
        let own = own.filter(|(name, _)| *name == node);
        let own: Vec<_> = own.flat_map(|(_, targets)| targets.clone()).collect();
        let allow = self.settings.allow.clone().unwrap_or(own);
        let settings = AgentSettings {
            agent: agent::AgentSettings {
                gateways: vec![self.gateway().to_string()],
                allowed_targets: allow.iter().map(ToString::to_string).collect(),
                dial_timeout: DIAL_TIMEOUT,
                ..agent::AgentSettings::default()
            },
            certificate: (&files).into(),
            session: self.settings.agent_limits.clone(),
            open_files: self.settings.open_files[1],
            clock: MachineClock {
                ahead: self.settings.agents_ahead,
                directory: Some(self.directory.path().to_owned()),
            },
        };
        let agent = TunnelProcess::start("agent", &self.directory.path().join(stem), &settings)?;
        self.agents.push((node.to_owned(), agent));
        Ok(())
    }

    /// Waits until a node's agent has all of its sessions.
    pub(crate) fn until_connected(&self, node: &str) -> Result<()> {
        let connected = || self.record().is_ok_and(|record| record.sessions(node) == 2);
        wait::until(RECONNECT_LIMIT, connected).with_context(|| {
            let record = self.record();
            format!(
                "the agent of {node} does not have its two sessions: {record:?}\n{}",
                self.logs()
            )
        })
    }

    /// Waits until a node has no sessions.
    pub(crate) fn until_disconnected(&self, node: &str) -> Result<()> {
        let gone = || self.record().is_ok_and(|record| record.sessions(node) == 0);
        wait::until(ANSWER, gone).context("the agent is still connected")
    }

    /// Returns the logs of all agents and of the cloud end.
    pub(crate) fn logs(&self) -> String {
        let ends = self.agents.iter().map(|(_, agent)| agent);
        ends.chain(&self.cloud).map(TunnelProcess::log).collect()
    }

    pub(crate) fn cloud(&self) -> Result<&TunnelProcess> {
        self.cloud.as_ref().context("the cloud end was killed")
    }

    /// Returns the process of a node's agent.
    pub(crate) fn agent(&mut self, node: &str) -> Result<&mut TunnelProcess> {
        let mut agents = self.agents.iter_mut();
        let found = agents.find_map(|(name, agent)| (name == node).then_some(agent));
        found.with_context(|| format!("no agent of {node} runs"))
    }

    pub(crate) fn kill_agent(&mut self, node: &str) -> Result<()> {
        let at = self.agents.iter().position(|(name, _)| name == node);
        let (_, agent) = self
            .agents
            .remove(at.with_context(|| format!("no agent of {node} runs"))?);
        agent.stop(Signal::SIGKILL).map(drop)
    }

    pub(crate) fn kill_cloud(&mut self) -> Result<()> {
        let cloud = self
            .cloud
            .take()
            .context("the cloud end was killed already")?;
        cloud.stop(Signal::SIGKILL).map(drop)
    }

    /// Sends SIGTERM to the cloud end, and waits until it has exited.
    pub(crate) fn terminate_cloud(&mut self) -> Result<()> {
        let cloud = self.cloud.take().context("the cloud end was killed")?;
        cloud.stop(Signal::SIGTERM).map(drop)
    }

    /// Restarts the cloud end on the same ports.
    pub(crate) fn start_cloud(&mut self) -> Result<()> {
        let stem = self.directory.path().join("cloud");
        self.cloud = Some(TunnelProcess::start("cloud", &stem, &self.cloud_settings)?);
        Ok(())
    }

    /// Returns the state that the cloud end reports.
    pub(crate) fn record(&self) -> Result<CloudState> {
        self.cloud()?.cloud_state()
    }

    /// Returns the value of `lastError` for a node in the gateway's status.
    pub(crate) fn last_error(&self, node: &str) -> Result<String> {
        let nodes = self.record()?.nodes;
        let mut nodes = nodes.as_array().into_iter().flatten();
        let node = nodes
            .find(|it| it["node"] == node)
            .context("the gateway's status lacks the node")?;
        Ok(node["lastError"].as_str().unwrap_or_default().to_owned())
    }

    pub(crate) fn count(&self, reason: &str) -> Result<u64> {
        Ok(self.record()?.count(reason))
    }

    /// Waits until the counter for a reason is greater than 0 in a node's agent.
    pub(crate) fn until_agent_counted(&mut self, node: &str, reason: &str) -> Result<()> {
        let agent = self.agent(node)?;
        let counts = || {
            agent
                .agent_state()
                .map(|record| record.view["counts"].clone())
        };
        let counted = || counts().is_ok_and(|counts| counts[reason].as_u64() > Some(0));
        wait::until(ANSWER, counted).with_context(|| format!("{reason}: {:?}", counts()))
    }

    /// Waits until the cloud end's counter for a reason has exactly the given value.
    pub(crate) fn until_counted(&self, reason: &str, count: u64) -> Result<()> {
        let counted = || self.count(reason).is_ok_and(|now| now == count);
        wait::until(ANSWER, counted).with_context(|| {
            let counts = self.record().map(|record| record.counts);
            format!(
                "{reason} isn't counted {count} times: {counts:?}\n{}",
                self.logs()
            )
        })
    }

    /// Returns the steering address with the given index, combined with the ingress port.
    pub(crate) fn steering_address(&self, index: u32) -> Result<SocketAddr> {
        let (address, length) = PREFIX;
        let prefix = Prefix::new(Address::from_ip(address), length)
            .context("PREFIX is not a steering prefix")?;
        let address = prefix
            .address(index)
            .context("the prefix has no such index")?;
        Ok(SocketAddr::new(
            address.to_ip(),
            self.cloud_settings.ingress.port(),
        ))
    }

    /// Returns the steering address for a target.
    pub(crate) fn steering_address_of(&self, target: SocketAddr) -> Result<SocketAddr> {
        let mut targets = self.cloud_settings.targets.iter();
        let target = targets
            .find(|it| it.at == target)
            .context("the tunnel has no such target")?;
        self.steering_address(target.index)
    }

    /// Connects to a target through the tunnel.
    pub(crate) fn connect(&self, target: SocketAddr) -> Result<TcpStream> {
        dial(self.steering_address_of(target)?).context("connect")
    }

    /// Returns the ingress port.
    pub(crate) const fn ingress(&self) -> u16 {
        self.cloud_settings.ingress.port()
    }
}

/// Starts a tunnel to an echo server and to the other given targets. Returns the server, the tunnel, and a
/// client connection to the server.
pub(crate) fn start_echo_tunnel(others: &[SocketAddr]) -> Result<(Server, Tunnel, TcpStream)> {
    let server = Server::start(Behaviour::Echo)?;
    let tunnel = TunnelSettings::of(&[&[server.at()], others].concat()).start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    Ok((server, tunnel, live))
}
