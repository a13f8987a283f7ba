//! The clients of the flood and echo server.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustls::{ClientConfig, pki_types::ServerName};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time,
};
use tokio_rustls::TlsConnector;

use super::{CHUNK, ECHO, FLOOD, FloodReport, SMALL_BUFFER, STALL, own_cpu_time};
use crate::{
    clock::Instant,
    load::{Latency, nanoseconds},
};

/// The time limit for opening a stream, and for receiving an echo.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The time for which streams run before the measurement begins.
pub const WARM_UP: Duration = Duration::from_millis(300);

const ECHO_LENGTH: usize = 64;

/// A server's address, and whether to use TLS.
#[derive(Clone, Debug)]
pub struct Target {
    /// The address to dial.
    pub to: SocketAddr,
    /// The TLS client config, and the address for which the server's certificate must be valid. `None` for
    /// plain TCP.
    pub tls: Option<(Arc<ClientConfig>, IpAddr)>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn open(target: &Target, mode: u8) -> io::Result<Pin<Box<dyn Stream>>> {
    let stream = TcpStream::connect(target.to).await?;
    stream.set_nodelay(true)?;
    if mode == STALL {
        SockRef::from(&stream).set_recv_buffer_size(SMALL_BUFFER)?;
    }
    let mut stream: Pin<Box<dyn Stream>> = match &target.tls {
        None => Box::pin(stream),
        Some((tls, address)) => {
            let name = ServerName::IpAddress((*address).into());
            let connector = TlsConnector::from(Arc::clone(tls));
            Box::pin(connector.connect(name, stream).await?)
        }
    };
    stream.write_all(&[mode]).await?;
    stream.flush().await?;
    Ok(stream)
}

/// Reads some bytes. Returns an error if the stream has ended.
async fn read_some(stream: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> io::Result<u64> {
    match stream.read(buffer).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length => Ok(u64::try_from(length).unwrap_or(u64::MAX)),
    }
}

fn run<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(work)
}

/// Measures the combined throughput of several connections.
pub fn flood(target: &Target, connections: u32, duration: Duration) -> Result<FloodReport> {
    run(async {
        let received = Arc::new(AtomicU64::new(0));
        let is_done = Arc::new(AtomicBool::new(false));
        let mut readers = JoinSet::<io::Result<()>>::new();
        for _ in 0..connections {
            let mut stream = time::timeout(TIMEOUT, open(target, FLOOD)).await??;
            let (received, is_done) = (Arc::clone(&received), Arc::clone(&is_done));
            readers.spawn(async move {
                let mut buffer = vec![0; CHUNK];
                while !is_done.load(Ordering::Relaxed) {
                    let length = read_some(&mut stream, &mut buffer).await?;
                    received.fetch_add(length, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        time::sleep(WARM_UP).await;
        let (before, cpu, start) = (
            received.load(Ordering::Relaxed),
            own_cpu_time()?,
            Instant::now(),
        );
        time::sleep(duration).await;
        let flood = FloodReport {
            bytes: received.load(Ordering::Relaxed) - before,
            took_ns: nanoseconds(start.elapsed()),
            cpu_ns: nanoseconds(own_cpu_time()?.saturating_sub(cpu)),
        };
        is_done.store(true, Ordering::Relaxed);
        while let Some(ended) = readers.join_next().await {
            ended?.context("the server ended a stream")?;
        }
        Ok(flood)
    })
}

/// Repeatedly sends 64 bytes and waits until they are echoed. Returns the distribution of the round-trip
/// times.
pub fn echo(target: &Target, duration: Duration) -> Result<Latency> {
    run(async {
        let mut stream = time::timeout(TIMEOUT, open(target, ECHO)).await??;
        let mut times = Vec::new();
        let bytes = [7; ECHO_LENGTH];
        let mut received_echo = [0; ECHO_LENGTH];
        let begun = Instant::now();
        while begun.elapsed() < duration {
            let start = Instant::now();
            stream.write_all(&bytes).await?;
            stream.flush().await?;
            time::timeout(TIMEOUT, stream.read_exact(&mut received_echo)).await??;
            times.push(nanoseconds(start.elapsed()));
        }
        // Discard the first echoes, whose times include the cost of opening the stream.
        times.drain(..times.len().min(20));
        Ok(Latency::of(times))
    })
}

/// Opens connections in a mode, `STALL` or `ECHO`, and then neither reads nor writes. Calls `on_open` once all are open,
/// then waits forever.
pub fn hold(
    target: &Target,
    connections: u32,
    mode: u8,
    on_open: impl FnOnce() -> Result<()>,
) -> Result<()> {
    run(async {
        let mut streams = Vec::new();
        for _ in 0..connections {
            streams.push(time::timeout(TIMEOUT, open(target, mode)).await??);
        }
        on_open()?;
        std::future::pending::<Result<()>>().await
    })
}
