//! The certificates of gateways and agents: the built-in CA that issues them, the store that reads and
//! watches their files, the TLS settings built from them, and the gateway's deny list.

pub mod ca;
mod certificate;
pub mod clock;
mod deny_list;
mod deny_verifier;
mod file_poll;
mod file_problem;
mod key_directory;
mod late_clock_verifier;
mod node_name;
mod peer;
mod pem_files;
pub mod request;
pub mod requester;
mod serial_number;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod tls;

use std::{fmt, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::{
    deny_list::{DeniedAgent, DenyList, DenyListReceiver, DenyListState, DenyListStore},
    deny_verifier::HandshakeDenial,
    file_problem::{FileError, FileProblem},
    node_name::{NameError, check_node_name, is_subdomain},
    peer::{Peer, PeerError, identify_agent, validity},
    serial_number::SerialNumber,
    store::{CertificateReceiver, CertificateState, CertificateStore},
    tls::{Identity, describe},
};

/// The ALPN protocol (RFC 7301) that both the gateway and the agent must offer in the handshake.
///
/// rustls refuses a peer that offers only other protocols, but not a peer that offers none. After the
/// handshake, the negotiated protocol must therefore be compared with this one, and the connection closed if
/// they differ.
pub const ALPN: &[u8] = b"culvert/1";

/// The DNS name in every gateway's certificate. Agents verify this name, not the address that they dial.
pub(crate) const GATEWAY_NAME: &str = "gateway.culvert.dev";

/// A role in the tunnel.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Accepts connections from agents.
    Gateway,
    /// Connects to gateways from an edge node.
    Agent,
}

impl Role {
    /// Returns the organisation (O) in the subjects of the role's certificates.
    pub(crate) const fn organization(self) -> &'static str {
        match self {
            Self::Gateway => "culvert:gateways",
            Self::Agent => "culvert:agents",
        }
    }

    /// Returns the name of the role.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Agent => "agent",
        }
    }

    /// Returns the usages of the key in a request for the role's certificate (`spec.usages` of a CertificateSigningRequest).
    pub(crate) const fn usages(self) -> [&'static str; 2] {
        match self {
            Self::Gateway => ["digital signature", "server auth"],
            Self::Agent => ["digital signature", "client auth"],
        }
    }

    /// Returns the name of the role with its article.
    pub(crate) const fn with_article(self) -> &'static str {
        match self {
            Self::Gateway => "a gateway",
            Self::Agent => "an agent",
        }
    }

    /// Returns the name of the signer of the role's certificates (`spec.signerName` of a CertificateSigningRequest).
    pub(crate) const fn signer(self) -> &'static str {
        match self {
            Self::Gateway => "culvert.dev/tunnel-gateway",
            Self::Agent => "culvert.dev/tunnel-agent",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// The paths of a gateway's or agent's PEM files.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct IdentityFiles {
    /// The file with the trusted CA certificates. The peer's certificate must chain to one of them.
    pub ca: PathBuf,
    /// The file with this process's certificate and any intermediate certificates.
    pub cert: PathBuf,
    /// The file with the certificate's private key.
    pub key: PathBuf,
}
