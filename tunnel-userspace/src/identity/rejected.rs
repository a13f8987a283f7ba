//! The reasons to reject a set of identity files.

use std::{io, path::PathBuf};

use jiff::Timestamp;

use super::Role;

/// A file that was rejected.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct Rejected {
    /// The file.
    pub path: PathBuf,
    /// The problem with the file.
    pub reason: Reason,
}

/// The problem with a file.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// Reading it fails.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// It is a folder, a pipe or a device.
    #[error("is not a file")]
    NotAFile,
    /// It exceeds the size limit of such files.
    #[error("is too large for a file of keys or certificates")]
    TooLarge,
    /// It has no content.
    #[error("is empty")]
    Empty,
    /// Its PEM, or the object in it, is malformed.
    #[error("is damaged: {0}")]
    Damaged(String),
    /// It has no certificate.
    #[error("has no certificate in it")]
    NoCertificate,
    /// It has no private key.
    #[error("has no private key in it")]
    NoKey,
    /// It has more than one private key.
    #[error("has more than one private key in it")]
    ManyKeys,
    /// Its key is encrypted.
    #[error("is encrypted; the key must be plain")]
    EncryptedKey,
    /// The key is malformed or of an unsupported type.
    #[error("has a key that can't be used: {0}")]
    KeyRefused(String),
    /// Its certificate has expired.
    #[error("expired on {0}")]
    Expired(Timestamp),
    /// Its certificate is not valid yet.
    #[error("is not valid before {0}")]
    NotYetValid(Timestamp),
    /// One of its certificates is not that of a CA.
    #[error("has a certificate that is not an authority's: {0}")]
    NotAuthority(String),
    /// The certificate was issued by an untrusted authority.
    #[error("was issued by another CA: {issuer}")]
    OtherAuthority {
        /// The issuer named in the certificate.
        issuer: String,
    },
    /// The key belongs to another certificate.
    #[error("does not belong to the certificate")]
    OtherKey,
    /// The certificate is for the other role.
    #[error("is the certificate of {}, not of {}", one(*is), one(*wanted))]
    OtherRole {
        /// The role of the certificate.
        is: Role,
        /// The expected role.
        wanted: Role,
    },
    /// The certificate is not one of the tunnel, or lacks something.
    #[error("can't be used: {0}")]
    Unfit(String),
    /// The TLS library rejects it.
    #[error("can't be used: {0}")]
    Refused(String),
}

const fn one(role: Role) -> &'static str {
    match role {
        Role::Gateway => "a gateway",
        Role::Agent => "an agent",
    }
}
