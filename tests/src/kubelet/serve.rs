//! The server.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustls::ServerConfig;
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{Exchange, FIRST, Sum, Summing, pattern};
use crate::{
    http::{head_end, header},
    serve,
};

/// The longest head of a request.
const HEAD: usize = 64 * 1024;

/// How much is read or written at once.
const CHUNK: usize = 64 * 1024;

/// What a server saw of its connections, in their order.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<Exchange>>>);

impl Journal {
    /// What was seen so far.
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

/// One connection's part of the journal.
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

/// Serves one connection to its end, and notes what happened.
pub async fn converse(stream: TcpStream, tls: TlsAcceptor, journal: Journal) {
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
    /// What was read and not used yet.
    buffer: Vec<u8>,
}

impl Talk {
    async fn serve(&mut self) -> io::Result<()> {
        while let Some(head) = self.head().await? {
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
                    let sum = self.sum(length.unwrap_or(0)).await?;
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

    /// The head of the next request; nothing once the client has ended its half between two.
    async fn head(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(end) = head_end(&self.buffer) {
                let head: Vec<u8> = self.buffer.drain(..end).collect();
                return Ok(Some(String::from_utf8_lossy(&head).into_owned()));
            }
            if self.buffer.len() > HEAD {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
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

    /// The next bytes of a body, at most so many; none once the client has ended its half.
    async fn next(&mut self, most: u64) -> io::Result<Vec<u8>> {
        if self.buffer.is_empty() {
            self.buffer.reserve(CHUNK);
            self.stream.read_buf(&mut self.buffer).await?;
        }
        let part = usize::try_from(most).map_or(self.buffer.len(), |it| it.min(self.buffer.len()));
        let rest = self.buffer.split_off(part);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    async fn sum(&mut self, length: u64) -> io::Result<Sum> {
        let mut summing = Summing::default();
        while summing.bytes() < length {
            let part = self.next(length - summing.bytes()).await?;
            if part.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            summing.add(&part);
        }
        Ok(summing.sum())
    }

    async fn echo(&mut self, length: u64) -> io::Result<()> {
        self.stream
            .write_all(head("200 OK", length).as_bytes())
            .await?;
        let mut left = length;
        while left > 0 {
            let part = self.next(left).await?;
            if part.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            left -= super::count(part.len());
            self.stream.write_all(&part).await?;
        }
        self.line.note(format!("echoed {length}"));
        Ok(())
    }

    async fn upgrade(&mut self) -> io::Result<()> {
        let head =
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: lab\r\n\r\n";
        self.stream.write_all(&[head, FIRST].concat()).await?;
        self.line.note("upgraded");
        let mut echoed = 0;
        let mut part = self.next(u64::MAX).await?;
        while !part.is_empty() {
            echoed += part.len();
            self.stream.write_all(&part).await?;
            part = self.next(u64::MAX).await?;
        }
        self.line.note(format!("echoed {echoed}"));
        self.stream.shutdown().await
    }

    async fn until_end(&mut self) -> io::Result<()> {
        let mut summing = Summing::default();
        let mut part = self.next(u64::MAX).await?;
        while !part.is_empty() {
            summing.add(&part);
            part = self.next(u64::MAX).await?;
        }
        let sum = summing.sum();
        self.line.note(format!("the client ended its half: {sum}"));
        self.answer("200 OK", sum.to_string().as_bytes()).await?;
        self.stream.shutdown().await
    }

    fn reset(&self) -> io::Result<()> {
        self.line.note("reset");
        SockRef::from(self.stream.get_ref().0).set_linger(Some(Duration::ZERO))
    }
}

/// The head of an answer with a body of this length.
fn head(status: &str, length: u64) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n")
}

/// Accepts for ever.
pub async fn accept(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    journal: Journal,
) -> io::Result<()> {
    let tls = TlsAcceptor::from(tls);
    let converse = |stream| converse(stream, tls.clone(), journal.clone());
    serve::accept(listener, converse).await
}

/// A server in a thread of this process; it ends when it is dropped.
#[derive(Debug)]
pub struct Kubelet {
    address: SocketAddr,
    journal: Journal,
    end: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Kubelet {
    /// Serves a listener.
    pub fn start(listener: TcpListener, tls: Arc<ServerConfig>) -> Result<Self> {
        let address = listener.local_addr()?;
        let journal = Journal::default();
        let (end, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no runtime")?;
        let kept = journal.clone();
        let thread = thread::spawn(move || {
            runtime.block_on(async move {
                tokio::select! {
                    _ = ended => {}
                    _ = accept(listener, tls, kept) => {}
                }
            });
        });
        Ok(Self {
            address,
            journal,
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it saw so far.
    #[must_use]
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.journal.exchanges()
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
