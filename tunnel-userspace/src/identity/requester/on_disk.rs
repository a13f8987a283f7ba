//! The files of the certificate in use, and of the request that waits for its certificate.

use std::{fs, path::PathBuf, time::Duration};

use jiff::{SignedDuration, Timestamp};
use rcgen::{CertificateParams, KeyPair, PublicKeyData as _};

use super::{MIN_MARGIN, RENEW_AFTER, Wanted};
use crate::identity::{
    FileError, FileProblem, Identity, IdentityFiles,
    certificate::ParsedCertificate,
    key_directory::{self, replace_files},
    peer::issue_time,
    pem_files::{self, FileContents, file_error},
    request::{self, CertificateRequest},
};

/// The mode of all files, since each of them may contain a key.
const MODE: u32 = 0o600;
/// The number of digits of the key's hash in the name of a request.
const DIGITS: usize = 16;

/// The files.
pub(super) struct OnDisk {
    wanted: Wanted,
    files: IdentityFiles,
    pending_key: PathBuf,
    pending_request: PathBuf,
}

/// The longest time to wait until a certificate becomes valid. The clock of the controller that has issued it is ahead; that of
/// another one may be right.
const MAX_WAIT: SignedDuration = SignedDuration::from_mins(10);

/// The reason why a certificate was not written.
pub(super) enum NotInstalled {
    /// It may be possible later.
    NotYet(String),
    /// The certificate will never be valid.
    Useless(String),
}

/// The certificate in use.
pub(super) struct Current {
    /// The time when it was issued.
    pub(super) issued: Timestamp,
    pub(super) expires: Timestamp,
    /// A number between 0 and 1 that differs from certificate to certificate.
    chance: f64,
}

impl Current {
    pub(super) fn life(&self) -> Duration {
        Duration::try_from(self.issued.duration_until(self.expires)).unwrap_or_default()
    }

    /// Returns the time when the certificate is renewed. After a restart, it is the same.
    pub(super) fn renew_at(&self) -> Timestamp {
        let [first, last] = RENEW_AFTER;
        let part = (last - first).mul_add(self.chance, first);
        let after = |part| {
            let after = SignedDuration::try_from(self.life().mul_f64(part)).unwrap_or_default();
            self.issued.checked_add(after).unwrap_or(self.expires)
        };
        let latest = self.expires - MIN_MARGIN;
        after(part).min(latest.max(after(0.5)))
    }
}

/// A request that waits for its certificate, and its key.
pub(super) struct Pending {
    pub(super) request: Vec<u8>,
    key: Vec<u8>,
    key_hash: String,
}

impl Pending {
    /// Returns the name of the request, which contains the hash of its key.
    pub(super) fn name(&self, role: crate::identity::Role, node: &str) -> String {
        format!("culvert-{role}-{node}-{}", self.key_hash)
    }

    /// Checks that a request and a key belong together, and that the request is for a node.
    fn parse(request: Vec<u8>, key: Vec<u8>, wanted: &Wanted) -> Option<Self> {
        let read = CertificateRequest::read(&request).ok()?;
        let pair = KeyPair::from_pem(std::str::from_utf8(&key).ok()?).ok()?;
        let is_same_key = read.public_key.der_bytes() == pair.public_key_raw();
        if !is_same_key || read.common_names != [wanted.node.as_str()] {
            return None;
        }
        // The identifier is the beginning of the key's SHA-256 hash.
        let identifier = CertificateParams::default().key_identifier(&pair);
        let digits: String = identifier
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Some(Self {
            request,
            key,
            key_hash: digits.chars().take(DIGITS).collect(),
        })
    }
}

impl OnDisk {
    pub(super) fn new(wanted: Wanted) -> Self {
        Self {
            files: wanted.files(),
            pending_key: wanted.directory.join("requested-key.pem"),
            pending_request: wanted.directory.join("request.pem"),
            wanted,
        }
    }

    /// Returns true if there is a file with a certificate.
    pub(super) fn has_certificate(&self) -> bool {
        self.files.cert.is_file()
    }

    /// Returns the certificate in use, or the reason why there is none that can be used.
    pub(super) fn current(&self, now: Timestamp) -> Result<Current, FileError> {
        self.verify(&FileContents::read(&self.files)?, now)
    }

