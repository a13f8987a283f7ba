//! Why a set of files can't be used: the file, and the reason.

use std::{fmt, io, path::PathBuf};

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
#[derive(Debug)]
pub enum Reason {
    /// The system refuses to read it.
    Unreadable(io::Error),
    /// It is a folder, a pipe, a device.
    NotAFile,
    /// It is larger than any such file.
    TooLarge,
    /// There is nothing in it.
    Empty,
    /// It is not what it should be: PEM, or what is in it.
    Damaged(String),
    /// It has no certificate.
    NoCertificate,
    /// It has no private key.
    NoKey,
    /// It has more than one private key.
    ManyKeys,
    /// Its key needs a password.
    EncryptedKey,
    /// The key is of a kind that can't be used.
    KeyRefused(String),
    /// Its certificate is valid no more.
    Expired(Timestamp),
    /// Its certificate is not valid yet.
    NotYetValid(Timestamp),
    /// One of its certificates may not issue others.
    NotAuthority(String),
    /// The certificate comes from another authority than those that are trusted.
    OtherAuthority {
        /// What the certificate says its issuer is.
        issuer: String,
    },
    /// The key belongs to another certificate.
    OtherKey,
    /// The certificate is for the other end.
    OtherRole {
        /// Whose it is.
        is: Role,
        /// Whose it should be.
        wanted: Role,
    },
    /// The certificate is not one of the tunnel, or not a whole one.
    Unfit(String),
    /// TLS refuses it.
    Refused(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "cannot be read: {error}"),
            Self::NotAFile => f.write_str("is not a file"),
            Self::TooLarge => f.write_str("is too large for a file of keys or certificates"),
            Self::Empty => f.write_str("is empty"),
            Self::Damaged(how) => write!(f, "is damaged: {how}"),
            Self::NoCertificate => f.write_str("has no certificate in it"),
            Self::NoKey => f.write_str("has no private key in it"),
            Self::ManyKeys => f.write_str("has more than one private key in it"),
            Self::EncryptedKey => f.write_str("is encrypted; the key must be plain"),
            Self::KeyRefused(why) => write!(f, "has a key that can't be used: {why}"),
            Self::Expired(at) => write!(f, "expired on {at}"),
            Self::NotYetValid(at) => write!(f, "is not valid before {at}"),
            Self::NotAuthority(subject) => {
                write!(f, "has a certificate that is not an authority's: {subject}")
            }
            Self::OtherAuthority { issuer } => {
                write!(f, "was issued by another CA: {issuer}")
            }
            Self::OtherKey => f.write_str("does not belong to the certificate"),
            Self::OtherRole { is, wanted } => {
                write!(
                    f,
                    "is the certificate of {}, not of {}",
                    one(*is),
                    one(*wanted)
                )
            }
            Self::Unfit(why) | Self::Refused(why) => write!(f, "can't be used: {why}"),
        }
    }
}

const fn one(role: Role) -> &'static str {
    match role {
        Role::Gateway => "a gateway",
        Role::Agent => "an agent",
    }
}
