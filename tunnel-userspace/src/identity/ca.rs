//! The built-in CA of `culvert ca`: creates a CA, and issues certificates for gateways and agents, as files.

mod folder;
mod make;
mod show;

use std::{
    io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

pub use self::show::{CertificateKind, CertificateView, issued, show};
use self::{
    folder::{hold, replace},
    make::Authority,
};
use super::{Files, Identity, NameError, Rejected, Role, check_node_name, files::Contents};

/// The default validity of a CA in days.
pub const CA_DAYS: u32 = 3650;

/// The default validity of a certificate in days.
pub const DAYS: u32 = 365;

/// The maximum validity of a CA or certificate in days.
pub const MOST_DAYS: u32 = 36_500;

/// The error of a CA operation.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// There is a CA already.
    #[error(
        "{} exists already: a CA is never overwritten, since the certificates that it issued would \
        no longer be trusted; choose another folder with --dir, or move this one away",
        path.display()
    )]
    Exists {
        /// The file that exists.
        path: PathBuf,
    },
    /// There is no CA.
    #[error(
        "there is no CA in {}; create one with: culvert ca init --dir {}",
        dir.display(), dir.display()
    )]
    NoCa {
        /// The folder.
        dir: PathBuf,
    },
    /// The node name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The requested validity is out of range.
    #[error("--days is {days}; it must be from 1 to {MOST_DAYS}")]
    Days {
        /// The requested number of days.
        days: u32,
    },
    /// A file of the CA, or a certificate to be issued, is invalid.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// None of the certificates in the CA's certificate file belongs to the CA's key.
    #[error(
        "{} has no certificate for the private key {}; restore both files from one backup",
        cert.display(), key.display()
    )]
    OtherKey {
        /// The file of certificates.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// The CA's own certificate is not valid now.
    #[error(
        "{}: the CA is valid from {from} to {until}, and thus not now; check the clock of this \
         machine, or create another CA", path.display()
    )]
    NotValid {
        /// The file.
        path: PathBuf,
        /// The time when the validity begins.
        from: Timestamp,
        /// The time when the validity ends.
        until: Timestamp,
    },
    /// The output folder has a certificate of another role or node.
    #[error(
        "{} is the certificate of {is}, and is not replaced by that of {wanted}; choose another \
        folder with --out", path.display()
    )]
    Taken {
        /// The file.
        path: PathBuf,
        /// The owner of the existing certificate.
        is: String,
        /// The owner of the certificate to be written.
        wanted: String,
    },
    /// A cryptographic operation failed.
    #[error("cannot create {what}: {reason}")]
    Make {
        /// The object that could not be created.
        what: &'static str,
        /// The error.
        reason: String,
    },
    /// A file can't be read or written.
    #[error("cannot {step} {}", path.display())]
    Io {
        /// The failed operation.
        step: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

/// A newly created CA.
#[derive(Clone, Debug)]
pub struct Made {
    /// The path of the CA's certificate file.
    pub cert: PathBuf,
    /// The path of the CA's private key.
    pub key: PathBuf,
    /// The time when the CA expires.
    pub expires: Timestamp,
}

/// A newly issued certificate.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The paths of the written files.
    pub files: Files,
    /// The time when the certificate expires.
    pub expires: Timestamp,
    /// True if the certificate is valid for fewer days than requested, since the CA expires earlier.
    pub is_shortened: bool,
}

/// Creates a CA in a folder that has none.
///
/// # Errors
///
/// The folder has a CA, or the CA can't be created.
pub fn init(dir: &Path, days: u32, now: Timestamp) -> Result<Made, CaError> {
    check_days(days)?;
    folder::make(dir)?;
    let _held = hold(dir)?;
    let (cert, key) = (dir.join(CERT_OF_CA), dir.join(KEY_OF_CA));
    for path in [&key, &cert] {
        if path.symlink_metadata().is_ok() {
            return Err(CaError::Exists { path: path.clone() });
        }
    }
    let authority = Authority::new(days, now)?;
    let expires = authority.until;
    replace(&[
        (key.clone(), authority.key_pem().into_bytes(), PRIVATE),
        (cert.clone(), authority.cert_pem().into_bytes(), PUBLIC),
    ])?;
    Ok(Made { cert, key, expires })
}