    fn verify(&self, contents: &FileContents, now: Timestamp) -> Result<Current, FileError> {
        let identity = Identity::verify(&self.files, contents, self.wanted.role, now)?;
        if identity.name != self.wanted.node {
            let problem = FileProblem::OtherNode(identity.name, self.wanted.node.clone());
            return Err(file_error(&self.files.cert, problem));
        }
        let certificates = pem_files::parse_certificates(&self.files.cert, &contents.cert)?;
        Ok(Current {
            issued: issue_time(identity.from, identity.expires),
            expires: identity.expires,
            chance: certificates
                .first()
                .map_or(0.5, |(_, parsed)| chance_of(parsed)),
        })
    }

    /// Returns the request that waits, or a new one with a new key.
    pub(super) fn pending(&self) -> Result<Pending, String> {
        let read = |path| pem_files::read(path).map(|(bytes, _)| bytes);
        if let (Ok(request), Ok(key)) = (read(&self.pending_request), read(&self.pending_key))
            && !self.is_installed(&key)
            && let Some(pending) = Pending::parse(request, key, &self.wanted)
        {
            return Ok(pending);
        }
        let new = request::create(self.wanted.role, &self.wanted.node)
            .map_err(|error| format!("cannot create a key: {error}"))?;
        let (request, key) = (new.request.into_bytes(), new.key.into_bytes());
        key_directory::create(&self.wanted.directory)
            .and_then(|()| {
                replace_files(&[
                    (self.pending_key.clone(), key.clone(), MODE),
                    (self.pending_request.clone(), request.clone(), MODE),
                ])
            })
            .map_err(|error| crate::error_chain::chain(&error))?;
        Pending::parse(request, key, &self.wanted)
            .ok_or_else(|| "a request that was just made can't be read".to_owned())
    }

    /// Returns true if a key is that of the certificate in use: its request was not removed.
    fn is_installed(&self, key: &[u8]) -> bool {
        let pair = pem_files::read(&self.files.cert);
        pair.is_ok_and(|(pair, _)| !key.is_empty() && pair.ends_with(key))
    }

    /// Removes the request that waits. The next one gets another key.
    pub(super) fn forget_pending(&self) {
        for path in [&self.pending_request, &self.pending_key] {
            // It may be gone already.
            drop(fs::remove_file(path));
        }
    }

    /// Writes a certificate and its key, if they are valid together with the trusted CAs. Returns the certificate.
    pub(super) fn install(
        &self,
        pending: &Pending,
        certificate: &[u8],
        now: Timestamp,
    ) -> Result<Current, NotInstalled> {
        let mut pair = certificate.to_vec();
        if pair.last() != Some(&b'\n') {
            pair.push(b'\n');
        }
        pair.extend_from_slice(&pending.key);
        let ca = pem_files::read(&self.files.ca);
        let (ca, _) = ca.map_err(|error| NotInstalled::NotYet(error.to_string()))?;
        let contents = FileContents {
            ca,
            cert: pair.clone(),
            key: pair.clone(),
            mode: MODE,
        };
        let current = self.verify(&contents, now).map_err(|error| {
            let text = error.to_string();
            let problem = &error.problem;
            let is_useless = matches!(
                problem,
                FileProblem::Expired { .. }
                    | FileProblem::KeyMismatch { .. }
                    | FileProblem::WrongRole { .. }
                    | FileProblem::WrongPurpose(_)
                    | FileProblem::OtherNode(..)
            ) || matches!(
                problem,
                FileProblem::NotYetValid { from, now } if now.duration_until(*from) > MAX_WAIT
            );
            if is_useless && error.path == self.files.cert {
                NotInstalled::Useless(text)
            } else {
                NotInstalled::NotYet(text)
            }
        })?;
        replace_files(&[(self.files.cert.clone(), pair, MODE)])
            .map_err(|error| NotInstalled::NotYet(crate::error_chain::chain(&error)))?;
        self.forget_pending();
        Ok(current)
    }
}

/// Returns a number between 0 and 1 that depends on the random serial number of a certificate.
fn chance_of(certificate: &ParsedCertificate) -> f64 {
    let digits = certificate.serial.to_string();
    let last = digits
        .get(digits.len().saturating_sub(8)..)
        .unwrap_or_default();
    u32::from_str_radix(last, 16).map_or(0.5, |number| f64::from(number) / f64::from(u32::MAX))
}
