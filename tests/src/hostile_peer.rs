//! Hostile ends of a tunnel: an agent and a gateway that have valid certificates, and then send whatever
//! frames a test chooses. They block, and need no runtime.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
    version::TLS13,
};
use serde_json::json;

use crate::pki::{self, PemFiles};

/// The ALPN protocol of the tunnel.
const ALPN: &[u8] = b"culvert/1";
/// The bytes that an HTTP/2 client sends before its first frame (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The time limit for each read and write. A write that takes longer has filled all buffers.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The types of HTTP/2 frames (RFC 9113 section 6).
pub mod frame_type {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const WINDOW_UPDATE: u8 = 8;
    /// A type that no RFC assigns.
    pub const UNKNOWN: u8 = 0xf0;
}

/// The flags `END_STREAM` and `END_HEADERS`.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Encodes a frame.
#[must_use]
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encodes an interim response, `103`, with a number of header fields that each take one byte.
#[must_use]
pub fn interim_response(stream: u32, fields: usize) -> Vec<u8> {
    // A literal with the name `:status` (RFC 7541 appendix A, entry 8), then copies of entry 16.
    let mut headers = vec![8, 3, b'1', b'0', b'3'];
    headers.resize(headers.len() + fields, 0x80 | 16);
    frame(frame_type::HEADERS, END_HEADERS, stream, &headers)
}

/// Returns the first bytes of a TLS client, a whole ClientHello.
pub fn client_hello() -> Result<Vec<u8>> {
    let mut config = ClientConfig::builder_with_provider(pki::provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    let name = ServerName::try_from(pki::GATEWAY)?;
    let mut connection = ClientConnection::new(Arc::new(config), name)?;
    let mut bytes = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut bytes)?;
    }
    Ok(bytes)
}

trait Tls: Read + Write + Send {}
impl<T: Read + Write + Send> Tls for T {}

/// A connection to a gateway or an agent.
pub struct HostilePeer {
    tls: Box<dyn Tls>,
}

impl HostilePeer {
    /// Connects to a gateway as the agent that has the given certificate.
    pub fn agent(gateway: SocketAddr, files: &PemFiles) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_file_iter(&files.ca)? {
            roots.add(root?)?;
        }
        let chain = CertificateDer::pem_file_iter(&files.cert)?.collect::<Result<Vec<_>, _>>()?;
        let mut config = ClientConfig::builder_with_provider(pki::provider())
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(&files.key)?)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        let name = ServerName::try_from(pki::GATEWAY)?;
        let connection = ClientConnection::new(Arc::new(config), name)?;
        let tcp = TcpStream::connect(gateway)?;
        set_time_limits(&tcp)?;
        let mut peer = Self {
            tls: Box::new(StreamOwned::new(connection, tcp)),
        };
        let mut preface = [0; PREFACE.len()];
        peer.tls.read_exact(&mut preface)?;
        ensure!(preface == PREFACE, "the gateway sent no preface");
        peer.send(&frame(frame_type::SETTINGS, 0, 0, &[]))?;
        Ok(peer)
    }

    /// Accepts an agent's connection as the gateway that has the given certificate.
    pub fn gateway(listener: &TcpListener, files: &PemFiles) -> Result<Self> {
        let mut config = ServerConfig::clone(&*files.server_config()?);
        config.alpn_protocols = vec![ALPN.to_vec()];
        let (tcp, _) = listener.accept()?;
        set_time_limits(&tcp)?;
        let connection = ServerConnection::new(Arc::new(config))?;
        let mut peer = Self {
            tls: Box::new(StreamOwned::new(connection, tcp)),
        };
        peer.send(PREFACE)?;
        peer.send(&frame(frame_type::SETTINGS, 0, 0, &[]))?;
        Ok(peer)
    }

    /// Answers the gateway's hello as an agent does.
    pub fn answer_hello(&mut self) -> Result<()> {
        let stream = self.next_request()?;
        let hello = json!({ "protocol": 1, "session": "hostile", "boot": "hostile" }).to_string();
        // `:status 200` (RFC 7541 appendix A, entry 8).
        self.send(&frame(frame_type::HEADERS, END_HEADERS, stream, &[0x88]))?;
        self.send(&frame(
            frame_type::DATA,
            END_STREAM,
            stream,
            hello.as_bytes(),
        ))
    }

    /// Refuses the next request as an agent does whose allow-list lacks the target.
    pub fn deny_target(&mut self) -> Result<()> {
        let stream = self.next_request()?;
        // `:status 403` as a literal, then a field with a new name.
        let mut headers = vec![8, 3, b'4', b'0', b'3', 0];
        for text in ["culvert-reason", "target_denied"] {
            headers.push(u8::try_from(text.len())?);
            headers.extend(text.as_bytes());
        }
        let flags = END_HEADERS | END_STREAM;
        self.send(&frame(frame_type::HEADERS, flags, stream, &headers))
    }

    /// Sends a gateway's hello on stream 1. If `is_last` is true, the gateway announces at once that it is
    /// about to stop.
    pub fn send_hello(&mut self, is_last: bool) -> Result<()> {
        let mut headers = vec![0x83, 0x87];
        for (name, value) in [(1, "gateway.culvert.dev"), (4, "/hello")] {
            headers.extend([name, u8::try_from(value.len())?]);
            headers.extend(value.as_bytes());
        }
        self.send(&frame(frame_type::HEADERS, END_HEADERS, 1, &headers))?;
        let flags = if is_last { END_STREAM } else { 0 };
        let hello = format!("{}\n", json!({ "protocol": 1 }));
        self.send(&frame(frame_type::DATA, flags, 1, hello.as_bytes()))
    }

    /// Waits for the next request, and returns the number of its stream.
    pub fn next_request(&mut self) -> Result<u32> {
        loop {
            let mut header = [0; 9];
            self.tls.read_exact(&mut header).context("no request")?;
            let [high, middle, low, kind, _, stream @ ..] = header;
            let length = u32::from_be_bytes([0, high, middle, low]);
            io::copy(&mut (&mut self.tls).take(length.into()), &mut io::sink())?;
            if kind == frame_type::HEADERS {
                return Ok(u32::from_be_bytes(stream));
            }
        }
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.tls.write_all(bytes)?;
        Ok(self.tls.flush()?)
    }

    /// Sends the same bytes again and again, until the other end closes the connection or stops reading, or
    /// `limit` bytes are sent. Returns the number of bytes sent.
    pub fn flood(&mut self, bytes: &[u8], limit: usize) -> usize {
        let block = bytes.repeat((64 << 10) / bytes.len().max(1) + 1);
        let mut sent = 0;
        while sent < limit && self.send(&block).is_ok() {
            sent += block.len();
        }
        sent
    }
}

fn set_time_limits(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    tcp.set_read_timeout(Some(TIME_LIMIT))?;
    tcp.set_write_timeout(Some(TIME_LIMIT))
}
