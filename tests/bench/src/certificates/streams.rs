//! A gateway and many agents, with a stream through each agent that stays open while the agents renew their sessions.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::{io, net::TcpListener, runtime::Runtime};
use tunnel_tests::{
    clock::{Instant, pause},
    pki::{Authority, PemFiles, Validity},
    tunnel_process::{AgentSettings, AgentsSettings, CloudSettings, Target, TunnelProcess},
};
use tunnel_userspace::{
    identity::IdentityFiles,
    tunnel::{SessionLimits, agent, gateway},
};

/// The first address of the steering prefix, and its length.
const PREFIX: (Ipv4Addr, u8) = (Ipv4Addr::new(127, 19, 0, 0), 16);
/// The time for which the first certificates of the agents are still valid: so little of their life that all are renewed at once.
const FIRST_VALIDITY: Validity = Validity::Seconds(3600);
/// The time limit for all agents to connect, and for all of them to renew their sessions.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);
/// The time limit for an echo.
const ECHO_TIMEOUT: Duration = Duration::from_secs(20);
/// The interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The name of the CA that issues the first certificates.
const FIRST_CA: &str = "first";

/// The CA that issues the first certificates, which `culvert ca` would do on a cluster that had no controller yet.
pub(super) struct FirstCa(Authority);

impl FirstCa {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(Authority::new(FIRST_CA)?))
    }

    pub(super) fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes the first certificate of a node's agent.
    pub(super) fn write_certificate(&self, node: &str, files: &IdentityFiles) -> Result<()> {
        let pair = self.0.agent(node, FIRST_VALIDITY)?;
        Ok(fs::write(&files.cert, pair.cert + &pair.key)?)
    }
}

/// The running processes, and the streams.
pub(super) struct Streams {
    cloud: TunnelProcess,
    _agents: TunnelProcess,
    /// Runs the server that echoes what the streams send.
    _server: Runtime,
    open: Vec<TcpStream>,
}

impl Streams {
    /// Starts a gateway and an agent for each node, and opens a stream through each.
    pub(super) fn open(
        ca: &FirstCa,
        trust: &str,
        nodes: Vec<(String, IdentityFiles)>,
        directory: &Path,
    ) -> Result<Self> {
        let (server, at) = serve_echo()?;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let files = PemFiles::in_directory(directory, "gateway");
        files.write(trust, &ca.0.gateway(Validity::Current)?)?;
        let targets = (0..).zip(&nodes).map(|(index, (node, _))| Target {
            index,
            node: node.clone(),
            at,
        });
        let (first, length) = PREFIX;
        let cloud = CloudSettings {
            gateway: gateway::GatewaySettings {
                listen: any,
                ..gateway::GatewaySettings::default()
            },
            ingress: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            prefix: (first.into(), length),
            targets: targets.collect(),
            certificate: (&files).into(),
            manifests: None,
            session: SessionLimits::default(),
            open_files: None,
        };
        let cloud = TunnelProcess::start("cloud", &directory.join("cloud"), &cloud)?;
        let count = nodes.len();
        let agents = nodes.into_iter().map(|(_, certificate)| {
            let agent = agent::AgentSettings {
                allowed_targets: vec![at.to_string()],
                connections_per_gateway: 1,
                ..agent::AgentSettings::default()
            };
            AgentSettings::among_many(agent, certificate)
        });
        let agents = AgentsSettings {
            agents: agents.collect(),
            gateway: cloud.cloud_state()?.gateway,
            delay_millis: 0,
            watch_files: true,
        };
        let agents = TunnelProcess::start("agents", &directory.join("agents"), &agents)?;
        let mut streams = Self {
            cloud,
            _agents: agents,
            _server: server,
            open: Vec::new(),
        };
        streams.wait("connect", count, |_issuer| true)?;
        let port = streams.cloud.cloud_state()?.ingress.port();
        for index in 0..u32::try_from(count)? {
            let address = Ipv4Addr::from(u32::from(first) + 1 + index);
            let stream = TcpStream::connect((address, port))?;
            stream.set_read_timeout(Some(ECHO_TIMEOUT))?;
            stream.set_nodelay(true)?;
            streams.open.push(stream);
        }
        ensure!(streams.count_cut() == 0, "a stream does not even begin");
        Ok(streams)
    }

    /// Waits until each agent has a session with a certificate of another CA.
    pub(super) fn wait_for_renewal(&self) -> Result<()> {
        self.wait("renew their sessions", self.open.len(), |issuer| {
            issuer != FIRST_CA
        })
    }

    /// Waits until `count` nodes have a session with a certificate of a wanted issuer.
    fn wait(&self, what: &str, count: usize, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let nodes = self.cloud.cloud_state()?.nodes;
            let has_session = |node: &&Value| {
                let sessions = node["sessions"].as_array().into_iter().flatten();
                let mut issuers = sessions.filter_map(|it| it["certificateIssuer"].as_str());
                issuers.any(&is_wanted)
            };
            let nodes = nodes.as_array().into_iter().flatten();
            let done = nodes.filter(has_session).count();
            if done >= count {
                return Ok(());
            }
            ensure!(
                start.elapsed() < CONNECT_TIMEOUT,
                "only {done} of {count} agents {what}; the logs: {}",
                self.cloud.log()
            );
            pause(CHECK_INTERVAL);
        }
    }

    /// Sends a byte through each stream, and returns how many do not echo it.
    pub(super) fn count_cut(&mut self) -> usize {
        let echo = |stream: &mut TcpStream| {
            let mut byte = [0];
            stream.write_all(b"!")?;
            stream.read_exact(&mut byte)
        };
        let echoes = self.open.iter_mut().map(echo);
        echoes.filter(Result::is_err).count()
    }
}

/// Starts a server on the loopback interface that echoes what it receives. It stops with its runtime.
fn serve_echo() -> Result<(Runtime, SocketAddr)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_io()
        .build()?;
    let listener = runtime
        .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .context("no server")?;
    let at = listener.local_addr()?;
    runtime.spawn(async move {
        let mut streams = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            streams.spawn(async move {
                let (mut reader, mut writer) = stream.into_split();
                drop(io::copy(&mut reader, &mut writer).await);
            });
        }
    });
    Ok((runtime, at))
}
