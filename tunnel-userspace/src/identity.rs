//! Who the ends of the tunnel are: the CA that makes their certificates, the store that reads and
//! watches them, and the TLS settings made from them.

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

/// The protocol that both ends must name in the handshake (RFC 7301).
///
/// rustls refuses a peer that names others, but not one that names none: after a handshake,
/// compare the protocol of the connection with this, and close it if it is another or none.
pub const ALPN: &[u8] = b"culvert/1";

/// What an agent asks for, whatever address it dials: the DNS name in every gateway's certificate.
const GATEWAY_NAME: &str = "gateway.culvert.dev";

/// The organisation (O) in the subject of a gateway's certificate.
const GATEWAYS: &str = "culvert:gateways";

/// The organisation (O) in the subject of an agent's certificate.
const AGENTS: &str = "culvert:agents";

/// An end of the tunnel.
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

/// The PEM files of an end.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// The authorities that the other end's certificate must come from.
    pub ca: PathBuf,
    /// The certificate of this end, and what is between it and the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}
