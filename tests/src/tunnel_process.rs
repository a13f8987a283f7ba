//! Processes for both sides of a tunnel: a gateway with an ingress, and agents. They run Culvert's own
//! modules but no kernel programs. They need no privileges, since a steering prefix within 127.0.0.0/8 needs
//! no route.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tunnel_userspace::{
    identity::IdentityFiles,
    tunnel::{SessionLimits, agent, gateway},
};

use crate::{environment, executor::child, log, pki, server::read_record, wait};

pub mod roles;
mod slow_link;

/// The time limit for a process to become ready, and for one to exit.
const TIME_LIMIT: Duration = Duration::from_secs(10);

impl From<&pki::PemFiles> for IdentityFiles {
    fn from(files: &pki::PemFiles) -> Self {
        let pki::PemFiles { ca, cert, key } = files.clone();
        Self { ca, cert, key }
    }
}

/// A node and an address to which connections to a steering address lead.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Target {
    /// The index of the steering address within the steering prefix.
    pub index: u32,
    pub node: String,
    /// The address that the node's agent dials.
    pub at: SocketAddr,
}

/// The settings for a gateway with an ingress.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct CloudSettings {
    /// The settings of the gateway itself.
    pub gateway: gateway::GatewaySettings,
    /// The address on which the ingress listens for steered connections.
    pub ingress: SocketAddr,
    /// The steering prefix: its first address, and its length.
    pub prefix: (IpAddr, u8),
    /// The targets that the steering addresses lead to.
    pub targets: Vec<Target>,
    /// The gateway's certificate files.
    pub certificate: IdentityFiles,
    pub session: SessionLimits,
    /// The directory with the manifests of Nodes; `None` if the gateway reads no Nodes.
    pub manifests: Option<PathBuf>,
    /// The process's limit on open files; `None` keeps the limit of the test.
    pub open_files: Option<u64>,
}

/// The settings for an agent.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct AgentSettings {
    /// The settings of the agent itself.
    pub agent: agent::AgentSettings,
    pub certificate: IdentityFiles,
    pub session: SessionLimits,
    /// The process's limit on open files; `None` keeps the limit of the test.
    pub open_files: Option<u64>,
    /// The clock of the agent's machine.
    #[serde(default)]
    pub clock: MachineClock,
}

impl AgentSettings {
    /// Returns the settings of an agent that shares the threads of its process with many others.
    #[must_use]
    pub fn among_many(agent: agent::AgentSettings, certificate: IdentityFiles) -> Self {
        Self {
            agent,
            certificate,
            session: SessionLimits {
                max_threads: 0,
                ..SessionLimits::default()
            },
            open_files: None,
            clock: MachineClock::default(),
        }
    }
}

/// A machine's clock.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct MachineClock {
    /// The number of seconds by which the clock is ahead of the true time.
    pub ahead: i64,
    /// The directory in which the last time is written down.
    pub directory: Option<PathBuf>,
}

/// The settings for many agents in one process.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct AgentsSettings {
    pub agents: Vec<AgentSettings>,
    /// The gateway. Each agent's own setting is ignored.
    pub gateway: SocketAddr,
    /// The time that bytes take between the agents and the gateway, in each direction, in milliseconds.
    pub delay_millis: u64,
    /// True if the agents read their certificates again when the files change.
    pub watch_files: bool,
}

/// The state of many agents in one process.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct AgentsState {
    /// The number of agents that are connected to the gateway.
    pub connected: usize,
}

/// The state of a gateway with an ingress, which its process publishes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct CloudState {
    /// The gateway's address, to which agents connect.
    pub gateway: SocketAddr,
    /// The address on which the ingress listens for steered connections.
    pub ingress: SocketAddr,
    /// The number of times each reason has occurred, by the reason's label.
    pub counts: BTreeMap<String, u64>,
    /// The nodes and their sessions, in the format of Culvert's `/nodes`.
    pub nodes: Value,
    /// The state of the certificate, in Culvert's own format.
    pub identity: Value,
    /// The state of the deny list, in Culvert's own format.
    pub deny_list: Value,
}

impl CloudState {
    fn sessions_of(&self, node: &str) -> impl Iterator<Item = &Value> {
        let nodes = self.nodes.as_array().into_iter().flatten();
        nodes
            .filter(move |it| it["node"] == node)
            .filter_map(|it| it["sessions"].as_array())
            .flatten()
    }

    /// Returns how many sessions a node has.
    #[must_use]
    pub fn sessions(&self, node: &str) -> usize {
        self.sessions_of(node).count()
    }

    /// Returns how many streams are open in all sessions of a node.
    #[must_use]
    pub fn streams(&self, node: &str) -> u64 {
        let streams = |session: &Value| session["streams"].as_u64();
        self.sessions_of(node).filter_map(streams).sum()
    }

    /// Returns how many times a reason has occurred.
    #[must_use]
    pub fn count(&self, reason: &str) -> u64 {
        self.counts.get(reason).copied().unwrap_or(0)
    }
}

/// The state of an agent, which its process publishes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct AgentState {
    /// The agent's state, in the format of Culvert's `/status`.
    pub view: Value,
    /// The state of the certificate, in Culvert's own format.
    pub identity: Value,
}

/// A running gateway with an ingress, or a running agent. The process is killed on drop, and also when the
/// thread that started it exits.
#[derive(Debug)]
pub struct TunnelProcess {
    process: Child,
    record: PathBuf,
    log: PathBuf,
}

impl TunnelProcess {
    /// Starts a process whose role is `cloud`, `agent` or `agents`. The paths of its files are `stem` plus an
    /// extension.
    pub fn start(role: &str, stem: &Path, settings: &impl Serialize) -> Result<Self> {
        let file = |extension| stem.with_extension(extension);
        let (settings_file, record, log) = (file("json"), file("record"), file("log"));
        fs::write(&settings_file, serde_json::to_vec_pretty(settings)?)?;
        // A process that was killed may have left its socket behind.
        drop(fs::remove_file(&record));
        let output = log::append(&log)?;
        let lab = environment::culvert_lab()?;
        let mut command = Command::new(lab);
        child::add_pre_exec_steps(&mut command, None)?;
        let process = command
            .args(["tunnel", role, "--settings"])
            .arg(&settings_file)
            .arg("--record")
            .arg(&record)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start culvert-lab")?;
        let mut started = Self {
            process,
            record,
            log,
        };
        let ended = || Ok(started.process.try_wait()?);
        wait::until_ready(TIME_LIMIT, ended, || {
            read_record::<Value>(&started.record).is_ok()
        })
        .with_context(|| format!("{role} isn't ready; the end of its log:\n{}", started.log()))?;
        Ok(started)
    }

    pub fn cloud_state(&self) -> Result<CloudState> {
        read_record(&self.record)
    }

    pub fn agents_state(&self) -> Result<AgentsState> {
        read_record(&self.record)
    }

    pub fn agent_state(&self) -> Result<AgentState> {
        read_record(&self.record)
    }

    #[must_use]
    pub fn log(&self) -> String {
        log::read(&self.log)
    }

    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap_or(0)
    }

    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.process.try_wait()? {
            bail!("the process has already ended: {status}");
        }
        Ok(kill(Pid::from_raw(self.pid()), signal)?)
    }

    /// Sends a signal to the process, and waits until the process exits. Returns the signal that killed it,
    /// if any.
    pub fn stop(mut self, signal: Signal) -> Result<Option<i32>> {
        self.signal(signal)?;
        let status = wait::until_some(TIME_LIMIT, || self.process.try_wait().ok().flatten())?;
        Ok(status.signal())
    }
}

impl Drop for TunnelProcess {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
