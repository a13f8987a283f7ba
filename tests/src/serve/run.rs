//! The server process.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
    path::Path,
    sync::Arc,
    thread,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    task::JoinSet,
};

use super::{ANY, Kind, Listener, Port, Record};
use crate::{
    kubelet::serve::{self as kubelet, Journal},
    pki::Files,
};

/// How many connections wait to be accepted.
const BACKLOG: i32 = 4096;

/// Room for bursts of datagrams.
const DATAGRAMS: usize = 8 << 20;

/// The longest head of a request.
const HEAD: usize = 8 * 1024;

/// Serves until the process is killed; the record is given to whoever connects to `record`, a Unix
/// socket that appears once everything listens.
///
/// # Errors
///
/// When it can't listen.
pub fn serve(
    name: &str,
    listeners: &[Listener],
    record: &Path,
    certificate: Option<&Files>,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let tls = certificate.map(Files::server).transpose()?;
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
                    let listener = tcp(SocketAddr::from((ANY, number)))?;
                    tasks.spawn(kubelet::accept(listener, tls, journal.clone()));
                    continue;
                }
                listen(listener.kind, number, &name, port, &mut tasks)
                    .with_context(|| format!("cannot listen on port {number}"))?;
            }
        }
        let records = UnixListener::bind(record)
            .with_context(|| format!("cannot listen on {}", record.display()))?;
        loop {
            let (mut stream, _) = records.accept().await?;
            let ports = ports
                .iter()
                .map(|(name, port)| (name.clone(), port.counts()))
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
    let address = SocketAddr::from((ANY, number));
    match kind {
        Kind::Http => {
            let listener = tcp(address)?;
            tasks.spawn(accept(listener, Arc::clone(name), port, http));
        }
        Kind::Echo => {
            let listener = tcp(address)?;
            tasks.spawn(accept(listener, Arc::clone(name), port, echo));
        }
        Kind::Udp => {
            let socket = udp(address)?;
            tasks.spawn(answer(socket, Arc::clone(name), port));
        }
        Kind::Sink => {
            let listener = tcp(address)?;
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

fn tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_recv_buffer_size(DATAGRAMS)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

async fn accept<F>(
    listener: TcpListener,
    name: Arc<str>,
    port: Arc<Port>,
    serve: fn(TcpStream, Arc<str>, Arc<Port>) -> F,
) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                port.count_accepted();
                connections.spawn(serve(stream, Arc::clone(&name), Arc::clone(&port)));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn http(mut stream: TcpStream, name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = Vec::with_capacity(512);
    loop {
        let Some(end) = find(&head, b"\r\n\r\n") else {
            if head.len() > HEAD || stream.read_buf(&mut head).await? == 0 {
                return Ok(());
            }
            continue;
        };
        let request: Vec<u8> = head.drain(..end + 4).collect();
        let last =
            header(&request, b"connection").is_some_and(|it| it.eq_ignore_ascii_case(b"close"));
        let connection = if last { "close" } else { "keep-alive" };
        port.count_request(header(&request, b"x-service"));
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

/// The value of a header of a request without a body.
fn header<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    head.split(|byte| *byte == b'\n').find_map(|line| {
        let (key, value) = line.split_at_checked(line.iter().position(|byte| *byte == b':')?)?;
        key.eq_ignore_ascii_case(name)
            .then(|| value[1..].trim_ascii())
    })
}

fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes
        .windows(pattern.len())
        .position(|window| window == pattern)
}

async fn echo(mut stream: TcpStream, _name: Arc<str>, port: Arc<Port>) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_found_whatever_their_case() {
        let head = b"GET / HTTP/1.1\r\nHost: web\r\nX-Service:  web \r\n\r\n";

        assert_eq!(header(head, b"x-service"), Some(&b"web"[..]));
        assert_eq!(header(head, b"connection"), None);
    }
}
