//! The targets that agents dial: servers that run in threads of this process and count their connections.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, SockRef, Socket, Type};
use tunnel_tests::wait;

use crate::fixture::ANSWER;

/// The backlog of each server's listener.
const BACKLOG: i32 = 1024;

/// The buffer size, in bytes, for connections on which one end does not read.
pub(crate) const SMALL_BUFFER: usize = 64 * 1024;

/// A target server's behaviour on each connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Behaviour {
    /// Sends received bytes back until EOF.
    Echo,
    /// Sends data endlessly.
    Flood,
    /// Reads nothing and sends nothing.
    Silence,
}

#[derive(Debug, Default)]
struct ConnectionCounts {
    accepted: AtomicU64,
    reset: AtomicU64,
    ended: AtomicU64,
    sent: AtomicU64,
    is_stopping: AtomicBool,
}

/// A server with one thread per connection.
#[derive(Debug)]
pub(crate) struct Server {
    at: SocketAddr,
    counts: Arc<ConnectionCounts>,
}

impl Server {
    pub(crate) fn start(behaviour: Behaviour) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from(socket);
        let counts = Arc::new(ConnectionCounts::default());
        let at = listener.local_addr()?;
        let counts_of_server = Arc::clone(&counts);
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if counts_of_server.is_stopping.load(Ordering::Relaxed) {
                    return;
                }
                counts_of_server.accepted.fetch_add(1, Ordering::Relaxed);
                let counts_of_server = Arc::clone(&counts_of_server);
                thread::spawn(move || match serve(stream, behaviour, &counts_of_server) {
                    Ok(()) => counts_of_server.ended.fetch_add(1, Ordering::Relaxed),
                    Err(_) => counts_of_server.reset.fetch_add(1, Ordering::Relaxed),
                });
            }
        });
        Ok(Self { at, counts })
    }

    pub(crate) const fn at(&self) -> SocketAddr {
        self.at
    }

    /// Returns how many connections were accepted.
    pub(crate) fn accepted(&self) -> u64 {
        self.counts.accepted.load(Ordering::Relaxed)
    }

    /// Waits until exactly one connection has been reset.
    pub(crate) fn until_reset(&self) -> Result<()> {
        let is_reset = || self.counts.reset.load(Ordering::Relaxed) == 1;
        wait::until(ANSWER, is_reset).with_context(|| format!("no reset, but {:?}", self.counts))
    }

    /// Returns how many bytes were sent over all connections.
    pub(crate) fn sent(&self) -> u64 {
        self.counts.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.counts.is_stopping.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, so that it exits.
        drop(TcpStream::connect(self.at));
    }
}

fn serve(mut stream: TcpStream, behaviour: Behaviour, counts: &ConnectionCounts) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match behaviour {
        Behaviour::Echo => echo(stream),
        Behaviour::Flood => {
            // Limits how much of the kernel's TCP memory the test itself uses.
            SockRef::from(&stream).set_send_buffer_size(SMALL_BUFFER)?;
            let chunk = vec![0; SMALL_BUFFER];
            loop {
                let written = u64::try_from(stream.write(&chunk)?).unwrap_or(u64::MAX);
                counts.sent.fetch_add(written, Ordering::Relaxed);
            }
        }
        Behaviour::Silence => {
            // A reset doesn't wake a thread that isn't reading, so this thread polls the socket's error.
            while stream.take_error()?.is_none() && !counts.is_stopping.load(Ordering::Relaxed) {
                thread::park_timeout(Duration::from_millis(50));
            }
            Ok(())
        }
    }
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return stream.shutdown(Shutdown::Write);
        }
        stream.write_all(&buffer[..length])?;
    }
}

/// An address at which connection attempts get no reply, because the listener's accept queue is full.
#[derive(Debug)]
pub(crate) struct Blackhole {
    at: SocketAddr,
    _held: (Socket, Vec<Socket>),
}

impl Blackhole {
    pub(crate) fn new() -> Result<Self> {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        listener.listen(0)?;
        let address = listener.local_addr()?;
        // The queue has room for one more connection than the backlog (net/ipv4: sk_acceptq_is_full). The
        // kernel drops later SYNs, and clients retransmit them until connect() times out.
        let fill = || -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            drop(socket.connect(&address));
            Ok(socket)
        };
        let held = (0..4).map(|_| fill()).collect::<io::Result<Vec<_>>>()?;
        let at = address
            .as_socket()
            .context("the listener has no IP address")?;
        Ok(Self {
            at,
            _held: (listener, held),
        })
    }

    pub(crate) const fn at(&self) -> SocketAddr {
        self.at
    }
}

/// Returns an address that nothing listens on.
pub(crate) fn address_without_listener() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
