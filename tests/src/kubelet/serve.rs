//! The kubelet-like server.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use rustls::{ClientConfig, ServerConfig};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    runtime::{Builder, Runtime},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{Exchange, FIRST, Summing, pattern};
use crate::{
    http::{header, next_head},
    pki::{self, Authority, Files},
    serve,
};

/// The size of a read or write.
const CHUNK: usize = 64 * 1024;

/// The records of a server's connections, in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<Exchange>>>);

impl Journal {
    #[must_use]
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.with(|exchanges| exchanges.clone())
    }

    fn with<T>(&self, act: impl FnOnce(&mut Vec<Exchange>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn open(&self, peer: SocketAddr) -> Line {
        let place = self.with(|exchanges| {
            exchanges.push(Exchange {
                peer,
                steps: Vec::new(),
                over: false,
            });
            exchanges.len() - 1
        });
        Line {
            journal: self.clone(),
            place,
        }
    }
}

/// Writes the record of one connection.
struct Line {
    journal: Journal,
    place: usize,
}

impl Line {
    fn note(&self, step: impl Into<String>) {
        self.journal
            .with(|exchanges| exchanges[self.place].steps.push(step.into()));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.journal
            .with(|exchanges| exchanges[self.place].over = true);
    }
}

/// Serves a connection until it ends, and records its events.
async fn converse(stream: TcpStream, tls: TlsAcceptor, journal: Journal) {
    let Ok(peer) = stream.peer_addr() else { return };
    let line = journal.open(peer);
    if let Err(error) = stream.set_nodelay(true) {
        return line.note(format!("failed: {error}"));
    }
    let stream = match tls.accept(stream).await {
        Ok(stream) => stream,
        Err(error) => return line.note(format!("no handshake: {error}")),
    };
    let mut talk = Talk {
        stream,
        line,
        buffer: Vec::new(),
    };
    let end = match talk.serve().await {
        Ok(()) => "closed".to_owned(),
        Err(error) => format!("failed: {error}"),
    };
    talk.line.note(end);
}

struct Talk {
    stream: TlsStream<TcpStream>,
    line: Line,
    /// Bytes that were read and not processed yet.
    buffer: Vec<u8>,
}

impl Talk {
    async fn serve(&mut self) -> io::Result<()> {
        while let Some(head) = next_head(&mut self.stream, &mut self.buffer).await? {
            let request = head.lines().next().unwrap_or_default();
            let mut words = request.split(' ');
            let method = words.next().unwrap_or_default();
            let path = words.next().unwrap_or_default();
            self.line.note(format!("{method} {path}"));
            let length = header(&head, "content-length").and_then(|it| it.parse().ok());
            match (method, path) {
                ("GET", "/healthz") => self.answer("200 OK", b"ok").await?,
                ("GET", "/upgrade") => return self.upgrade().await,
                ("GET", "/reset") => return self.reset(),
                ("GET", "/stall") => std::future::pending().await,
                ("POST", "/sum") => {
                    let sum = self.read(Some(length.unwrap_or(0)), false).await?.sum();
                    self.line.note(format!("read {sum}"));
                    self.answer("200 OK", sum.to_string().as_bytes()).await?;
                }
                ("POST", "/echo") => self.echo(length.unwrap_or(0)).await?,
                ("POST", "/until-end") => return self.until_end().await,
                ("GET", path) => match path.strip_prefix("/bytes/").map(str::parse) {
                    Some(Ok(length)) => self.bytes(length).await?,
                    Some(Err(_)) | None => self.answer("404 Not Found", b"").await?,
                },
                _ => self.answer("404 Not Found", b"").await?,
            }
        }
        self.stream.shutdown().await
    }

    async fn answer(&mut self, status: &str, body: &[u8]) -> io::Result<()> {
        let head = head(status, super::count(body.len()));
        self.stream
            .write_all(&[head.as_bytes(), body].concat())
            .await
    }

    async fn bytes(&mut self, length: u64) -> io::Result<()> {
        self.stream
            .write_all(head("200 OK", length).as_bytes())
            .await?;
        let pattern = pattern();
        let mut left = length;
        while left > 0 {
            let part = usize::try_from(left).map_or(pattern.len(), |left| left.min(pattern.len()));
            self.stream.write_all(&pattern[..part]).await?;
            left -= super::count(part);
        }
        self.line.note(format!("sent {length}"));
        Ok(())
    }

    /// Reads a body of this length or, without a length, until the client's half-close. Echoes it if
    /// `sends_back` is set.
    async fn read(&mut self, length: Option<u64>, sends_back: bool) -> io::Result<Summing> {
        let mut summing = Summing::default();
        let most = length.unwrap_or(u64::MAX);
        while summing.bytes() < most {
            if self.buffer.is_empty() {
                self.buffer.reserve(CHUNK);
                self.stream.read_buf(&mut self.buffer).await?;
            }
            let left = usize::try_from(most - summing.bytes()).unwrap_or(usize::MAX);
            let part: Vec<u8> = self.buffer.drain(..left.min(self.buffer.len())).collect();
            if part.is_empty() && length.is_none() {
                break;
            }
            if part.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            summing.add(&part);
            if sends_back {
                self.stream.write_all(&part).await?;
            }
        }
        Ok(summing)
    }

    async fn echo(&mut self, length: u64) -> io::Result<()> {
        self.stream
            .write_all(head("200 OK", length).as_bytes())
            .await?;
        self.read(Some(length), true).await?;
        self.line.note(format!("echoed {length}"));
        Ok(())
    }

    async fn upgrade(&mut self) -> io::Result<()> {
        let head =
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: lab\r\n\r\n";
        self.stream.write_all(&[head, FIRST].concat()).await?;
        self.line.note("upgraded");
        let echoed = self.read(None, true).await?.bytes();
        self.line.note(format!("echoed {echoed}"));
        self.stream.shutdown().await
    }

    async fn until_end(&mut self) -> io::Result<()> {
        let sum = self.read(None, false).await?.sum();
        self.line.note(format!("the client ended its half: {sum}"));
        self.answer("200 OK", sum.to_string().as_bytes()).await?;
        self.stream.shutdown().await
    }

    fn reset(&self) -> io::Result<()> {
        self.line.note("reset");
        SockRef::from(self.stream.get_ref().0).set_linger(Some(Duration::ZERO))
    }
}

/// Formats the head of a response with a body of this length.
fn head(status: &str, length: u64) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n")
}

