//! The identity of the other end.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::{Role, certificate::Facts};

/// An agent as identified by its certificate.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    /// The node that the agent serves.
    pub node: Arc<str>,
    /// The time when its certificate expires.
    pub expires: Timestamp,
}

/// A certificate of a trusted authority that is not an agent's.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not the certificate of an agent: {0}")]
pub struct PeerError(String);

/// Identifies an agent by its certificate, which the handshake must have verified.
///
/// # Errors
///
/// If it is not an agent's: the organisation must be `culvert:agents`, the common name a valid Node
/// name, and the extended key usage that of a client.
pub fn agent_of(leaf: &CertificateDer<'_>) -> Result<Peer, PeerError> {
    let facts = Facts::read(leaf).map_err(PeerError)?;
    if facts.role().map_err(PeerError)? == Role::Gateway {
        return Err(PeerError("it is a gateway's".to_owned()));
    }
    let node = facts.name(Role::Agent).map_err(PeerError)?;
    Ok(Peer {
        node: Arc::from(node),
        expires: facts.until,
    })
}
