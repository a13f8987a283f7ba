//! The identities of the tunnel's ends: the CA that issues their certificates, the store that reads and
//! watches the files, and the TLS settings built from them.

pub mod ca;
mod certificate;
mod files;
mod name;
mod peer;
mod rejected;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod tls;

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use self::{
    name::{NameError, check_node_name, is_subdomain},
    peer::{Peer, PeerError, agent_of},
    rejected::{Reason, Rejected},
    store::{Receiver, State, Store},
    tls::Identity,
};

/// The ALPN protocol that both ends must offer in the handshake (RFC 7301).
///
/// rustls refuses a peer that offers only others, but not one that offers none. After a handshake
/// compare the negotiated protocol with this one, and close the connection if it differs.
pub const ALPN: &[u8] = b"culvert/1";

/// The DNS name in every gateway's certificate. Agents verify this name, whatever address they dial.
const GATEWAY_NAME: &str = "gateway.culvert.dev";

/// The organisation (O) in the subject of a gateway's certificate.
const GATEWAYS: &str = "culvert:gateways";

/// The organisation (O) in the subject of an agent's certificate.
const AGENTS: &str = "culvert:agents";

/// The role of an end of the tunnel.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The end that is dialled.
    Gateway,
    /// The end that dials, on an edge node.
    Agent,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gateway => "gateway",
            Self::Agent => "agent",
        })
    }
}

/// The PEM files of an end of the tunnel.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// The CA certificates that the other end's certificate must chain to.
    pub ca: PathBuf,
    /// The certificate of this end, and any intermediate certificates.
    pub cert: PathBuf,
    /// The private key of this end.
    pub key: PathBuf,
}