/// Accepts and serves connections for ever.
pub async fn accept(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    journal: Journal,
) -> io::Result<()> {
    let tls = TlsAcceptor::from(tls);
    let converse = |stream| converse(stream, tls.clone(), journal.clone());
    serve::accept(listener, converse).await
}

/// A server on a thread of this process; it stops on drop.
#[derive(Debug)]
pub struct Kubelet {
    address: SocketAddr,
    journal: Journal,
    _runtime: Runtime,
}

impl Kubelet {
    /// Starts a server on a port of 127.0.0.1, with a certificate for a name and an address. Also returns
    /// a client config that trusts its CA.
    pub fn start(name: &str, address: IpAddr) -> Result<(Self, Arc<ClientConfig>)> {
        let folder = tempfile::tempdir()?;
        let authority = Authority::new("kubelets")?;
        let files = Files::of(folder.path(), "kubelet");
        files.write(&authority.pem(), &authority.server(name, &[address])?)?;

        let listener = TcpListener::bind("127.0.0.1:0")?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let (address, journal) = (listener.local_addr()?, Journal::default());
        runtime.spawn(accept(listener, files.server()?, journal.clone()));
        let kubelet = Self {
            address,
            journal,
            _runtime: runtime,
        };
        Ok((kubelet, pki::trusting(&files.ca)?))
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[must_use]
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.journal.exchanges()
    }
}
