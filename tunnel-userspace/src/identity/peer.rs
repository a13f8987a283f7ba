//! The identity of the other end of a session, read from its certificate after a handshake.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::{Role, SerialNumber, ca::SKEW, certificate::ParsedCertificate};

/// An agent's identity.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    /// The name of the node that the agent runs on.
    pub node: Arc<str>,
    /// The serial number of the agent's certificate.
    pub serial: SerialNumber,
    /// The time when the agent's certificate expires.
    pub expires: Timestamp,
    /// The name of the CA that has issued the certificate.
    pub issuer: String,
}

/// The error for a certificate that is not an agent's.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the peer's certificate is not that of an agent: {0}")]
pub struct PeerError(String);

/// Reads an agent's identity from its certificate, which the handshake must already have verified.
///
/// # Errors
///
/// Returns an error if the certificate is not an agent's: its organisation must be `culvert:agents`, its
/// common name a valid Node name, and its extended key usage client authentication and nothing else.
pub fn identify_agent(leaf: &CertificateDer<'_>) -> Result<Peer, PeerError> {
    let certificate = ParsedCertificate::read(leaf).map_err(PeerError)?;
    if certificate.role().map_err(PeerError)? == Role::Gateway {
        return Err(PeerError("it is a gateway's".to_owned()));
    }
    let node = certificate.checked_name(Role::Agent).map_err(PeerError)?;
    Ok(Peer {
        node: Arc::from(node),
        serial: certificate.serial,
        expires: certificate.not_after,
        issuer: certificate.issuer,
    })
}

/// Returns the time when a certificate was issued, and when it expires. Returns `None` if the certificate can't be read.
#[must_use]
pub fn validity(certificate: &CertificateDer<'_>) -> Option<[Timestamp; 2]> {
    let parsed = ParsedCertificate::read(certificate).ok()?;
    let (from, expires) = (parsed.not_before, parsed.not_after);
    Some([issue_time(from, expires), expires])
}

/// Returns the time when a certificate was issued. Our own ones are valid from an hour before, but not from before their CA.
pub(super) fn issue_time(from: Timestamp, expires: Timestamp) -> Timestamp {
    let issued = from.checked_add(SKEW).ok();
    issued.filter(|issued| *issued < expires).unwrap_or(from)
}
