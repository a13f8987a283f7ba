//! The built-in CA behind `culvert ca`: creates a CA, issues certificates to gateways and agents, and stores
//! them in files.

mod authority;
mod certificate_view;

use std::{
    io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

use self::authority::days_duration;
pub use self::{
    authority::{Authority, SKEW, check_cas},
    certificate_view::{CertificateKind, CertificateView, certificate_files, read_certificates},
};
use super::{
    FileError, Identity, IdentityFiles, NameError, Role, check_node_name,
    key_directory::{self, lock, replace_files},
    pem_files::FileContents,
};

/// The default validity period of a CA, in days.
pub const DEFAULT_CA_DAYS: u32 = 3650;

/// The default validity period of a certificate, in days.
pub const DEFAULT_DAYS: u32 = 365;

/// The maximum validity period of a CA or certificate, in days.
pub const MAX_DAYS: u32 = 36_500;

/// An error from a CA operation.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// The directory already has a CA.
    #[error(
        "{} already exists. An existing CA is never overwritten, because the certificates it issued would \
        no longer be trusted. Choose another directory with --dir, or move this one elsewhere",
        path.display()
    )]
    Exists {
        /// The file that already exists.
        path: PathBuf,
    },
    /// The directory has no CA.
    #[error(
        "there is no CA in {}; create one with: culvert ca init --dir {}",
        dir.display(), dir.display()
    )]
    NoCa {
        /// The directory.
        dir: PathBuf,
    },
    /// The node name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The requested validity period is out of range.
    #[error("--days is {days}; it must be from 1 to {MAX_DAYS}")]
    Days {
        /// The requested number of days.
        days: u32,
    },
    /// One of the CA's files, or a newly issued certificate, is not valid.
    #[error(transparent)]
    File(#[from] FileError),
    /// None of the certificates in the CA's certificate file matches the CA's private key.
    #[error(
        "{} has no certificate for the private key {}; restore both files from one backup",
        cert.display(), key.display()
    )]
    OtherKey {
        /// The CA's certificate file.
        cert: PathBuf,
        /// The CA's private key file.
        key: PathBuf,
    },
    /// The CA's own certificate is not currently valid.
    #[error(
        "{}: the CA is valid from {from} to {until}, and thus not now; check the clock of this \
         machine, or create another CA", path.display()
    )]
    NotValid {
        /// The path of the certificate file.
        path: PathBuf,
        /// The start of the validity period.
        from: Timestamp,
        /// The end of the validity period.
        until: Timestamp,
    },
    /// The output directory already has a certificate for another role or node.
    #[error(
        "{} is the certificate of {found}, and is not replaced by that of {wanted}; choose another \
        directory with --out", path.display()
    )]
    OtherOwner {
        /// The path of the certificate file.
        path: PathBuf,
        /// The owner of the existing certificate.
        found: String,
        /// The owner of the certificate to be written.
        wanted: String,
    },
    /// A cryptographic operation failed.
    #[error("cannot create {what}: {reason}")]
    Create {
        /// The object that could not be created.
        what: &'static str,
        /// The error message.
        reason: String,
    },
    /// A file can't be read or written.
    #[error("cannot {step} {}", path.display())]
    Io {
        /// The failed operation.
        step: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

/// A newly created CA.
#[derive(Clone, Debug)]
pub struct CreatedCa {
    /// The path of the CA's certificate file.
    pub cert: PathBuf,
    /// The path of the CA's private key file.
    pub key: PathBuf,
    /// The time when the CA expires.
    pub expires: Timestamp,
}

/// A newly issued certificate.
#[derive(Clone, Debug)]
pub struct IssuedCertificate {
    /// The paths of the files that were written.
    pub files: IdentityFiles,
    /// The time when the certificate expires.
    pub expires: Timestamp,
    /// True if the certificate is valid for fewer days than requested, because the CA expires sooner.
    pub is_shortened: bool,
}

/// Creates a CA in a directory that has none.
///
/// # Errors
///
/// Returns an error if the directory already has a CA, or if the CA can't be created.
pub fn init(dir: &Path, days: u32, now: Timestamp) -> Result<CreatedCa, CaError> {
    check_days(days)?;
    key_directory::create(dir)?;
    let _lock = lock(dir)?;
    let (cert, key) = (dir.join(CA_CERT_FILE), dir.join(CA_KEY_FILE));
    for path in [&key, &cert] {
        if path.symlink_metadata().is_ok() {
            return Err(CaError::Exists { path: path.clone() });
        }
    }
    let authority = Authority::new(now, now + days_duration(days))?;
    let expires = authority.until;
    replace_files(&[
        (key.clone(), authority.key_pem().into_bytes(), KEY_MODE),
        (cert.clone(), authority.cert_pem().into_bytes(), CERT_MODE),
    ])?;
    Ok(CreatedCa { cert, key, expires })
}

/// Issues a certificate to a gateway, and writes the files to `out`, by default `gateway` in the CA's
/// directory.
///
/// # Errors
///
/// Returns an error if the CA can't be used, or if the files can't be written.
pub fn issue_gateway(
    dir: &Path,
    out: Option<&Path>,
    days: u32,
    now: Timestamp,
) -> Result<IssuedCertificate, CaError> {
    let out = out.map_or_else(|| dir.join("gateway"), Path::to_owned);
    issue(dir, &out, Role::Gateway, GATEWAY_COMMON_NAME, (days, now))
}

/// Issues a certificate to a node's agent, and writes the files to `out`, by default `agents/NODE` in the
/// CA's directory.
///
/// # Errors
///
/// Returns an error if the name is not valid for a node, the CA can't be used, or the files can't be written.
pub fn issue_agent(
    dir: &Path,
    node: &str,
    out: Option<&Path>,
    days: u32,
    now: Timestamp,
) -> Result<IssuedCertificate, CaError> {
    check_node_name(node)?;
    let out = out.map_or_else(|| dir.join("agents").join(node), Path::to_owned);
    issue(dir, &out, Role::Agent, node, (days, now))
}

/// The file name of the CA's certificate, both in the CA's directory and next to issued certificates.
const CA_CERT_FILE: &str = "ca.pem";
const CA_KEY_FILE: &str = "ca-key.pem";
const CERT_FILE: &str = "cert.pem";
const KEY_FILE: &str = "key.pem";

/// The common name in gateways' certificates.
const GATEWAY_COMMON_NAME: &str = "gateway";

/// The mode of private key files.
const KEY_MODE: u32 = 0o600;
/// The mode of certificate files, before the umask is applied.
const CERT_MODE: u32 = 0o644;

fn issue(
    dir: &Path,
    out: &Path,
    role: Role,
    name: &str,
    (days, now): (u32, Timestamp),
) -> Result<IssuedCertificate, CaError> {
    check_days(days)?;
    if !dir.join(CA_KEY_FILE).exists() && !dir.join(CA_CERT_FILE).exists() {
        return Err(CaError::NoCa {
            dir: dir.to_owned(),
        });
    }
    let _lock = lock(dir)?;
    let authority = Authority::read(dir, now)?;
    let pair = authority.issue(role, name, days, now)?;
    let files = IdentityFiles {
        ca: out.join(CA_CERT_FILE),
        cert: out.join(CERT_FILE),
        key: out.join(KEY_FILE),
    };
    let contents = FileContents {
        ca: authority.cert_pem().into_bytes(),
        cert: pair.cert.into_bytes(),
        key: pair.key.into_bytes(),
        mode: KEY_MODE,
    };
    // Check the files as the daemon will, before any of them is written.
    let identity = Identity::verify(&files, &contents, role, now)?;
    check_owner(&files.cert, role, name)?;
    key_directory::create(out)?;
    replace_files(&[
        (files.ca.clone(), contents.ca, CERT_MODE),
        (files.key.clone(), contents.key, KEY_MODE),
        (files.cert.clone(), contents.cert, CERT_MODE),
    ])?;
    Ok(IssuedCertificate {
        files,
        expires: identity.expires,
        is_shortened: pair.is_shortened,
    })
}

/// Returns an error if a file contains a certificate for another role or node. A file without a readable
/// certificate may be replaced.
fn check_owner(path: &Path, role: Role, name: &str) -> Result<(), CaError> {
    let Some(existing) = read_certificates(path, Timestamp::UNIX_EPOCH)
        .ok()
        .and_then(|views| views.into_iter().next())
    else {
        return Ok(());
    };
    let wanted = match role {
        Role::Gateway => "a gateway".to_owned(),
        Role::Agent => format!("node {name}"),
    };
    let found = match existing.role {
        CertificateKind::Agent => format!("node {}", existing.node.unwrap_or_default()),
        CertificateKind::Gateway => "a gateway".to_owned(),
        CertificateKind::Ca | CertificateKind::Other => existing.subject,
    };
    if found == wanted {
        return Ok(());
    }
    Err(CaError::OtherOwner {
        path: path.to_owned(),
        found,
        wanted,
    })
}

const fn check_days(days: u32) -> Result<(), CaError> {
    if days == 0 || days > MAX_DAYS {
        return Err(CaError::Days { days });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
