//! The server process, which serves several listeners.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    sync::Arc,
    thread,
};

use anyhow::{Context as _, Result};
use clap::Args;
use rustls::ServerConfig;
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    task::JoinSet,
};

use super::{ANY, Listener, Port, Record, ServerKind};
use crate::{
    fake_kubelet::server::{self as kubelet, ConnectionLog},
    http::{header, next_head},
    pki::PemFiles,
};

/// The size of a UDP socket's receive buffer: large enough for bursts of datagrams.
const RECEIVE_BUFFER: usize = 8 << 20;

/// The options of a server process.
#[derive(Args, Clone, Debug)]
pub struct ProcessOptions {
    /// The name of the server, which is included in its responses.
    #[arg(long)]
    pub name: String,
    /// The path of the Unix socket on which to publish the record.
    #[arg(long)]
    pub record: PathBuf,
    /// A PEM file with the certificate for kubelet listeners.
    #[arg(long, requires = "key")]
    pub cert: Option<PathBuf>,
    /// A PEM file with the certificate's private key.
    #[arg(long, requires = "cert")]
    pub key: Option<PathBuf>,
    /// A listener: KIND:PORT or KIND:FIRST-LAST, optionally followed by =SERVICE,…; KIND is http, echo, udp,
    /// sink, answer or kubelet.
    #[arg(required = true)]
    pub listeners: Vec<Listener>,
}

/// Serves requests until the process is killed. Once the process is listening on all ports, creates the Unix
/// socket `record`, and sends the current record to each client that connects to the socket.
pub fn run_server(options: ProcessOptions) -> Result<()> {
    let ProcessOptions {
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
    let files = cert.zip(key).map(|(cert, key)| PemFiles { ca, cert, key });
    let mut server = Server {
        name: Arc::from(name),
        tls: files.as_ref().map(PemFiles::server_config).transpose()?,
        connection_log: ConnectionLog::default(),
        tasks: JoinSet::new(),
    };
    runtime.block_on(async {
        let mut ports = BTreeMap::new();
        for listener in listeners {
            for (number, services) in listener.ports() {
                let (kind, port) = (listener.kind, Port::of(services));
                ports.insert(format!("{}:{number}", kind.label()), Arc::clone(&port));
                server
                    .listen(kind, number, port)
                    .with_context(|| format!("cannot listen on port {number}"))?;
            }
        }
        let records = UnixListener::bind(&record)
            .with_context(|| format!("cannot listen on {}", record.display()))?;
        loop {
            let (mut stream, _) = records.accept().await?;
            let ports = ports
                .iter()
                .map(|(name, port)| (name.clone(), *port.lock_counts()))
                .collect();
            let record = Record {
                name: server.name.to_string(),
                ports,
                exchanges: server.connection_log.exchanges(),
            };
            // The client may already have disconnected.
            drop(stream.write_all(&serde_json::to_vec(&record)?).await);
        }
    })
}

struct Server {
    name: Arc<str>,
    tls: Option<Arc<ServerConfig>>,
    connection_log: ConnectionLog,
    tasks: JoinSet<io::Result<()>>,
}

impl Server {
    fn listen(&mut self, kind: ServerKind, number: u16, port: Arc<Port>) -> Result<()> {
        match kind {
            ServerKind::Http => {
                let (listener, name) = (super::listen(number)?, Arc::clone(&self.name));
                self.tasks.spawn(super::accept(listener, move |stream| {
                    port.count_accepted();
                    serve_http(stream, Arc::clone(&name), Arc::clone(&port))
                }));
            }
            ServerKind::Echo => {
                let listener = super::listen(number)?;
                self.tasks.spawn(super::accept(listener, move |stream| {
                    port.count_accepted();
                    serve_echo(stream, Arc::clone(&port))
                }));
            }
            ServerKind::Udp => {
                let answers = serve_udp(bind_udp(number)?, Arc::clone(&self.name), port);
                self.tasks.spawn(answers);
            }
            ServerKind::Sink => {
                let listener = super::listen(number)?;
                // A thread that blocks in accept(2) has the lowest overhead.
                thread::spawn(move || {
                    while listener.accept().is_ok() {
                        port.count_accepted();
                    }
                });
            }
            ServerKind::Answer => {
                let listener = super::listen(number)?;
                thread::spawn(move || answer_each(&listener, &port));
            }
            ServerKind::Kubelet => {
                let tls = self
                    .tls
                    .clone()
                    .context("a listener of kind kubelet needs --cert and --key")?;
                let (listener, connection_log) =
                    (super::listen(number)?, self.connection_log.clone());
                self.tasks
                    .spawn(kubelet::accept(listener, tls, connection_log));
            }
        }
        Ok(())
    }
}

/// Answers one byte of each connection, one connection after another.
fn answer_each(listener: &TcpListener, port: &Port) {
    while let Ok((mut stream, _)) = listener.accept() {
        port.count_accepted();
        // The client may have gone.
        if stream.read_exact(&mut [0]).is_ok() {
            drop(stream.write_all(&[1]));
        }
    }
}

fn bind_udp(port: u16) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    socket.bind(&SocketAddr::from((ANY, port)).into())?;
    Ok(socket.into())
}

async fn serve_http(mut stream: TcpStream, name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(512);
    while let Some(request) = next_head(&mut stream, &mut buffer).await? {
        let connection = header(&request, "connection").unwrap_or_default();
        let is_last = connection.eq_ignore_ascii_case("close");
        let connection = if is_last { "close" } else { "keep-alive" };
        port.count_request(header(&request, "x-service").map(str::as_bytes));
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: {connection}\r\n\r\n{name}",
            name.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        if is_last {
            break;
        }
    }
    Ok(())
}

async fn serve_echo(mut stream: TcpStream, port: Arc<Port>) -> io::Result<()> {
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

async fn serve_udp(socket: UdpSocket, name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // An earlier response caused this ICMP error.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => return Err(error),
        };
        let payload = &buffer[..length];
        port.count_request(payload.split(|byte| *byte == b' ').next());
        let mut answer = format!("{name} ").into_bytes();
        answer.extend_from_slice(payload);
        // This fails if the client has closed its socket, which is fine.
        drop(socket.send_to(&answer, from).await);
    }
}
