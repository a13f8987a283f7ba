//! Errors for invalid certificate and key files.

use std::{io, path::PathBuf};

use jiff::Timestamp;

use super::{Role, clock, pem_files};

/// The error for an invalid certificate or key file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct FileError {
    /// The path of the file.
    pub path: PathBuf,
    /// The problem with the file.
    pub problem: FileProblem,
}

impl FileError {
    /// Returns the message without the time of the clock, which changes all the time.
    pub(super) fn lasting_part(&self) -> String {
        let path = self.path.display();
        if let FileProblem::Expired { at, .. } = self.problem {
            format!("{path}: expired on {at}")
        } else if let FileProblem::NotYetValid { from, .. } = self.problem {
            format!("{path}: not valid before {from}")
        } else {
            self.to_string()
        }
    }
}

/// A problem with a certificate or key file.
#[derive(Debug, thiserror::Error)]
pub enum FileProblem {
    /// The file can't be read.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// The path is a directory, a pipe or a device.
    #[error("is a directory, pipe or device; a regular file is expected")]
    NotAFile,
    /// The file exceeds the size limit.
    #[error(
        "is larger than {} bytes, the limit for such files",
        pem_files::MAX_SIZE
    )]
    TooLarge,
    /// The file has no content.
    #[error("is empty; a PEM file is expected")]
    Empty,
    /// A PEM section is malformed.
    #[error("is damaged: {0}")]
    Damaged(String),
    /// A line of the file is invalid.
    #[error("line {0}: {1}")]
    InvalidLine(usize, String),
    /// The file has no certificate.
    #[error("contains no certificate; a PEM section `CERTIFICATE` is expected")]
    NoCertificate,
    /// The file has no private key.
    #[error("contains no private key; a PEM section `PRIVATE KEY` is expected")]
    NoKey,
    /// The file has more than one private key.
    #[error("contains more than one private key; exactly one is expected")]
    MultipleKeys,
    /// The private key is encrypted.
    #[error("contains an encrypted private key; decrypt it, for example with: openssl pkey")]
    EncryptedKey,
    /// The private key is malformed or of an unsupported type.
    #[error("contains a private key that can't be used: {0}")]
    UnusableKey(String),
    /// The certificate has expired.
    #[error("expired on {at}, and {}; replace it by a valid one", clock::describe(*now))]
    Expired {
        /// The time when the certificate expired.
        at: Timestamp,
        /// The time as of which it was verified.
        now: Timestamp,
    },
    /// The certificate is not valid yet.
    #[error("is not valid before {from}, and {}; check the clock", clock::describe(*now))]
    NotYetValid {
        /// The time when the certificate becomes valid.
        from: Timestamp,
        /// The time as of which it was verified.
        now: Timestamp,
    },
    /// A certificate in the file of CA certificates is not a CA certificate.
    #[error("contains a certificate that is not that of a CA: {0}")]
    NotCa(String),
    /// The certificate was not issued by any of the trusted CAs.
    #[error("was issued by {issuer}, which is not a CA in {}", ca.display())]
    OtherIssuer {
        /// The issuer named in the certificate.
        issuer: String,
        /// The path of the file of CA certificates.
        ca: PathBuf,
    },
    /// The private key belongs to another certificate.
    #[error("does not match the certificate in {}", cert.display())]
    KeyMismatch {
        /// The path of the certificate file.
        cert: PathBuf,
    },
    /// The certificate is for the other role.
    #[error(
        "is the certificate of {}; expected the certificate of {}",
        found.with_article(), wanted.with_article()
    )]
    WrongRole {
        /// The role that the certificate is for.
        found: Role,
        /// The expected role.
        wanted: Role,
    },
    /// The certificate's subject, names or usages are wrong.
    #[error("can't be used: {0}")]
    WrongPurpose(String),
    /// The certificate is that of another node.
    #[error("is the certificate of node {0}; expected that of node {1}")]
    OtherNode(String, String),
    /// The TLS library rejects the certificate.
    #[error("is refused by the TLS library: {0}")]
    RefusedByTls(String),
}
