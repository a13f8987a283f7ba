//! What agents dial: servers in threads of this process, each with a record of what it saw.

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

/// How many connections wait to be accepted.
const BACKLOG: i32 = 1024;

/// The buffers of sockets that nobody reads from.
pub(crate) const LITTLE: usize = 64 * 1024;

/// What a target does with a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// What comes is sent back, until the end.
    Echo,
    /// Sends for ever, whether anybody reads or not.
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

/// A server; its threads end with their connections.
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

    /// How many connections came.
    pub(crate) fn accepted(&self) -> u64 {
        self.seen.accepted.load(Ordering::Relaxed)
    }

    /// Waits until one of them broke.
    pub(crate) fn until_reset(&self) -> Result<()> {
        let broke = || self.seen.reset.load(Ordering::Relaxed) == 1;
        wait::until(ANSWER, broke).with_context(|| format!("no reset, but {:?}", self.seen))
    }

    /// How many bytes were sent over all of them.
    pub(crate) fn sent(&self) -> u64 {
        self.seen.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.at));
    }
}

fn serve(mut stream: TcpStream, act: Act, seen: &Seen) -> io::Result<()> {
    stream.set_nodelay(true)?;
    match act {
        Act::Echo => echo(stream),
        Act::Flood => {
            // Little of the kernel's memory for TCP is to be the test's own.
            SockRef::from(&stream).set_send_buffer_size(LITTLE)?;
            let chunk = vec![0; LITTLE];
            loop {
                let written = u64::try_from(stream.write(&chunk)?).unwrap_or(u64::MAX);
                seen.sent.fetch_add(written, Ordering::Relaxed);
            }
        }
        Act::Silence => {
            // An error on the connection wakes no reader that never reads: look at it now and then.
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

/// An address that answers no connect: its listener has room for one connection, which is taken.
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
        // The queue holds one more than asked for (net/ipv4: sk_acceptq_is_full); the SYN of any
        // later one is dropped, and sent again by its client until it gives up.
        let fill = || -> io::Result<Socket> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_nonblocking(true)?;
            drop(socket.connect(&address));
            Ok(socket)
        };
        let held = (0..4).map(|_| fill()).collect::<io::Result<Vec<_>>>()?;
        let at = address.as_socket().context("no address")?;
        Ok(Self {
            at,
            _held: (listener, held),
        })
    }

    pub(crate) const fn at(&self) -> SocketAddr {
        self.at
    }
}

/// An address where nobody listens.
pub(crate) fn closed() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
