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

use super::{CHUNK, ECHO, FLOOD, Flood, LITTLE, STALL, own_cpu};
use crate::{
    clock::Instant,
    load::{Latency, nanoseconds},
};

/// The time limit of a connect or an echo.
const PATIENCE: Duration = Duration::from_secs(20);

/// The time that streams run before they are measured.
pub const WARM_UP: Duration = Duration::from_millis(300);

const BYTES: usize = 64;

/// The address and protocol of a server.
#[derive(Clone, Debug)]
pub struct Way {
    /// The address to dial.
    pub to: SocketAddr,
    /// For TLS: the client config, and the address that the server's certificate must be valid for.
    pub tls: Option<(Arc<ClientConfig>, IpAddr)>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn open(way: &Way, what: u8) -> io::Result<Pin<Box<dyn Stream>>> {
    let stream = TcpStream::connect(way.to).await?;
    stream.set_nodelay(true)?;
    if what == STALL {
        SockRef::from(&stream).set_recv_buffer_size(LITTLE)?;
    }
    let mut stream: Pin<Box<dyn Stream>> = match &way.tls {
        None => Box::pin(stream),
        Some((tls, address)) => {
            let name = ServerName::IpAddress((*address).into());
            let connector = TlsConnector::from(Arc::clone(tls));
            Box::pin(connector.connect(name, stream).await?)
        }
    };
    stream.write_all(&[what]).await?;
    stream.flush().await?;
    Ok(stream)
}

/// Reads some bytes; the end of the stream is an error.
async fn some(stream: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> io::Result<u64> {
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

/// Measures the throughput of several connections at once.
pub fn flood(way: &Way, connections: u32, lasting: Duration) -> Result<Flood> {
    run(async {
        let counted = Arc::new(AtomicU64::new(0));
        let over = Arc::new(AtomicBool::new(false));
        let mut readers = JoinSet::<io::Result<()>>::new();
        for _ in 0..connections {
            let mut stream = time::timeout(PATIENCE, open(way, FLOOD)).await??;
            let (counted, over) = (Arc::clone(&counted), Arc::clone(&over));
            readers.spawn(async move {
                let mut buffer = vec![0; CHUNK];
                while !over.load(Ordering::Relaxed) {
                    let length = some(&mut stream, &mut buffer).await?;
                    counted.fetch_add(length, Ordering::Relaxed);
                }
                Ok(())
            });
        }
        time::sleep(WARM_UP).await;
        let (before, cpu, start) = (counted.load(Ordering::Relaxed), own_cpu()?, Instant::now());
        time::sleep(lasting).await;
        let flood = Flood {
            bytes: counted.load(Ordering::Relaxed) - before,
            took_ns: nanoseconds(start.elapsed()),
            cpu_ns: nanoseconds(own_cpu()?.saturating_sub(cpu)),
        };
        over.store(true, Ordering::Relaxed);
        while let Some(ended) = readers.join_next().await {
            ended?.context("the server ended a stream")?;
        }
        Ok(flood)
    })
}

/// Sends 64 bytes and waits for their echo, repeatedly; returns the round-trip times.
pub fn echo(way: &Way, lasting: Duration) -> Result<Latency> {
    run(async {
        let mut stream = time::timeout(PATIENCE, open(way, ECHO)).await??;
        let mut times = Vec::new();
        let bytes = [7; BYTES];
        let mut back = [0; BYTES];
        let begun = Instant::now();
        while begun.elapsed() < lasting {
            let start = Instant::now();
            stream.write_all(&bytes).await?;
            stream.flush().await?;
            time::timeout(PATIENCE, stream.read_exact(&mut back)).await??;
            times.push(nanoseconds(start.elapsed()));
        }
        // The first echoes include the opening of the stream.
        times.drain(..times.len().min(20));
        Ok(Latency::of(times))
    })
}

/// Opens connections in mode [`STALL`] without reading from them; calls `on_open` once all are open, and
/// never returns after that.
pub fn stall(way: &Way, connections: u32, tell: impl FnOnce() -> Result<()>) -> Result<()> {
    run(async {
        let mut held = Vec::new();
        for _ in 0..connections {
            held.push(time::timeout(PATIENCE, open(way, STALL)).await??);
        }
        tell()?;
        std::future::pending::<Result<()>>().await
    })
}
