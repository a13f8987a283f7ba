//! The ends of a tunnel as processes of their own: gateway with ingress, and agent. They are the
//! product's parts, wired without kernel programs, so they need no rights: an ingress whose prefix
//! lies in 127.0.0.0/8 is reached without a route.

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
    identity::Files,
    tunnel::{Limits, agent, gateway},
};

use crate::{agent::child, environment, log, pki, serve::read_record, wait};

pub mod run;

/// How long an end may take to serve, or to end.
const PATIENCE: Duration = Duration::from_secs(10);

impl From<&pki::Files> for Files {
    fn from(files: &pki::Files) -> Self {
        let pki::Files { ca, cert, key } = files.clone();
        Self { ca, cert, key }
    }
}

/// Where a steering address leads.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Target {
    /// Its number in the prefix.
    pub index: u32,
    pub node: String,
    /// What the node's agent dials.
    pub at: SocketAddr,
}

/// How a gateway with an ingress runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct CloudSettings {
    /// Where agents connect to.
    pub gateway: gateway::Settings,
    /// Where steered connects land.
    pub ingress: SocketAddr,
    /// The steering prefix: its first address and its length.
    pub prefix: (IpAddr, u8),
    /// What its addresses stand for.
    pub targets: Vec<Target>,
    /// The gateway's own certificate.
    pub certificate: Files,
    pub session: Limits,
}

/// How an agent runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct AgentSettings {
    /// What it serves.
    pub agent: agent::Settings,
    pub certificate: Files,
    pub session: Limits,
}

/// What a gateway with an ingress tells of itself.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct CloudRecord {
    /// Where agents connect to.
    pub gateway: SocketAddr,
    /// Where steered connects land.
    pub ingress: SocketAddr,
    /// How often each reason was counted, by its word.
    pub counts: BTreeMap<String, u64>,
    /// The nodes, as the product shows them.
    pub nodes: Value,
    /// Its identity, as the product shows it.
    pub identity: Value,
}

impl CloudRecord {
    fn sessions_of(&self, node: &str) -> impl Iterator<Item = &Value> {
        let nodes = self.nodes.as_array().into_iter().flatten();
        nodes
            .filter(move |it| it["node"] == node)
            .filter_map(|it| it["sessions"].as_array())
            .flatten()
    }

    /// How many sessions of a node there are.
    #[must_use]
    pub fn sessions(&self, node: &str) -> usize {
        self.sessions_of(node).count()
    }

    /// How many streams the sessions of a node carry.
    #[must_use]
    pub fn streams(&self, node: &str) -> u64 {
        let streams = |session: &Value| session["streams"].as_u64();
        self.sessions_of(node).filter_map(streams).sum()
    }

    /// How often a reason was counted.
    #[must_use]
    pub fn count(&self, reason: &str) -> u64 {
        self.counts.get(reason).copied().unwrap_or(0)
    }
}

/// What an agent tells of itself.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct AgentRecord {
    /// As the product shows it.
    pub view: Value,
    /// Its identity, as the product shows it.
    pub identity: Value,
}

/// An end that runs as a process of its own; killed when it is dropped, and when the thread that
/// started it ends.
#[derive(Debug)]
pub struct End {
    process: Child,
    record: PathBuf,
    log: PathBuf,
}

impl End {
    /// Starts one; `role` is `cloud` or `agent`, its files begin with `stem`.
    pub fn start(role: &str, stem: &Path, settings: &impl Serialize) -> Result<Self> {
        let file = |extension| stem.with_extension(extension);
        let (settings_file, record, log) = (file("json"), file("record"), file("log"));
        fs::write(&settings_file, serde_json::to_vec_pretty(settings)?)?;
        // Left by one that was killed.
        drop(fs::remove_file(&record));
        let output = log::append(&log)?;
        let lab = environment::culvert_lab()?;
        let mut command = Command::new(lab);
        child::prepare(&mut command, None)?;
        let process = command
            .args(["end", role, "--settings"])
            .arg(&settings_file)
            .arg("--record")
            .arg(&record)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start an end")?;
        let mut end = Self {
            process,
            record,
            log,
        };
        let ended = || Ok(end.process.try_wait()?);
        wait::ready(PATIENCE, ended, || {
            read_record::<Value>(&end.record).is_ok()
        })
        .with_context(|| format!("{role}; its log ends\n{}", end.log()))?;
        Ok(end)
    }

    pub fn cloud(&self) -> Result<CloudRecord> {
        read_record(&self.record)
    }

    pub fn agent(&self) -> Result<AgentRecord> {
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
            bail!("it has ended: {status}");
        }
        Ok(kill(Pid::from_raw(self.pid()), signal)?)
    }

    /// Ends it by a signal, and waits for its end: the signal that killed it, if one did.
    pub fn end(mut self, signal: Signal) -> Result<Option<i32>> {
        self.signal(signal)?;
        let status = wait::some(PATIENCE, || self.process.try_wait().ok().flatten())?;
        Ok(status.signal())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
