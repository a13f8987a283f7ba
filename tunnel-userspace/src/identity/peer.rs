//! Who the other end is.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;

use super::{Role, certificate::Facts};

/// An agent, as its certificate names it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    /// The node that it serves.
    pub node: Arc<str>,
    /// When its certificate expires.
    pub expires: Timestamp,
}

/// A certificate that is no agent's, though a trusted authority issued it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not the certificate of an agent: {0}")]
pub struct PeerError(String);

/// Who an agent is, from its certificate. The handshake must have verified that.
///
/// # Errors
///
/// It is not an agent's: the organisation must be `culvert:agents`, the common name a Node's, and
/// the extended key usage that of a client.
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