/// Issues the certificate of a gateway, by default into `gateway` in the CA's folder.
///
/// # Errors
///
/// The CA can't be used, or the files can't be written.
pub fn issue_gateway(
    dir: &Path,
    out: Option<&Path>,
    days: u32,
    now: Timestamp,
) -> Result<Issued, CaError> {
    let out = out.map_or_else(|| dir.join("gateway"), Path::to_owned);
    issue(dir, &out, Role::Gateway, GATEWAY, (days, now))
}

/// Issues the certificate of a node's agent, by default into `agents/NODE` in the CA's folder.
///
/// # Errors
///
/// The name is not valid for a node, the CA can't be used, or the files can't be written.
pub fn issue_agent(
    dir: &Path,
    node: &str,
    out: Option<&Path>,
    days: u32,
    now: Timestamp,
) -> Result<Issued, CaError> {
    check_node_name(node)?;
    let out = out.map_or_else(|| dir.join("agents").join(node), Path::to_owned);
    issue(dir, &out, Role::Agent, node, (days, now))
}

/// The file name of the CA's certificate, in the CA's folder and next to issued certificates.
const CERT_OF_CA: &str = "ca.pem";
const KEY_OF_CA: &str = "ca-key.pem";
const CERT: &str = "cert.pem";
const KEY: &str = "key.pem";

/// The common name in the certificates of gateways.
const GATEWAY: &str = "gateway";

/// The mode of private key files.
const PRIVATE: u32 = 0o600;
/// The mode of certificate files, before the umask.
const PUBLIC: u32 = 0o644;

fn issue(
    dir: &Path,
    out: &Path,
    role: Role,
    name: &str,
    (days, now): (u32, Timestamp),
) -> Result<Issued, CaError> {
    check_days(days)?;
    if !dir.join(KEY_OF_CA).exists() && !dir.join(CERT_OF_CA).exists() {
        return Err(CaError::NoCa {
            dir: dir.to_owned(),
        });
    }
    let _held = hold(dir)?;
    let authority = Authority::read(dir, now)?;
    let pair = authority.issue(role, name, days, now)?;
    let files = Files {
        ca: out.join(CERT_OF_CA),
        cert: out.join(CERT),
        key: out.join(KEY),
    };
    let contents = Contents {
        ca: authority.cert_pem().into_bytes(),
        cert: pair.cert.into_bytes(),
        key: pair.key.into_bytes(),
        mode: PRIVATE,
    };
    // Checks the files as the daemon will, before any is written.
    let identity = Identity::verified(&files, &contents, role, now)?;
    check_owner(&files.cert, role, name)?;
    folder::make(out)?;
    replace(&[
        (files.ca.clone(), contents.ca, PUBLIC),
        (files.key.clone(), contents.key, PRIVATE),
        (files.cert.clone(), contents.cert, PUBLIC),
    ])?;
    Ok(Issued {
        files,
        expires: identity.expires,
        is_shortened: pair.is_shortened,
    })
}

/// Returns an error if a file is the certificate of another role or node. A file without a readable
/// certificate may be replaced.
fn check_owner(path: &Path, role: Role, name: &str) -> Result<(), CaError> {
    let Some(there) = show(path, Timestamp::UNIX_EPOCH)
        .ok()
        .and_then(|views| views.into_iter().next())
    else {
        return Ok(());
    };
    let wanted = match role {
        Role::Gateway => "a gateway".to_owned(),
        Role::Agent => format!("node {name}"),
    };
    let is = match there.role {
        CertificateKind::Agent => format!("node {}", there.node.unwrap_or_default()),
        CertificateKind::Gateway => "a gateway".to_owned(),
        CertificateKind::Ca | CertificateKind::Other => there.subject,
    };
    if is == wanted {
        return Ok(());
    }
    Err(CaError::Taken {
        path: path.to_owned(),
        is,
        wanted,
    })
}

const fn check_days(days: u32) -> Result<(), CaError> {
    if days == 0 || days > MOST_DAYS {
        return Err(CaError::Days { days });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
