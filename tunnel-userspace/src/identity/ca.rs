//! The built-in CA: creates itself, and issues certificates of gateways and agents, as files.

mod folder;
mod make;
mod show;

use std::{
    io,
    path::{Path, PathBuf},
};

use jiff::Timestamp;

pub use self::show::{Kind, View, issued, show};
use self::{
    folder::{hold, replace},
    make::Authority,
};
use super::{Files, Identity, NameError, Rejected, Role, check_node_name, files::Contents};

/// The default validity of a CA in days.
pub const CA_DAYS: u32 = 3650;

/// The default validity of a certificate in days.
pub const DAYS: u32 = 365;

/// The maximum validity in days.
pub const MOST_DAYS: u32 = 36_500;

/// A failed operation of the CA.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// There is a CA already.
    #[error(
        "{} is there already: a CA is never overwritten, for nothing that it issued would be \
         trusted any more; give another folder with --dir, or move this one away", path.display()
    )]
    Exists {
        /// The file that exists.
        path: PathBuf,
    },
    /// There is no CA.
    #[error("there is no CA in {}; make one with: culvert ca init --dir {}", dir.display(), dir.display())]
    NoCa {
        /// The folder.
        dir: PathBuf,
    },
    /// The name can't be that of a node.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The requested validity is out of range.
    #[error("a certificate can be valid for 1 to {MOST_DAYS} days, not {days}")]
    Days {
        /// The requested number of days.
        days: u32,
    },
    /// A file of the CA, or a certificate to be issued, is invalid.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// None of the CA's certificates belongs to its key.
    #[error("{}: no certificate in it belongs to the key {}", cert.display(), key.display())]
    OtherKey {
        /// The file of certificates.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
    },
    /// The CA's own certificate is not valid now.
    #[error("{}: the CA is valid from {from} to {until}, and not now", path.display())]
    NotValid {
        /// The file.
        path: PathBuf,
        /// The time when the validity begins.
        from: Timestamp,
        /// The time when the validity ends.
        until: Timestamp,
    },
    /// The folder holds the certificate of another end.
    #[error(
        "{} is the certificate of {is}, and would be replaced by that of {wanted}; give another \
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
    #[error("cannot make {what}: {reason}")]
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
    /// The file of its certificate.
    pub cert: PathBuf,
    /// The file of its key.
    pub key: PathBuf,
    /// The time when the CA expires.
    pub expires: Timestamp,
}

/// A newly issued certificate.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The files written.
    pub files: Files,
    /// The time when the certificate expires.
    pub expires: Timestamp,
    /// True if the CA expires earlier than requested for the certificate, which therefore ends with it.
    pub is_shortened: bool,
}

/// Creates a CA in a folder that has none.
///
/// # Errors
///
/// If the folder has a CA, or the CA can't be created.
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
/// If the CA can't be used, or the files can't be written.
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
/// If the name is not valid for a node, the CA can't be used, or the files can't be written.
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

/// The file of the CA's certificate, also of its copies next to issued certificates.
const CERT_OF_CA: &str = "ca.pem";
const KEY_OF_CA: &str = "ca-key.pem";
const CERT: &str = "cert.pem";
const KEY: &str = "key.pem";

/// The common name of gateways.
const GATEWAY: &str = "gateway";

/// The mode of a key's file.
const PRIVATE: u32 = 0o600;
/// The mode of a certificate's file, before the umask.
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
    // A set that the daemon would reject is not written.
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

/// Refuses to replace the certificate of another owner; an unreadable certificate may be replaced.
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
        Kind::Agent => format!("node {}", there.node.unwrap_or_default()),
        Kind::Gateway => "a gateway".to_owned(),
        Kind::Ca | Kind::Other => there.subject,
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
