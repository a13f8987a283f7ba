//! The identity of an agent, read from its certificate after a handshake.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::{Role, certificate::ParsedCertificate};

/// The identity of an agent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    /// The node that the agent serves.
    pub node: Arc<str>,
    /// The time when the agent's certificate expires.
    pub expires: Timestamp,
}

/// The error for a certificate that is not an agent's.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the peer's certificate is not that of an agent: {0}")]
pub struct PeerError(String);

/// Returns the identity of an agent from its certificate, which the handshake must have verified.
///
/// # Errors
///
/// The certificate is not an agent's: the organisation must be `culvert:agents`, the common name a valid
/// Node name, and the extended key usage client authentication.
pub fn identify_agent(leaf: &CertificateDer<'_>) -> Result<Peer, PeerError> {
    let certificate = ParsedCertificate::read(leaf).map_err(PeerError)?;
    if certificate.role().map_err(PeerError)? == Role::Gateway {
        return Err(PeerError("it is a gateway's".to_owned()));
    }
    let node = certificate.checked_name(Role::Agent).map_err(PeerError)?;
    Ok(Peer {
        node: Arc::from(node),
        expires: certificate.not_after,
    })
}
