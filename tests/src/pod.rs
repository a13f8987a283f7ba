//! Pods: sandboxes with addresses, and servers that run in them.

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
    log,
    pki::Files,
    place::{Place, Process},
    serve::{self, Kind, Listener, Record},
    topology, wait,
};

/// The time limit for a server to listen.
const LISTENING: Duration = Duration::from_secs(10);

/// A pod: a network namespace and a cgroup below the instance's, with one address per family.
#[derive(Debug)]
pub struct Pod {
    name: String,
    place: Place,
    v4: IpAddr,
    v6: IpAddr,
    folder: PathBuf,
    servers: AtomicU32,
}

impl Pod {
    pub(crate) fn new(name: &str, place: Place, number: u8, folder: PathBuf) -> Self {
        let [v4, v6] = topology::addresses(number);
        Self {
            name: name.to_owned(),
            place,
            v4,
            v6,
            folder,
            servers: AtomicU32::new(0),
        }
    }

    /// Returns the name of the pod. Its servers send it in their responses.
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
    pub const fn at4(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.v4, port)
    }

    #[must_use]
    pub const fn at6(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.v6, port)
    }

    /// Starts an HTTP server on `port`, which responds with the pod's name.
    pub fn serve_http(&self, port: u16) -> Result<Server> {
        self.serve(&[Listener::new(Kind::Http, port)])
    }

    /// Starts a TCP server on `port`, which sends received bytes back.
    pub fn serve_echo(&self, port: u16) -> Result<Server> {
        self.serve(&[Listener::new(Kind::Echo, port)])
    }

    /// Starts a server process with several listeners.
    pub fn serve(&self, listeners: &[Listener]) -> Result<Server> {
        self.serve_on(listeners, None)
    }

    /// Starts a server process with several listeners, pinned to one CPU.
    pub fn serve_on(&self, listeners: &[Listener], cpu: Option<u32>) -> Result<Server> {
        let number = self.servers.fetch_add(1, Ordering::Relaxed);
        let stem = self.folder.join(format!("{}-{number}", self.name));
        let options = Options {
            name: &self.name,
            stem: &stem,
            listeners,
            cpu,
            certificate: None,
        };
        Server::start(&self.place, &options)
    }
}

impl Deref for Pod {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

/// A server process in a sandbox; killed on drop.
#[derive(Debug)]
pub struct Server {
    process: Process,
    record: PathBuf,
}

/// The options of a server process.
pub(crate) struct Options<'a> {
    pub(crate) name: &'a str,
    /// The path with which the paths of its files begin.
    pub(crate) stem: &'a Path,
    pub(crate) listeners: &'a [Listener],
    pub(crate) cpu: Option<u32>,
    pub(crate) certificate: Option<&'a Files>,
}

impl Server {
    pub(crate) fn start(place: &Place, options: &Options<'_>) -> Result<Self> {
        let record = options.stem.with_extension("record");
        let mut words = vec!["serve".to_owned()];
        words.extend(options.listeners.iter().map(ToString::to_string));
        let mut command = place
            .lab_command(&words)?
            .option("--name", options.name)
            .option("--record", text(&record)?)
            .log(log::append(&options.stem.with_extension("log"))?);
        if let Some(files) = options.certificate {
            let (cert, key) = (text(&files.cert)?, text(&files.key)?);
            command = command.option("--cert", cert).option("--key", key);
        }
        if let Some(cpu) = options.cpu {
            command = command.cpu(cpu);
        }
        let process = command.start()?;
        let server = Self { process, record };
        let ended = || server.process.ended();
        wait::ready(LISTENING, ended, || server.record().is_ok())
            .with_context(|| format!("server {} isn't ready", options.name))?;
        Ok(server)
    }

    /// Returns the server's record of all requests so far.
    pub fn record(&self) -> Result<Record> {
        serve::read_record(&self.record)
    }

    /// Returns the process of the server.
    #[must_use]
    pub const fn process(&self) -> &Process {
        &self.process
    }
}

/// Converts a path to a command-line argument.
pub fn text(path: &Path) -> Result<String> {
    let text = path
        .to_str()
        .context("a path is not UTF-8")?;
    Ok(text.to_owned())
}
