//! The client, over a socket that was made and connected elsewhere.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use x509_parser::parse_x509_certificate;

use super::{FIRST, Sum, Summing, header, pattern};

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A connection to a server, past its handshake.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<Tls>,
    subject: String,
}

impl Client {
    /// Makes the handshake, as a client that dialled `address` and trusts what `tls` does.
    ///
    /// # Errors
    ///
    /// When the server can't prove that the address is its own.
    pub fn over(mut socket: TcpStream, address: IpAddr, tls: Arc<ClientConfig>) -> Result<Self> {
        socket.set_nodelay(true)?;
        let name = ServerName::IpAddress(address.to_canonical().into());
        let mut connection = ClientConnection::new(tls, name)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut socket).context("handshake")?;
        }
        let chain = connection.peer_certificates().unwrap_or_default();
        let leaf = chain.first().context("the server has no certificate")?;
        let (_, leaf) = parse_x509_certificate(leaf)?;
        let subject = leaf.subject().to_string();
        Ok(Self {
            stream: BufReader::with_capacity(64 * 1024, StreamOwned::new(connection, socket)),
            subject,
        })
    }

    /// Whom the server's certificate is for.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.stream.get_ref().sock
    }

    /// The address that the socket shows as its peer.
    ///
    /// # Errors
    ///
    /// With the kernel's error.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.socket().peer_addr()
    }

    /// Bounds each later read and write.
    ///
    /// # Errors
    ///
    /// With the kernel's error.
    pub fn patience(&self, within: Duration) -> io::Result<()> {
        self.socket().set_read_timeout(Some(within))?;
        self.socket().set_write_timeout(Some(within))
    }

    fn ask(&mut self, request: &str) -> io::Result<()> {
        let stream = self.stream.get_mut();
        stream.write_all(request.as_bytes())?;
        stream.flush()
    }

    fn head(&mut self) -> Result<String> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.stream.read_line(&mut head)? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(head)
    }

    /// The length of the body that follows; the answer must be a success.
    fn length(&mut self) -> Result<u64> {
        let head = self.head()?;
        ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let length = header(&head, "content-length").context("a body without length")?;
        Ok(length.parse()?)
    }

    fn body(&mut self) -> Result<String> {
        let length = usize::try_from(self.length()?)?;
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok(String::from_utf8(body)?)
    }

    /// Asks whether it is well.
    ///
    /// # Errors
    ///
    /// When no good answer comes.
    pub fn healthz(&mut self) -> Result<String> {
        self.ask("GET /healthz HTTP/1.1\r\nhost: lab\r\n\r\n")?;
        self.body()
    }

    /// Gets a body of this length.
    ///
    /// # Errors
    ///
    /// When it doesn't come whole, or isn't the pattern.
    pub fn bytes(&mut self, length: u64) -> Result<Sum> {
        self.ask(&format!(
            "GET /bytes/{length} HTTP/1.1\r\nhost: lab\r\n\r\n"
        ))?;
        let announced = self.length()?;
        ensure!(announced == length, "{announced} bytes for {length}");
        let mut summing = Summing::default();
        while summing.bytes() < length {
            let part = self.stream.fill_buf()?;
            let most = usize::try_from(length - summing.bytes()).unwrap_or(usize::MAX);
            let part = &part[..part.len().min(most)];
            ensure!(!part.is_empty(), "cut off after {} bytes", summing.bytes());
            summing.add(part);
            let used = part.len();
            self.stream.consume(used);
        }
        Ok(summing.sum())
    }

    fn send(&mut self, length: u64) -> Result<Sum> {
        let pattern = pattern();
        let mut summing = Summing::default();
        while summing.bytes() < length {
            let left = usize::try_from(length - summing.bytes()).unwrap_or(usize::MAX);
            let part = &pattern[..pattern.len().min(left)];
            self.stream.get_mut().write_all(part)?;
            summing.add(part);
        }
        self.stream.get_mut().flush()?;
        Ok(summing.sum())
    }

    /// Sends a body of this length; what the server counted must be what was sent.
    ///
    /// # Errors
    ///
    /// When it isn't, or no answer comes.
    pub fn sum(&mut self, length: u64) -> Result<Sum> {
        self.ask(&format!(
            "POST /sum HTTP/1.1\r\nhost: lab\r\ncontent-length: {length}\r\n\r\n"
        ))?;
        let sent = self.send(length)?;
        agree(&sent, &self.body()?)
    }

    /// Has a short text sent back.
    ///
    /// # Errors
    ///
    /// When something else comes.
    pub fn echo(&mut self, text: &str) -> Result<()> {
        let length = text.len();
        self.ask(&format!(
            "POST /echo HTTP/1.1\r\nhost: lab\r\ncontent-length: {length}\r\n\r\n{text}"
        ))?;
        let echoed = self.body()?;
        ensure!(echoed == text, "{echoed:?} for {text:?}");
        Ok(())
    }

    /// Upgrades the connection; the server's first bytes come in the segment of its answer.
    ///
    /// # Errors
    ///
    /// When no upgrade comes.
    pub fn upgrade(&mut self) -> Result<String> {
        self.ask(
            "GET /upgrade HTTP/1.1\r\nhost: lab\r\nconnection: Upgrade\r\nupgrade: lab\r\n\r\n",
        )?;
        let head = self.head()?;
        ensure!(head.starts_with("HTTP/1.1 101 "), "{head}");
        let mut first = vec![0; FIRST.len()];
        self.stream.read_exact(&mut first)?;
        ensure!(first == FIRST, "other first bytes: {first:?}");
        Ok(String::from_utf8(first)?)
    }

    /// Has bytes sent back on an upgraded connection.
    ///
    /// # Errors
    ///
    /// When other bytes come.
    pub fn exchange(&mut self, bytes: &[u8]) -> Result<()> {
        let stream = self.stream.get_mut();
        stream.write_all(bytes)?;
        stream.flush()?;
        let mut back = vec![0; bytes.len()];
        self.stream.read_exact(&mut back)?;
        ensure!(back == bytes, "other bytes came back");
        Ok(())
    }

    /// Sends so many bytes and ends the own half; then the server tells what it counted, and ends.
    ///
    /// # Errors
    ///
    /// When it counted something else, or doesn't end.
    pub fn until_end(mut self, length: u64) -> Result<Sum> {
        self.ask("POST /until-end HTTP/1.1\r\nhost: lab\r\n\r\n")?;
        let sent = self.send(length)?;
        self.end_half()?;
        let sum = agree(&sent, &self.body()?)?;
        self.end()?;
        Ok(sum)
    }

    /// Ends the own half of an upgraded connection, and waits for the end of the other.
    ///
    /// # Errors
    ///
    /// When something else than the end comes.
    pub fn close(mut self) -> Result<()> {
        self.end_half()?;
        self.end()
    }

    fn end_half(&mut self) -> Result<()> {
        let stream = self.stream.get_mut();
        stream.conn.send_close_notify();
        stream.flush()?;
        Ok(stream.sock.shutdown(Shutdown::Write)?)
    }

    fn end(&mut self) -> Result<()> {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        ensure!(rest.is_empty(), "{} bytes after the answer", rest.len());
        Ok(())
    }

    /// Asks for a reset.
    ///
    /// # Errors
    ///
    /// When anything else comes of it.
    pub fn reset(mut self) -> Result<()> {
        self.ask("GET /reset HTTP/1.1\r\nhost: lab\r\n\r\n")?;
        match self.stream.read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(()),
            other => bail!("{other:?} for a reset"),
        }
    }

    /// Asks for silence: from now on the server reads and writes nothing.
    ///
    /// # Errors
    ///
    /// When the request can't be sent.
    pub fn stall(&mut self) -> Result<()> {
        Ok(self.ask("GET /stall HTTP/1.1\r\nhost: lab\r\n\r\n")?)
    }
}

