//! The targets of agents: servers in threads of this process, which count their connections.

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

use crate::support::ANSWER;

/// The accept backlog.
const BACKLOG: i32 = 1024;

/// The buffer size of sockets on which one end does not read, in bytes.
pub(crate) const LITTLE: usize = 64 * 1024;

/// The behaviour of a target server on its connections.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Sends received bytes back, until EOF.
    Echo,
    /// Sends without end.
    Flood,
    /// Reads nothing and sends nothing.
    Silence,
}

#[derive(Debug, Default)]
struct Seen {
    accepted: AtomicU64,
    reset: AtomicU64,
    ended: AtomicU64,
    sent: AtomicU64,
    over: AtomicBool,
}

/// A server with a thread for each connection.
#[derive(Debug)]
pub(crate) struct Server {
    at: SocketAddr,
    seen: Arc<Seen>,
}

impl Server {
    pub(crate) fn start(act: Act) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from(socket);
        let seen = Arc::new(Seen::default());
        let at = listener.local_addr()?;
        let noted = Arc::clone(&seen);
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if noted.over.load(Ordering::Relaxed) {
                    return;
                }
                noted.accepted.fetch_add(1, Ordering::Relaxed);
                let noted = Arc::clone(&noted);
                thread::spawn(move || match serve(stream, act, &noted) {
                    Ok(()) => noted.ended.fetch_add(1, Ordering::Relaxed),
                    Err(_) => noted.reset.fetch_add(1, Ordering::Relaxed),
                });
            }
        });
        Ok(Self { at, seen })
    }

    pub(crate) const fn at(&self) -> SocketAddr {
        self.at
    }

    /// Returns the number of accepted connections.
    pub(crate) fn accepted(&self) -> u64 {
        self.seen.accepted.load(Ordering::Relaxed)
    }

    /// Waits until exactly one connection was reset.
    pub(crate) fn until_reset(&self) -> Result<()> {
        let broke = || self.seen.reset.load(Ordering::Relaxed) == 1;
        wait::until(ANSWER, broke).with_context(|| format!("no reset, but {:?}", self.seen))
    }

    /// Returns the number of bytes sent over all connections.
    pub(crate) fn sent(&self) -> u64 {
        self.seen.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, so that it ends.
        drop(TcpStream::connect(self.at));
    }
}

fn serve(mut stream: TcpStream, act: Act, seen: &Seen) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match act {
        Act::Echo => echo(stream),
        Act::Flood => {
            // Limits the kernel's TCP memory that the test itself uses.
            SockRef::from(&stream).set_send_buffer_size(LITTLE)?;
            let chunk = vec![0; LITTLE];
            loop {
                let written = u64::try_from(stream.write(&chunk)?).unwrap_or(u64::MAX);
                seen.sent.fetch_add(written, Ordering::Relaxed);
            }
        }
        Act::Silence => {
            // Without a read, a reset does not wake this thread, so it polls the socket's error.
            while stream.take_error()?.is_none() && !seen.over.load(Ordering::Relaxed) {
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

/// An address where connects get no answer: the accept queue of its listener is full.
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
        // The queue has room for one connection more than the backlog (net/ipv4: sk_acceptq_is_full). The
        // kernel drops later SYNs, and clients retransmit them until the connect times out.
        let fill = || -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            drop(socket.connect(&address));
            Ok(socket)
        };
        let held = (0..4).map(|_| fill()).collect::<io::Result<Vec<_>>>()?;
        let at = address.as_socket().context("the listener has no IP address")?;
        Ok(Self {
            at,
            _held: (listener, held),
        })
    }

    pub(crate) const fn at(&self) -> SocketAddr {
        self.at
    }
}

/// Returns an address on which nothing listens.
pub(crate) fn closed() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
