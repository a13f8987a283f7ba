//! Sends requests to the API server over a single connection, so that each response can be timed.

use std::{
    io::{BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use anyhow::{Result, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tunnel_tests::{http::ResponseHead, pki::provider, sandbox::Sandbox};

use super::pki::Pki;

/// A connection to the API server, authenticated as the administrator.
pub struct ApiClient {
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
    host: String,
}

impl ApiClient {
    /// Connects to the API server from a sandbox.
    pub(super) fn connect(from: &Sandbox, to: SocketAddr, pki: &Pki) -> Result<Self> {
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

    /// Returns an object.
    pub fn get(&mut self, path: &str) -> Result<String> {
        self.request("GET", path, "application/json", "")
    }

    /// Creates an object.
    pub fn post(&mut self, path: &str, body: &str) -> Result<()> {
        self.request("POST", path, "application/json", body)
            .map(drop)
    }

    /// Changes an object with a JSON merge patch (RFC 7386).
    pub fn patch(&mut self, path: &str, body: &str) -> Result<()> {
        self.request("PATCH", path, "application/merge-patch+json", body)
            .map(drop)
    }

    /// Sends a request, and returns the body of the response. Returns an error unless the response's status is 2xx.
    fn request(&mut self, method: &str, path: &str, kind: &str, body: &str) -> Result<String> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        let stream = self.stream.get_mut();
        stream.write_all(request.as_bytes())?;
        stream.flush()?;
        let head = ResponseHead::read(&mut self.stream)?;
        let (status, body) = (head.status, head.body(&mut self.stream)?);
        ensure!(
            (200..300).contains(&status),
            "{method} {path}: status {status}: {body}"
        );
        Ok(body)
    }
}
