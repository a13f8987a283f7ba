//! Pods, which are sandboxes with addresses, and the servers in them.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Deref,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tunnel_userspace::model::Family;

use crate::{
    log, node_network,
    pki::PemFiles,
    sandbox::{Process, Sandbox},
    server::{self, Listener, Record, ServerKind},
    wait,
};

/// The time limit for a server to start listening.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A pod: a network namespace, a cgroup below the instance's, and one address per family.
#[derive(Debug)]
pub struct Pod {
    name: String,
    sandbox: Sandbox,
    v4: IpAddr,
    v6: IpAddr,
    directory: PathBuf,
    servers: AtomicU32,
}

impl Pod {
    pub(crate) fn new(name: &str, sandbox: Sandbox, number: u8, directory: PathBuf) -> Self {
        let [v4, v6] = node_network::pod_addresses(number);
        Self {
            name: name.to_owned(),
            sandbox,
            v4,
            v6,
            directory,
            servers: AtomicU32::new(0),
        }
    }

    /// Returns the pod's name. Its servers include the name in their responses.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    #[must_use]
    pub const fn v4(&self) -> IpAddr {
        self.v4
    }

    #[must_use]
    pub const fn v6(&self) -> IpAddr {
        self.v6
    }

    #[must_use]
    pub const fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }

    #[must_use]
    pub const fn addr_v4(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.v4, port)
    }

    #[must_use]
    pub const fn addr_v6(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.v6, port)
    }

    /// Starts an HTTP server on `port`. It responds with the pod's name.
    pub fn serve_http(&self, port: u16) -> Result<Server> {
        self.serve(&[Listener::new(ServerKind::Http, port)])
    }

    /// Starts a TCP server on `port`. It echoes the bytes it receives.
    pub fn serve_echo(&self, port: u16) -> Result<Server> {
        self.serve(&[Listener::new(ServerKind::Echo, port)])
    }

    /// Starts a server process with several listeners.
    pub fn serve(&self, listeners: &[Listener]) -> Result<Server> {
        self.serve_on(listeners, None)
    }

    /// Starts a server process with several listeners, pinned to `cpu` if that is given.
    pub fn serve_on(&self, listeners: &[Listener], cpu: Option<u32>) -> Result<Server> {
        let number = self.servers.fetch_add(1, Ordering::Relaxed);
        let stem = self.directory.join(format!("{}-{number}", self.name));
        let options = ServerOptions {
            name: &self.name,
            stem: &stem,
            listeners,
            cpu,
            certificate: None,
        };
        Server::start(&self.sandbox, &options)
    }
}

impl Deref for Pod {
    type Target = Sandbox;

    fn deref(&self) -> &Sandbox {
        &self.sandbox
    }
}

/// A server process in a sandbox. It is killed on drop.
#[derive(Debug)]
pub struct Server {
    process: Process,
    record: PathBuf,
}

/// The options of a server process.
pub(crate) struct ServerOptions<'a> {
    pub(crate) name: &'a str,
    /// The common part of the paths of the server's files, without extensions.
    pub(crate) stem: &'a Path,
    pub(crate) listeners: &'a [Listener],
    pub(crate) cpu: Option<u32>,
    pub(crate) certificate: Option<&'a PemFiles>,
}

impl Server {
    /// Starts a server process in a sandbox that is not a pod, such as one on another node. Its files are in
    /// `directory`.
    pub fn start_in(
        sandbox: &Sandbox,
        directory: &Path,
        name: &str,
        listeners: &[Listener],
        cpu: Option<u32>,
    ) -> Result<Self> {
        let options = ServerOptions {
            name,
            stem: &directory.join(name),
            listeners,
            cpu,
            certificate: None,
        };
        Self::start(sandbox, &options)
    }

    pub(crate) fn start(sandbox: &Sandbox, options: &ServerOptions<'_>) -> Result<Self> {
        let record = options.stem.with_extension("record");
        let mut arguments = vec!["serve".to_owned()];
        arguments.extend(options.listeners.iter().map(ToString::to_string));
        let mut command = sandbox
            .lab_command(&arguments)?
            .option("--name", options.name)
            .option("--record", path_to_string(&record)?)
            .log(log::append(&options.stem.with_extension("log"))?);
        if let Some(files) = options.certificate {
            let (cert, key) = (path_to_string(&files.cert)?, path_to_string(&files.key)?);
            command = command.option("--cert", cert).option("--key", key);
        }
        if let Some(cpu) = options.cpu {
            command = command.cpu(cpu);
        }
        let process = command.start()?;
        let server = Self { process, record };
        let ended = || server.process.try_wait();
        wait::until_ready(START_LIMIT, ended, || server.record().is_ok())
            .with_context(|| format!("server {} isn't ready", options.name))?;
        Ok(server)
    }

    /// Returns the server's record of the requests it has received so far.
    pub fn record(&self) -> Result<Record> {
        server::read_record(&self.record)
    }

    /// Returns the server's process.
    #[must_use]
    pub const fn process(&self) -> &Process {
        &self.process
    }
}

/// Converts a path to a string for use as a command-line argument.
pub fn path_to_string(path: &Path) -> Result<String> {
    let text = path.to_str().context("a path is not UTF-8")?;
    Ok(text.to_owned())
}
