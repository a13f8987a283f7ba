//! The JSON view of certificates, which `culvert ca show` prints.

use std::{
    fs,
    path::{Path, PathBuf},
};

use jiff::Timestamp;
use rustls::{
    crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256, pki_types::CertificateDer,
};
use serde::{Deserialize, Serialize};

use super::{
    super::{Role, SerialNumber, certificate::ParsedCertificate, pem_files},
    CA_CERT_FILE, CERT_FILE, CaError,
};

/// The purpose of a certificate.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CertificateKind {
    /// A CA's certificate.
    Ca,
    /// A gateway's certificate.
    Gateway,
    /// An agent's certificate.
    Agent,
    /// A certificate of another kind, or one that gateways and agents would reject.
    Other,
}

/// The JSON view of a certificate.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateView {
    /// The path of the certificate file.
    pub file: PathBuf,
    /// The purpose of the certificate.
    pub role: CertificateKind,
    /// The name of the node, if this is an agent's certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The serial number, as in a gateway's deny list.
    pub serial: SerialNumber,
    /// The subject of the certificate.
    pub subject: String,
    /// The subject of the certificate's issuer.
    pub issuer: String,
    /// The start of the validity period.
    pub not_before: Timestamp,
    /// The end of the validity period.
    pub not_after: Timestamp,
    /// The number of full days until the certificate expires; negative once it has expired.
    pub days_left: i64,
    /// The certificate's SHA-256 digest, in hexadecimal.
    pub fingerprint: String,
}

/// Reads the certificates in a file, and returns a view of each.
///
/// # Errors
///
/// Returns an error if the file can't be read or has no certificate.
pub fn read_certificates(path: &Path, now: Timestamp) -> Result<Vec<CertificateView>, CaError> {
    let (bytes, _) = pem_files::read(path)?;
    let certificates = pem_files::parse_certificates(path, &bytes)?;
    let view = |(der, parsed)| view(path, &der, parsed, now);
    Ok(certificates.into_iter().map(view).collect())
}

/// Returns the paths of the certificate files in a CA's directory: the CA's own certificate, and those that
/// it has issued.
///
/// # Errors
///
/// Returns an error if there is no CA, or if the directory can't be read.
pub fn certificate_files(dir: &Path) -> Result<Vec<PathBuf>, CaError> {
    let own = dir.join(CA_CERT_FILE);
    if !own.exists() {
        return Err(CaError::NoCa {
            dir: dir.to_owned(),
        });
    }
    let mut agents = Vec::new();
    let directory = dir.join("agents");
    if directory.is_dir() {
        let failed = |source| crate::identity::key_directory::io_error("read", &directory, source);
        for entry in fs::read_dir(&directory).map_err(failed)? {
            agents.push(entry.map_err(failed)?.path().join(CERT_FILE));
        }
        agents.sort();
    }
    let files = [own, dir.join("gateway").join(CERT_FILE)]
        .into_iter()
        .chain(agents);
    Ok(files.filter(|path| path.exists()).collect())
}

fn view(
    path: &Path,
    der: &CertificateDer<'_>,
    parsed: ParsedCertificate,
    now: Timestamp,
) -> CertificateView {
    let role = parsed.role().ok();
    let name = role
        .and_then(|role| parsed.checked_name(role).ok())
        .map(str::to_owned);
    let (role, node) = match (parsed.is_ca, role, name) {
        (true, _, _) => (CertificateKind::Ca, None),
        (false, Some(Role::Gateway), Some(_)) => (CertificateKind::Gateway, None),
        (false, Some(Role::Agent), Some(node)) => (CertificateKind::Agent, Some(node)),
        (false, _, _) => (CertificateKind::Other, None),
    };
    let seconds = parsed.not_after.as_second() - now.as_second();
    CertificateView {
        file: path.to_owned(),
        role,
        node,
        serial: parsed.serial,
        subject: parsed.subject,
        issuer: parsed.issuer,
        not_before: parsed.not_before,
        not_after: parsed.not_after,
        days_left: seconds.div_euclid(24 * 60 * 60),
        fingerprint: fingerprint(der),
    }
}

/// Returns a certificate's SHA-256 digest. Uses the TLS library for this, since no other dependency provides
/// SHA-256.
fn fingerprint(der: &CertificateDer<'_>) -> String {
    let Some(suite) = TLS13_AES_128_GCM_SHA256.tls13() else {
        return String::new();
    };
    let digest = suite.common.hash_provider.hash(der);
    let digits = digest.as_ref().iter();
    digits.map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_sha_256() {
        // The example in FIPS 180-2, appendix B.1.
        assert_eq!(
            fingerprint(&CertificateDer::from(b"abc".to_vec())),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
