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
#[error("not the certificate of an agent: {reason}")]
pub struct PeerError {
    reason: String,
}

/// Who an agent is, from its certificate. The handshake must have verified that.
///
/// # Errors
///
/// It is not an agent's: the organisation must be `culvert:agents`, the common name a Node's, and
/// the extended key usage that of a client.
pub fn agent_of(leaf: &CertificateDer<'_>) -> Result<Peer, PeerError> {
    let failed = |reason| PeerError { reason };
    let facts = Facts::read(leaf).map_err(failed)?;
    match facts.role().map_err(failed)? {
        Role::Agent => {}
        Role::Gateway => return Err(failed("it is a gateway's".to_owned())),
    }
    let node = facts.name(Role::Agent).map_err(failed)?;
    Ok(Peer {
        node: Arc::from(node),
        expires: facts.until,
    })
}
