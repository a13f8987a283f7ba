//! Servers that run in pods: their listeners, and the records that they publish.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    io::{self, BufReader},
    net::{Ipv6Addr, SocketAddr, TcpListener},
    os::unix::net::UnixStream,
    path::Path,
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use socket2::{Domain, Socket, Type};
use tokio::{net::TcpStream, task::JoinSet};

use crate::{fake_kubelet::ConnectionRecord, load_scale::LoadScale};

pub mod process;

/// The timeout for reading a record from a server.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The protocol that a server uses on a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ServerKind {
    /// HTTP/1.1: responds to each request with the server's name.
    Http,
    /// TCP: echoes the bytes it receives.
    Echo,
    /// UDP: responds to each datagram with the server's name, a space and the payload.
    Udp,
    /// TCP: accepts connections and closes them at once, as fast as possible.
    Sink,
    /// TCP: answers the first byte of each connection with one byte and closes it, as fast as possible.
    Answer,
    /// TLS: behaves like a kubelet.
    Kubelet,
}

impl ServerKind {
    const ALL: [Self; 6] = [
        Self::Http,
        Self::Echo,
        Self::Udp,
        Self::Sink,
        Self::Answer,
        Self::Kubelet,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Echo => "echo",
            Self::Udp => "udp",
            Self::Sink => "sink",
            Self::Answer => "answer",
            Self::Kubelet => "kubelet",
        }
    }
}

/// A port, or a range of ports, that a server listens on.
///
/// It is written as `udp:53=dns,dns6` for a port that several Services share, or as `udp:2000-2099=svc` for
/// ports with one Service each: port 2000 for `svc-0`, 2001 for `svc-1` and so on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listener {
    kind: ServerKind,
    first: u16,
    last: u16,
    services: Vec<String>,
}

impl Listener {
    /// Creates a listener that serves any Service, so that no request counts as foreign.
    #[must_use]
    pub const fn new(kind: ServerKind, port: u16) -> Self {
        Self {
            kind,
            first: port,
            last: port,
            services: Vec::new(),
        }
    }

    /// Assigns the port to a Service, in addition to any others. Requests for other Services count as
    /// foreign.
    #[must_use]
    pub fn for_service(mut self, service: &str) -> Self {
        self.services.push(service.to_owned());
        self
    }

    /// Creates a listener on `count` consecutive ports, for the Services `<stem>-0`, `<stem>-1` and so on.
    #[must_use]
    pub fn range(kind: ServerKind, first: u16, count: u16, stem: &str) -> Self {
        let last = first.saturating_add(count.saturating_sub(1));
        Self {
            kind,
            first,
            last,
            services: vec![stem.to_owned()],
        }
    }

    fn ports(&self) -> Vec<(u16, Vec<String>)> {
        if self.first == self.last {
            return vec![(self.first, self.services.clone())];
        }
        let numbered = |number: u16| {
            self.services
                .iter()
                .map(|stem| format!("{stem}-{number}"))
                .collect()
        };
        (self.first..=self.last)
            .map(|port| (port, numbered(port - self.first)))
            .collect()
    }
}

impl Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.label(), self.first)?;
        if self.last != self.first {
            write!(f, "-{}", self.last)?;
        }
        if !self.services.is_empty() {
            write!(f, "={}", self.services.join(","))?;
        }
        Ok(())
    }
}

impl FromStr for Listener {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, rest) = text
            .split_once(':')
            .context("expected KIND:PORT[=SERVICE,…]")?;
        let kind = ServerKind::ALL
            .into_iter()
            .find(|it| it.label() == kind)
            .with_context(|| format!("unknown kind of listener `{kind}`"))?;
        let (ports, services) = rest.split_once('=').unwrap_or((rest, ""));
        let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
        let (first, last) = (first.parse()?, last.parse()?);
        if last < first {
            bail!("the range of ports {ports} is empty");
        }
        let services = services
            .split(',')
            .filter(|name| !name.is_empty())
            .map(str::to_owned);
        Ok(Self {
            kind,
            first,
            last,
            services: services.collect(),
        })
    }
}

/// The numbers of connections and requests on one of a server's ports.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Counts {
    pub accepted: u64,
    /// The number of requests (datagrams, for UDP) that were answered.
    pub answered: u64,
    /// The number of requests (datagrams, for UDP) that were meant for a Service to which the port isn't
    /// assigned.
    pub foreign: u64,
}

/// A server's record, with the counts for each port under a key such as `http:8080`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record {
    pub name: String,
    pub ports: BTreeMap<String, Counts>,
    /// The records of all connections to `kubelet` ports, in order of arrival.
    pub exchanges: Vec<ConnectionRecord>,
}

impl Record {
    /// Returns the sum of the counts for all ports.
    #[must_use]
    pub fn total(&self) -> Counts {
        self.ports
            .values()
            .fold(Counts::default(), |sum, it| Counts {
                accepted: sum.accepted + it.accepted,
                answered: sum.answered + it.answered,
                foreign: sum.foreign + it.foreign,
            })
    }
}

/// Reads the record that a process publishes on a Unix socket. The process sends it over each new connection.
pub(crate) fn read_record<T: DeserializeOwned>(socket: &Path) -> Result<T> {
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(LoadScale::from_environment().timeout(TIMEOUT)))?;
    serde_json::from_reader(BufReader::new(stream))
        .with_context(|| format!("cannot read a record from {}", socket.display()))
}

/// The counts for a port, and the Services that the port is assigned to.
#[derive(Debug)]
struct Port {
    counts: Mutex<Counts>,
    services: Vec<String>,
}

impl Port {
    fn of(services: Vec<String>) -> Arc<Self> {
        let counts = Mutex::default();
        Arc::new(Self { counts, services })
    }

    fn count_accepted(&self) {
        self.lock_counts().accepted += 1;
    }

    /// Counts an answered request, and also counts it as foreign if it was meant for another Service.
    fn count_request(&self, intended_service: Option<&[u8]>) {
        let is_foreign = intended_service.is_some_and(|name| {
            !self.services.is_empty() && !self.services.iter().any(|own| own.as_bytes() == name)
        });
        let mut counts = self.lock_counts();
        counts.answered += 1;
        counts.foreign += u64::from(is_foreign);
    }

    fn lock_counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The wildcard address, for dual-stack sockets.
const ANY: Ipv6Addr = Ipv6Addr::UNSPECIFIED;

/// The accept backlog.
const BACKLOG: i32 = 4096;

/// Listens on a port at all IPv4 and IPv6 addresses.
pub(crate) fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((ANY, port)).into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Accepts connections forever, and serves each one in a separate task.
pub(crate) async fn accept<F>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
) -> io::Result<()>
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                connections.spawn(serve(stream));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_parsed_as_it_is_formatted() {
        for text in ["http:8080", "udp:53=dns,dns6", "udp:2000-2099=svc"] {
            assert_eq!(text.parse::<Listener>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn ports_of_a_range_belong_to_one_service_each() {
        let ports = Listener::range(ServerKind::Udp, 2000, 3, "svc").ports();

        assert_eq!(ports[2], (2002, vec!["svc-2".to_owned()]));
        assert_eq!(ports.len(), 3);
    }
}
