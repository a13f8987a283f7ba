//! Measures the cost of packets of one flow, by sending as many as possible.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use nix::libc;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockFilter, SockRef, Socket, Type};

use super::{parse_millis, timeout};
use crate::{clock::Instant, server};

/// The length of a datagram.
const LENGTH: usize = 64;
/// The first byte of datagrams that the receiver answers, with the number of those that it has discarded, and that of others.
const ASKS: u8 = 1;
const SILENT: u8 = 0;
/// The number of datagrams between two that ask.
const UNASKED: u32 = 4096;

/// The size of a single write or read of a connection.
const CHUNK: usize = 256 << 10;

/// The time for which packets are sent before the measurement begins.
const WARM_UP: Duration = Duration::from_millis(50);

/// The packets to send.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    #[arg(long)]
    pub to: SocketAddr,
    /// Send datagrams of 64 bytes, instead of the bytes of a connection.
    #[arg(long)]
    pub udp: bool,
    /// The duration of the measurement in milliseconds.
    #[arg(long = "millis", value_parser = parse_millis)]
    pub duration: Duration,
}

/// The results of a measurement.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// The number of datagrams, or of bytes.
    pub sent: u64,
    /// The number of datagrams, or of bytes, per second.
    pub per_second: u64,
}

/// Sends as planned, to a port that [`receive`] serves. A datagram that is lost is an error.
pub fn run(plan: &Plan) -> Result<Report> {
    if plan.udp {
        let socket = UdpSocket::bind(unspecified(plan.to))?;
        socket.connect(plan.to)?;
        socket.set_read_timeout(Some(timeout()))?;
        send_datagrams(&socket, WARM_UP)?;
        return send_datagrams(&socket, plan.duration);
    }
    let mut stream = TcpStream::connect(plan.to)?;
    stream.set_read_timeout(Some(timeout()))?;
    send_bytes(&mut stream, WARM_UP)?;
    send_bytes(&mut stream, plan.duration)
}

fn unspecified(to: SocketAddr) -> SocketAddr {
    match to {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

fn send_datagrams(socket: &UdpSocket, duration: Duration) -> Result<Report> {
    let before = ask(socket)?;
    let (start, mut silent) = (Instant::now(), 0);
    while start.elapsed() < duration {
        for _ in 0..UNASKED {
            socket.send(&[SILENT; LENGTH])?;
        }
        silent += UNASKED;
        ask(socket)?;
    }
    let took = start.elapsed();
    let discarded = ask(socket)?.wrapping_sub(before);
    ensure!(
        discarded == silent,
        "{discarded} of {silent} datagrams arrived"
    );
    Ok(Report::new(silent.into(), took))
}

/// Returns the number of datagrams that the receiver has discarded.
fn ask(socket: &UdpSocket) -> Result<u32> {
    socket.send(&[ASKS; LENGTH])?;
    let mut answer = [0; 4];
    socket.recv(&mut answer).context("a datagram was lost")?;
    Ok(u32::from_be_bytes(answer))
}

/// Sends chunks, each of which the receiver has read when the next one begins, but for what fits into the socket buffers.
fn send_bytes(stream: &mut TcpStream, duration: Duration) -> Result<Report> {
    let chunk = vec![0; CHUNK];
    let (start, mut sent) = (Instant::now(), 0);
    while start.elapsed() < duration {
        stream.write_all(&chunk)?;
        stream
            .read_exact(&mut [0])
            .context("the receiver has not read everything")?;
        sent += u64::try_from(CHUNK)?;
    }
    Ok(Report::new(sent, start.elapsed()))
}

impl Report {
    fn new(sent: u64, took: Duration) -> Self {
        let per_second = u128::from(sent) * 1_000_000_000 / took.as_nanos().max(1);
        Self {
            sent,
            per_second: u64::try_from(per_second).unwrap_or(u64::MAX),
        }
    }
}

/// Receives datagrams and connections on a port, at little cost: the kernel discards most datagrams, and all bytes of
/// connections. Calls `on_ready` once both are received.
pub fn receive(port: u16, on_ready: impl FnOnce()) -> Result<()> {
    let datagrams = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    datagrams.set_only_v6(false)?;
    datagrams.attach_filter(&FILTER)?;
    datagrams.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into())?;
    let listener = server::listen(port)?;
    on_ready();
    thread::scope(|scope| {
        let answers = scope.spawn(|| answer_datagrams(&datagrams.into(), port));
        accept(&listener)?;
        answers
            .join()
            .map_err(|_panic| anyhow::anyhow!("the thread failed"))?
    })
}

/// Accepts datagrams that ask. The filter sees the UDP header, of eight bytes, too.
const FILTER: [SockFilter; 4] = [
    // Load the first byte after the header, accept if it is equal, else discard.
    SockFilter::new(0x30, 0, 0, 8),
    SockFilter::new(0x15, 0, 1, 1),
    SockFilter::new(0x06, 0, 0, u32::MAX),
    SockFilter::new(0x06, 0, 0, 0),
];

fn answer_datagrams(socket: &UdpSocket, port: u16) -> Result<()> {
    let mut data = [0; LENGTH];
    loop {
        let (_, from) = socket.recv_from(&mut data)?;
        socket.send_to(&discarded(port)?.to_be_bytes(), from)?;
    }
}

/// Returns the number of datagrams for a port that the kernel has discarded: the last column of the table of sockets.
fn discarded(port: u16) -> Result<u32> {
    let table = fs::read_to_string("/proc/thread-self/net/udp6")?;
    let local = format!(":{port:04X}");
    let mut rows = table.lines().map(|row| row.split_whitespace());
    let row = rows.find_map(|mut row| row.nth(1)?.ends_with(&local).then_some(row));
    let count = row
        .and_then(Iterator::last)
        .context("no socket with this port")?;
    Ok(count.parse()?)
}

fn accept(listener: &TcpListener) -> Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        thread::spawn(move || discard(&stream));
    }
}

/// Discards what a connection receives, and answers each chunk by a byte, until the connection ends.
fn discard(mut stream: &TcpStream) {
    let mut buffer = Vec::<u8>::with_capacity(CHUNK);
    let mut discard = || -> io::Result<bool> {
        let mut left = CHUNK;
        while left > 0 {
            // The kernel writes nothing to the buffer.
            let buffer = &mut buffer.spare_capacity_mut()[..left];
            match SockRef::from(stream).recv_with_flags(buffer, libc::MSG_TRUNC)? {
                0 => return Ok(false),
                length => left -= length,
            }
        }
        stream.write_all(&[0])?;
        Ok(true)
    };
    while matches!(discard(), Ok(true)) {}
}
