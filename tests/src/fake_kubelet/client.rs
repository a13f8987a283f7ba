//! The client for the kubelet-like server. Its caller provides a connected socket.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use x509_parser::parse_x509_certificate;

use super::{FIRST_BYTES, Sum, SumBuilder, send};
use crate::http::ResponseHead;

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A client connection whose TLS handshake is complete.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<Tls>,
    subject: String,
}

impl Client {
    /// Performs the TLS handshake. The server's certificate must be valid for `address`.
    pub fn handshake(
        mut socket: TcpStream,
        address: IpAddr,
        tls: Arc<ClientConfig>,
    ) -> Result<Self> {
        socket.set_nodelay(true)?;
        let name = ServerName::IpAddress(address.to_canonical().into());
        let mut connection = ClientConnection::new(tls, name)?;
        while connection.is_handshaking() {
            connection
                .complete_io(&mut socket)
                .context("TLS handshake")?;
        }
        let chain = connection.peer_certificates().unwrap_or_default();
        let leaf = chain.first().context("the server sent no certificate")?;
        let (_, leaf) = parse_x509_certificate(leaf)?;
        let subject = leaf.subject().to_string();
        Ok(Self {
            stream: BufReader::with_capacity(64 * 1024, StreamOwned::new(connection, socket)),
            subject,
        })
    }

    /// Returns the subject of the server's certificate.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }

    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.stream.get_ref().sock
    }

    /// Returns the address of the socket's peer.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.socket().peer_addr()
    }

    /// Sets the timeout for each read and write.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.socket().set_read_timeout(Some(timeout))?;
        self.socket().set_write_timeout(Some(timeout))
    }

    /// Sends a request that consists of `head`, a Host header and `body`.
    fn send_request(&mut self, head: &str, body: &str) -> io::Result<()> {
        let request = format!("{head}\r\nhost: lab\r\n\r\n{body}");
        let stream = self.stream.get_mut();
        stream.write_all(request.as_bytes())?;
        stream.flush()
    }

    fn read_body(&mut self) -> Result<String> {
        self.read_head(200)?.body(&mut self.stream)
    }

    /// Reads the head of a response, whose status must be `status`.
    fn read_head(&mut self, status: u16) -> Result<ResponseHead> {
        let head = ResponseHead::read(&mut self.stream)?;
        ensure!(head.status == status, "expected status {status}: {head:?}");
        Ok(head)
    }

    pub fn healthz(&mut self) -> Result<String> {
        self.send_request("GET /healthz HTTP/1.1", "")?;
        self.read_body()
    }

    /// Downloads a body of `length` bytes, and returns its sum.
    pub fn bytes(&mut self, length: u64) -> Result<Sum> {
        self.send_request(&format!("GET /bytes/{length} HTTP/1.1"), "")?;
        let content_length = self.read_head(200)?.length;
        ensure!(
            content_length == Some(length),
            "expected Content-Length {length}, found {content_length:?}"
        );
        let mut builder = SumBuilder::default();
        while builder.bytes() < length {
            let part = self.stream.fill_buf()?;
            let limit = usize::try_from(length - builder.bytes()).unwrap_or(usize::MAX);
            let part = &part[..part.len().min(limit)];
            ensure!(
                !part.is_empty(),
                "the body ends after {} bytes",
                builder.bytes()
            );
            builder.add(part);
            let used = part.len();
            self.stream.consume(used);
        }
        Ok(builder.finish())
    }

    /// Uploads a body of `length` bytes, and returns its sum. The server must report the same sum.
    pub fn sum(&mut self, length: u64) -> Result<Sum> {
        let head = format!("POST /sum HTTP/1.1\r\ncontent-length: {length}");
        self.send_request(&head, "")?;
        let sent = send(self.stream.get_mut(), length)?;
        check_sum(&sent, &self.read_body()?)
    }

    /// Has the server echo a short text in a response body.
    pub fn echo(&mut self, text: &str) -> Result<()> {
        let head = format!("POST /echo HTTP/1.1\r\ncontent-length: {}", text.len());
        self.send_request(&head, text)?;
        let echoed = self.read_body()?;
        ensure!(echoed == text, "sent {text:?}, but {echoed:?} came back");
        Ok(())
    }

    /// Upgrades the connection, and returns the bytes that the server sends right after the response, in the
    /// same segment.
    pub fn upgrade(&mut self) -> Result<String> {
        let head = "GET /upgrade HTTP/1.1\r\nconnection: Upgrade\r\nupgrade: lab";
        self.send_request(head, "")?;
        self.read_head(101)?;
        let mut first = vec![0; FIRST_BYTES.len()];
        self.stream.read_exact(&mut first)?;
        ensure!(first == FIRST_BYTES, "unexpected first bytes: {first:?}");
        Ok(String::from_utf8(first)?)
    }

    /// Has the server echo `bytes` over the upgraded connection.
    pub fn exchange(&mut self, bytes: &[u8]) -> Result<()> {
        let stream = self.stream.get_mut();
        stream.write_all(bytes)?;
        stream.flush()?;
        let mut back = vec![0; bytes.len()];
        self.stream.read_exact(&mut back)?;
        ensure!(back == bytes, "the echoed bytes differ from the sent ones");
        Ok(())
    }

    /// Sends `length` bytes and half-closes the connection. The server must respond with the sum of these
    /// bytes and close the connection.
    pub fn until_end(mut self, length: u64) -> Result<Sum> {
        self.send_request("POST /until-end HTTP/1.1", "")?;
        let sent = send(self.stream.get_mut(), length)?;
        self.half_close()?;
        let sum = check_sum(&sent, &self.read_body()?)?;
        self.expect_end()?;
        Ok(sum)
    }

    /// Half-closes the upgraded connection, and waits until the server closes it.
    pub fn close(mut self) -> Result<()> {
        self.half_close()?;
        self.expect_end()
    }

    fn half_close(&mut self) -> Result<()> {
        let stream = self.stream.get_mut();
        stream.conn.send_close_notify();
        stream.flush()?;
        Ok(stream.sock.shutdown(Shutdown::Write)?)
    }

    fn expect_end(&mut self) -> Result<()> {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        ensure!(rest.is_empty(), "{} bytes follow the response", rest.len());
        Ok(())
    }

    pub fn reset(mut self) -> Result<()> {
        self.send_request("GET /reset HTTP/1.1", "")?;
        match self.stream.read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            other => bail!("expected a connection reset, but read returned {other:?}"),
        }
    }

    /// Makes the server stall: it stops reading and writing on this connection.
    pub fn stall(&mut self) -> Result<()> {
        Ok(self.send_request("GET /stall HTTP/1.1", "")?)
    }
}

