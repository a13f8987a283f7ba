//! Why a set of files can't be used: the file, and the reason.

use std::{io, path::PathBuf};

use jiff::Timestamp;

use super::Role;

/// A file that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct Rejected {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: Reason,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// The system refuses to read it.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// It is a folder, a pipe, a device.
    #[error("is not a file")]
    NotAFile,
    /// It is larger than any such file.
    #[error("is too large for a file of keys or certificates")]
    TooLarge,
    /// There is nothing in it.
    #[error("is empty")]
    Empty,
    /// It is not what it should be: PEM, or what is in it.
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
    /// Its key needs a password.
    #[error("is encrypted; the key must be plain")]
    EncryptedKey,
    /// The key is of a kind that can't be used.
    #[error("has a key that can't be used: {0}")]
    KeyRefused(String),
    /// Its certificate is valid no more.
    #[error("expired on {0}")]
    Expired(Timestamp),
    /// Its certificate is not valid yet.
    #[error("is not valid before {0}")]
    NotYetValid(Timestamp),
    /// One of its certificates may not issue others.
    #[error("has a certificate that is not an authority's: {0}")]
    NotAuthority(String),
    /// The certificate comes from another authority than those that are trusted.
    #[error("was issued by another CA: {issuer}")]
    OtherAuthority {
        /// What the certificate says its issuer is.
        issuer: String,
    },
    /// The key belongs to another certificate.
    #[error("does not belong to the certificate")]
    OtherKey,
    /// The certificate is for the other end.
    #[error("is the certificate of {}, not of {}", one(*is), one(*wanted))]
    OtherRole {
        /// Whose it is.
        is: Role,
        /// Whose it should be.
        wanted: Role,
    },
    /// The certificate is not one of the tunnel, or not a whole one.
    #[error("can't be used: {0}")]
    Unfit(String),
    /// TLS refuses it.
    #[error("can't be used: {0}")]
    Refused(String),
}

const fn one(role: Role) -> &'static str {
    match role {
        Role::Gateway => "a gateway",
        Role::Agent => "an agent",
    }
}
