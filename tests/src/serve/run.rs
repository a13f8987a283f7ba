//! The server process.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, UdpSocket},
    path::PathBuf,
    sync::Arc,
    thread,
};

use anyhow::{Context as _, Result};
use clap::Args;
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    task::JoinSet,
};

use super::{ANY, Kind, Listener, Port, Record};
use crate::{
    http::{head_end, header},
    kubelet::serve::{self as kubelet, Journal},
    pki::Files,
};

/// Room for bursts of datagrams.
const DATAGRAMS: usize = 8 << 20;

/// The longest head of a request.
const HEAD: usize = 8 * 1024;

/// How a server process is started.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// The name that it answers with.
    #[arg(long)]
    pub name: String,
    /// The Unix socket that gives the record.
    #[arg(long)]
    pub record: PathBuf,
    /// The certificate of ports of kind kubelet.
    #[arg(long, requires = "key")]
    pub cert: Option<PathBuf>,
    /// Its key.
    #[arg(long, requires = "cert")]
    pub key: Option<PathBuf>,
    /// KIND:PORT or KIND:FIRST-LAST, and =SERVICE,… behind it; KIND is http, echo, udp, sink
    /// or kubelet.
    #[arg(required = true)]
    pub listeners: Vec<Listener>,
}

/// Serves until the process is killed; the record is given to whoever connects to `record`, a Unix
/// socket that appears once everything listens.
pub fn serve(options: Options) -> Result<()> {
    let Options {
        name,
        record,
        cert,
        key,
        listeners,
    } = options;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let ca = PathBuf::new();
    let files = cert.zip(key).map(|(cert, key)| Files { ca, cert, key });
    let tls = files.as_ref().map(Files::server).transpose()?;
    let journal = Journal::default();
    runtime.block_on(async {
        let name: Arc<str> = Arc::from(name);
        let mut ports = BTreeMap::new();
        let mut tasks = JoinSet::new();
        for listener in listeners {
            for (number, services) in listener.ports() {
                let port = Port::of(services);
                ports.insert(
                    format!("{}:{number}", listener.kind.word()),
                    Arc::clone(&port),
                );
                if listener.kind == Kind::Kubelet {
                    let tls = tls.clone().context("a kubelet needs a certificate")?;
                    let listener = super::listen(number)?;
                    tasks.spawn(kubelet::accept(listener, tls, journal.clone()));
                    continue;
                }
                listen(listener.kind, number, &name, port, &mut tasks)
                    .with_context(|| format!("cannot listen on port {number}"))?;
            }
        }
        let records = UnixListener::bind(&record)
            .with_context(|| format!("cannot listen on {}", record.display()))?;
        loop {
            let (mut stream, _) = records.accept().await?;
            let ports = ports
                .iter()
                .map(|(name, port)| (name.clone(), *port.locked()))
                .collect();
            let record = Record {
                name: name.to_string(),
                ports,
                exchanges: journal.exchanges(),
            };
            // Whoever asked may have gone.
            drop(stream.write_all(&serde_json::to_vec(&record)?).await);
        }
    })
}

fn listen(
    kind: Kind,
    number: u16,
    name: &Arc<str>,
    port: Arc<Port>,
    tasks: &mut JoinSet<io::Result<()>>,
) -> io::Result<()> {
    match kind {
        Kind::Http => {
            let (listener, name) = (super::listen(number)?, Arc::clone(name));
            tasks.spawn(super::accept(listener, move |stream| {
                port.count_accepted();
                http(stream, Arc::clone(&name), Arc::clone(&port))
            }));
        }
        Kind::Echo => {
            let listener = super::listen(number)?;
            tasks.spawn(super::accept(listener, move |stream| {
                port.count_accepted();
                echo(stream, Arc::clone(&port))
            }));
        }
        Kind::Udp => {
            let socket = udp(number)?;
            tasks.spawn(answer(socket, Arc::clone(name), port));
        }
        Kind::Sink => {
            let listener = super::listen(number)?;
            // A thread of its own that blocks in accept(): the shortest way.
            thread::spawn(move || {
                while listener.accept().is_ok() {
                    port.count_accepted();
                }
            });
        }
        Kind::Kubelet => return Err(io::ErrorKind::Unsupported.into()),
    }
    Ok(())
}

fn udp(port: u16) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_recv_buffer_size(DATAGRAMS)?;
    socket.bind(&SocketAddr::from((ANY, port)).into())?;
    Ok(socket.into())
}

async fn http(mut stream: TcpStream, name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = Vec::with_capacity(512);
    loop {
        let Some(end) = head_end(&head) else {
            if head.len() > HEAD || stream.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let request: Vec<u8> = head.drain(..end).collect();
        let request = String::from_utf8_lossy(&request);
        let connection = header(&request, "connection").unwrap_or_default();
        let last = connection.eq_ignore_ascii_case("close");
        let connection = if last { "close" } else { "keep-alive" };
        port.count_request(header(&request, "x-service").map(str::as_bytes));
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: {connection}\r\n\r\n{name}",
            name.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        if last {
            return Ok(());
        }
    }
}

async fn echo(mut stream: TcpStream, port: Arc<Port>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        port.count_request(None);
        stream.write_all(&buffer[..length]).await?;
    }
}

async fn answer(socket: UdpSocket, name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // The ICMP answer to an earlier answer.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        let payload = &buffer[..length];
        port.count_request(payload.split(|byte| *byte == b' ').next());
        let mut answer = format!("{name} ").into_bytes();
        answer.extend_from_slice(payload);
        // The one who asked may have closed its socket.
        drop(socket.send_to(&answer, from).await);
    }
}