fn check_sum(sent: &Sum, counted: &str) -> Result<Sum> {
    let counted: Sum = counted.parse()?;
    ensure!(
        counted == *sent,
        "sent {sent}, but the server received {counted}"
    );
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fake_kubelet::server::FakeKubelet, sandbox::RESPONSE_TIMEOUT, wait};

    fn start() -> Result<(FakeKubelet, Arc<ClientConfig>)> {
        FakeKubelet::start("kubelet", IpAddr::from([127, 0, 0, 1]))
    }

    fn client(kubelet: &FakeKubelet, tls: Arc<ClientConfig>) -> Result<Client> {
        let socket = TcpStream::connect(kubelet.address())?;
        let client = Client::handshake(socket, kubelet.address().ip(), tls)?;
        client.set_timeout(RESPONSE_TIMEOUT)?;
        Ok(client)
    }

    /// Waits until the server has recorded that its first connection was closed, and returns the events on
    /// that connection.
    fn steps_until_closed(kubelet: &FakeKubelet) -> Result<Vec<String>> {
        let steps = || kubelet.exchanges().remove(0).steps;
        wait::until(RESPONSE_TIMEOUT, || {
            steps().last().is_some_and(|it| it == "closed")
        })?;
        Ok(steps())
    }

    #[test]
    fn client_and_server_agree_on_requests_bodies_and_a_half_close() -> Result<()> {
        let (kubelet, tls) = start()?;
        let mut client = client(&kubelet, tls)?;

        client.healthz()?;
        let got = client.bytes(200_000)?;
        let sent = client.sum(200_000)?;
        client.echo("hello")?;
        let half = client.until_end(100_000)?;

        assert_eq!(got, sent);
        let expected = [
            "GET /healthz",
            "GET /bytes/200000",
            "sent 200000",
            "POST /sum",
            &format!("read {sent}"),
            "POST /echo",
            "echoed 5",
            "POST /until-end",
            &format!("the client ended its half: {half}"),
            "closed",
        ];
        assert_eq!(steps_until_closed(&kubelet)?, expected);
        Ok(())
    }

    #[test]
    fn an_upgrade_stays_open_and_ends_with_its_client() -> Result<()> {
        let (kubelet, tls) = start()?;
        let mut client = client(&kubelet, tls)?;
        assert!(client.subject().contains("kubelet"));

        client.upgrade()?;
        for _ in 0..3 {
            client.exchange(b"ping")?;
        }
        client.close()?;

        let steps = steps_until_closed(&kubelet)?;
        assert_eq!(steps, ["GET /upgrade", "upgraded", "echoed 12", "closed"]);
        Ok(())
    }

    #[test]
    fn a_reset_is_seen_as_one_and_another_authority_is_not_trusted() -> Result<()> {
        let (kubelet, tls) = start()?;
        client(&kubelet, tls)?.reset()?;

        let (_other, foreign) = start()?;
        client(&kubelet, foreign).expect_err("a foreign certificate");
        Ok(())
    }
}
