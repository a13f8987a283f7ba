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

use super::{ConnectionRecord, FIRST_BYTES, SumBuilder, pattern};
use crate::{
    http::{header, next_head},
    pki::{self, Authority, PemFiles},
    server,
};

/// The maximum size of a single read or write.
const CHUNK: usize = 64 * 1024;

/// The records of all connections to a server, in order of arrival.
#[derive(Clone, Debug, Default)]
pub struct ConnectionLog(Arc<Mutex<Vec<ConnectionRecord>>>);

impl ConnectionLog {
    #[must_use]
    pub fn exchanges(&self) -> Vec<ConnectionRecord> {
        self.with(|exchanges| exchanges.clone())
    }

    fn with<T>(&self, act: impl FnOnce(&mut Vec<ConnectionRecord>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn open(&self, peer: SocketAddr) -> ConnectionEntry {
        let index = self.with(|exchanges| {
            exchanges.push(ConnectionRecord {
                peer,
                steps: Vec::new(),
                over: false,
            });
            exchanges.len() - 1
        });
        ConnectionEntry {
            log: self.clone(),
            index,
        }
    }
}

/// A handle for writing to the record of one connection.
struct ConnectionEntry {
    log: ConnectionLog,
    index: usize,
}

impl ConnectionEntry {
    fn record(&self, step: impl Into<String>) {
        self.log
            .with(|exchanges| exchanges[self.index].steps.push(step.into()));
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.log.with(|exchanges| exchanges[self.index].over = true);
    }
}

/// Serves a connection until it ends, and records the events on it.
async fn serve_connection(stream: TcpStream, tls: TlsAcceptor, log: ConnectionLog) {
    let Ok(peer) = stream.peer_addr() else { return };
    let entry = log.open(peer);
    if let Err(error) = stream.set_nodelay(true) {
        return entry.record(format!("failed: {error}"));
    }
    let stream = match tls.accept(stream).await {
        Ok(stream) => stream,
        Err(error) => return entry.record(format!("no handshake: {error}")),
    };
    let mut connection = Connection {
        stream,
        entry,
        buffer: Vec::new(),
    };
    let end = match connection.serve().await {
        Ok(()) => "closed".to_owned(),
        Err(error) => format!("failed: {error}"),
    };
    connection.entry.record(end);
}

struct Connection {
    stream: TlsStream<TcpStream>,
    entry: ConnectionEntry,
    /// Bytes that have been read but not yet processed.
    buffer: Vec<u8>,
}

impl Connection {
    async fn serve(&mut self) -> io::Result<()> {
        while let Some(head) = next_head(&mut self.stream, &mut self.buffer).await? {
            let request = head.lines().next().unwrap_or_default();
            let mut words = request.split(' ');
            let method = words.next().unwrap_or_default();
            let path = words.next().unwrap_or_default();
            self.entry.record(format!("{method} {path}"));
            let length = header(&head, "content-length").and_then(|it| it.parse().ok());
            match (method, path) {
                ("GET", "/healthz") => self.answer("200 OK", b"ok").await?,
                ("GET", "/upgrade") => return self.upgrade().await,
                ("GET", "/reset") => return self.reset(),
                ("GET", "/stall") => std::future::pending().await,
                ("POST", "/sum") => {
                    let sum = self.read(Some(length.unwrap_or(0)), false).await?.finish();
                    self.entry.record(format!("read {sum}"));
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
        let mut remaining = length;
        while remaining > 0 {
            let part = usize::try_from(remaining)
                .map_or(pattern.len(), |remaining| remaining.min(pattern.len()));
            self.stream.write_all(&pattern[..part]).await?;
            remaining -= super::count(part);
        }
        self.entry.record(format!("sent {length}"));
        Ok(())
    }

    /// Reads `length` bytes of a body, or everything up to the client's half-close if `length` is `None`.
    /// Echoes the bytes if `sends_back` is true.
    async fn read(&mut self, length: Option<u64>, sends_back: bool) -> io::Result<SumBuilder> {
        let mut builder = SumBuilder::default();
        let limit = length.unwrap_or(u64::MAX);
        while builder.bytes() < limit {
            if self.buffer.is_empty() {
                self.buffer.reserve(CHUNK);
                self.stream.read_buf(&mut self.buffer).await?;
            }
            let remaining = usize::try_from(limit - builder.bytes()).unwrap_or(usize::MAX);
            let part: Vec<u8> = self
                .buffer
                .drain(..remaining.min(self.buffer.len()))
                .collect();
            if part.is_empty() && length.is_none() {
                break;
            }
            if part.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            builder.add(&part);
            if sends_back {
                self.stream.write_all(&part).await?;
            }
        }
        Ok(builder)
    }

    async fn echo(&mut self, length: u64) -> io::Result<()> {
        self.stream
            .write_all(head("200 OK", length).as_bytes())
            .await?;
        self.read(Some(length), true).await?;
        self.entry.record(format!("echoed {length}"));
        Ok(())
    }

    async fn upgrade(&mut self) -> io::Result<()> {
        let head =
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: lab\r\n\r\n";
        self.stream.write_all(&[head, FIRST_BYTES].concat()).await?;
        self.entry.record("upgraded");
        let echoed = self.read(None, true).await?.bytes();
        self.entry.record(format!("echoed {echoed}"));
        self.stream.shutdown().await
    }

    async fn until_end(&mut self) -> io::Result<()> {
        let sum = self.read(None, false).await?.finish();
        self.entry
            .record(format!("the client ended its half: {sum}"));
        self.answer("200 OK", sum.to_string().as_bytes()).await?;
        self.stream.shutdown().await
    }

    fn reset(&self) -> io::Result<()> {
        self.entry.record("reset");
        SockRef::from(self.stream.get_ref().0).set_linger(Some(Duration::ZERO))
    }
}

/// Formats the head of a response whose body has `length` bytes.
fn head(status: &str, length: u64) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n")
}

/// Accepts and serves connections forever.
pub async fn accept(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    log: ConnectionLog,
) -> io::Result<()> {
    let tls = TlsAcceptor::from(tls);
    let serve = |stream| serve_connection(stream, tls.clone(), log.clone());
    server::accept(listener, serve).await
}

/// A server that runs on a thread of this process until it is dropped.
#[derive(Debug)]
pub struct FakeKubelet {
    address: SocketAddr,
    log: ConnectionLog,
    _runtime: Runtime,
}

impl FakeKubelet {
    /// Starts a server on a free port of 127.0.0.1. Its certificate has the given name as its subject, and is
    /// valid for the given address. Also returns a client config that trusts the CA of that certificate.
    pub fn start(name: &str, address: IpAddr) -> Result<(Self, Arc<ClientConfig>)> {
        let directory = tempfile::tempdir()?;
        let authority = Authority::new("kubelets")?;
        let files = PemFiles::in_directory(directory.path(), "kubelet");
        files.write(&authority.pem(), &authority.server(name, &[address])?)?;

        let listener = TcpListener::bind("127.0.0.1:0")?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let (address, log) = (listener.local_addr()?, ConnectionLog::default());
        runtime.spawn(accept(listener, files.server_config()?, log.clone()));
        let kubelet = Self {
            address,
            log,
            _runtime: runtime,
        };
        Ok((kubelet, pki::client_config(&files.ca)?))
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[must_use]
    pub fn exchanges(&self) -> Vec<ConnectionRecord> {
        self.log.exchanges()
    }
}
