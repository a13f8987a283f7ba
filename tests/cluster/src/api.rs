//! Requests to the API server over one connection, whose answers can be timed.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tunnel_tests::{pki::provider, place::Place};

use super::pki::Pki;

/// The longest line of an answer's head.
const LINE: u64 = 64 << 10;

/// A connection of the administrator's.
pub struct Api {
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
    host: String,
}

impl Api {
    /// Connects from a place.
    pub(super) fn connect(from: &Place, to: SocketAddr, pki: &Pki) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(pki.file("ca.crt"))?)?;
        let chain = CertificateDer::pem_file_iter(pki.file("admin.crt"))?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(
                chain.collect::<Result<_, _>>()?,
                PrivateKeyDer::from_pem_file(pki.file("admin.key"))?,
            )?;
        let name = ServerName::IpAddress(to.ip().into());
        let connection = ClientConnection::new(Arc::new(config), name)?;
        let stream = from.connect(to)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(StreamOwned::new(connection, stream)),
            host: to.to_string(),
        })
    }

    /// Makes an object.
    ///
    /// # Errors
    ///
    /// When the server refuses it.
    pub fn post(&mut self, path: &str, body: &str) -> Result<()> {
        self.ask("POST", path, "application/json", body)
    }

    /// Changes an object (RFC 7386).
    ///
    /// # Errors
    ///
    /// When the server refuses it.
    pub fn patch(&mut self, path: &str, body: &str) -> Result<()> {
        self.ask("PATCH", path, "application/merge-patch+json", body)
    }

    fn ask(&mut self, method: &str, path: &str, kind: &str, body: &str) -> Result<()> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        let stream = self.stream.get_mut();
        stream.write_all(request.as_bytes())?;
        stream.flush()?;
        let (status, answer) = self.answer().context("the answer makes no sense")?;
        ensure!(
            (200..300).contains(&status),
            "{method} {path}: {status} {answer}"
        );
        Ok(())
    }

    /// The status and the body of an answer.
    fn answer(&mut self) -> Result<(u16, String)> {
        let head = self.line()?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        let (mut length, mut is_chunked) = (0, false);
        loop {
            let line = self.line()?.to_ascii_lowercase();
            match line.split_once(':') {
                Some(("content-length", value)) => length = value.trim().parse()?,
                Some(("transfer-encoding", value)) => is_chunked = value.trim() == "chunked",
                Some(_) => {}
                None => break,
            }
        }
        let mut body = self.exactly(length)?;
        while is_chunked {
            let size = usize::from_str_radix(&self.line()?, 16)?;
            body.extend(self.exactly(size)?);
            self.line()?;
            is_chunked = size > 0;
        }
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    }

    fn exactly(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let mut limited = (&mut self.stream).take(LINE);
        limited.read_line(&mut line)?;
        ensure!(line.ends_with('\n'), "a line breaks off");
        Ok(line.trim_end().to_owned())
    }
}