fn agree(sent: &Sum, counted: &str) -> Result<Sum> {
    let counted: Sum = counted.parse()?;
    ensure!(counted == *sent, "sent {sent}, but {counted} came");
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::{
        kubelet::serve::Kubelet,
        pki::{Authority, Files},
        place::ANSWER,
        wait,
    };

    const PATIENCE: Duration = Duration::from_secs(10);

    struct Stage {
        kubelet: Kubelet,
        tls: Arc<ClientConfig>,
        _folder: tempfile::TempDir,
    }

    impl Stage {
        fn new() -> Result<Self> {
            let folder = tempfile::tempdir()?;
            let authority = Authority::new("lab")?;
            let files = Files::of(folder.path(), "kubelet");
            let address = IpAddr::from([127, 0, 0, 1]);
            files.write(&authority.pem(), &authority.server("kubelet", &[address])?)?;
            let listener = TcpListener::bind((address, 0))?;
            Ok(Self {
                kubelet: Kubelet::start(listener, files.server()?)?,
                tls: files.client()?,
                _folder: folder,
            })
        }

        fn client(&self) -> Result<Client> {
            let address = self.kubelet.address();
            let socket = TcpStream::connect(address)?;
            let client = Client::over(socket, address.ip(), Arc::clone(&self.tls))?;
            client.patience(PATIENCE)?;
            Ok(client)
        }
    }

    #[test]
    fn both_ends_tell_the_same_of_requests_bodies_and_a_half_close() -> Result<()> {
        let stage = Stage::new()?;
        let mut client = stage.client()?;

        client.healthz()?;
        let got = client.bytes(200_000)?;
        let sent = client.sum(200_000)?;
        client.echo("hello")?;
        client.until_end(100_000)?;

        assert_eq!(got, sent);
        // The other end may come to its last step a little later.
        let steps = || stage.kubelet.exchanges().remove(0).steps;
        wait::until(ANSWER, || {
            steps()
                .last()
                .is_some_and(|step| step.starts_with("closed"))
        })?;
        let steps = steps();
        let first_words: Vec<_> = steps
            .iter()
            .map(|step| step.split(' ').next().unwrap_or_default())
            .collect();
        assert_eq!(
            first_words,
            [
                "GET", "GET", "sent", "POST", "read", "POST", "echoed", "POST", "the", "closed"
            ]
        );
        Ok(())
    }

    #[test]
    fn an_upgrade_stays_open_and_ends_with_its_client() -> Result<()> {
        let stage = Stage::new()?;
        let mut client = stage.client()?;
        assert!(client.subject().contains("kubelet"));

        client.upgrade()?;
        for _ in 0..3 {
            client.exchange(b"ping")?;
        }
        client.close()?;

        // The other end may hear of it a little later.
        let steps = || stage.kubelet.exchanges().remove(0).steps;
        wait::until(ANSWER, || {
            steps().last().is_some_and(|step| step == "closed")
        })?;
        assert_eq!(steps(), ["GET /upgrade", "upgraded", "echoed 12", "closed"]);
        Ok(())
    }

    #[test]
    fn a_reset_is_seen_as_one_and_another_authority_is_not_trusted() -> Result<()> {
        let mut stage = Stage::new()?;
        stage.client()?.reset()?;

        stage.tls = Stage::new()?.tls;

        stage.client().expect_err("a foreign certificate");
        Ok(())
    }
}
