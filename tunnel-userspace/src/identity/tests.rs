//! Fixtures for the identity tests: a CA in a directory, and the certificates that it issues.

mod file_checks;
mod handshake;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    version::TLS13,
};
use tempfile::TempDir;

use super::{ALPN, FileError, Identity, IdentityFiles, Role, ca, pem_files::FileContents};

pub(crate) struct TestCa {
    pub(super) dir: TempDir,
    pub(super) now: Timestamp,
}

impl TestCa {
    /// Creates a CA as of the given time.
    pub(super) fn at(now: Timestamp) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        ca::init(dir.path(), ca::DEFAULT_CA_DAYS, now).expect("a CA");
        Self { dir, now }
    }

    pub(crate) fn new() -> Self {
        Self::at(Timestamp::now())
    }

    pub(crate) fn gateway(&self) -> IdentityFiles {
        ca::issue_gateway(self.dir.path(), None, ca::DEFAULT_DAYS, self.now)
            .expect("a gateway's")
            .files
    }

    pub(crate) fn agent(&self, node: &str) -> IdentityFiles {
        ca::issue_agent(self.dir.path(), node, None, ca::DEFAULT_DAYS, self.now)
            .expect("an agent's")
            .files
    }

    /// Sets the time at which further certificates are issued.
    pub(super) fn later(self, now: Timestamp) -> Self {
        Self { now, ..self }
    }

    /// Issues a certificate with an arbitrary subject and arbitrary extended key usages.
    pub(crate) fn forged(
        &self,
        subject: [&str; 2],
        usages: &[ExtendedKeyUsagePurpose],
    ) -> IdentityFiles {
        let of_ca = ["ca.pem", "ca-key.pem"].map(|name| fs::read_to_string(self.path(name)));
        let [cert, key] = of_ca.map(|pem| pem.expect("a CA"));
        let issuer = KeyPair::from_pem(&key).and_then(|key| Issuer::from_ca_cert_pem(&cert, key));
        let mut params = CertificateParams::default();
        params.distinguished_name = name(subject);
        params.extended_key_usages = usages.to_vec();
        let own = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&own, &issuer.expect("a CA"));
        let [ca, cert, key] =
            ["ca.pem", "forged.pem", "forged-key.pem"].map(|name| self.path(name));
        fs::write(&cert, signed.expect("a certificate").pem()).expect("written");
        fs::write(&key, own.serialize_pem()).expect("written");
        IdentityFiles { ca, cert, key }
    }

    /// Returns a TLS client config that trusts this CA and presents the certificate in `files`, or none.
    pub(crate) fn client(&self, files: Option<&IdentityFiles>) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots
            .add(first_certificate(&self.path("ca.pem")))
            .expect("a CA");
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .expect("settings")
            .with_root_certificates(roots);
        let mut config = if let Some(files) = files {
            let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
            let config = builder.with_client_auth_cert(vec![first_certificate(&files.cert)], key);
            config.expect("a pair")
        } else {
            builder.with_no_client_auth()
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        config
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

pub(super) fn name([organization, common_name]: [&str; 2]) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, organization);
    name.push(DnType::CommonName, common_name);
    name
}

/// Returns the first certificate in a file.
pub(crate) fn first_certificate(path: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("a certificate")
}

/// Returns the certificates of two CAs, concatenated as the contents of one file.
pub(super) fn both_cas(one: &TestCa, other: &TestCa) -> String {
    [one, other]
        .map(|test_ca| fs::read_to_string(test_ca.path("ca.pem")).expect("a CA"))
        .concat()
}

pub(super) fn verified(
    files: &IdentityFiles,
    role: Role,
    now: Timestamp,
) -> Result<Identity, FileError> {
    let contents = FileContents::read(files)?;
    Identity::verify(files, &contents, role, now)
}

pub(super) fn identity(files: &IdentityFiles, role: Role, now: Timestamp) -> Arc<Identity> {
    Arc::new(verified(files, role, now).expect("a good set"))
}

/// Returns the error message for invalid files, without the path of their directory.
pub(super) fn error_text(files: &IdentityFiles, role: Role, now: Timestamp) -> String {
    let refused = verified(files, role, now).expect_err("a bad set");
    let directory = files.cert.parent().expect("a directory");
    refused
        .to_string()
        .replace(&format!("{}/", directory.display()), "")
}

pub(super) const fn days(days: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * days)
}

pub(super) fn fixed_time() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().expect("a time")
}

#[track_caller]
pub(super) fn assert_has(text: &str, part: &str) {
    assert!(text.contains(part), "{text}");
}

/// Copies one file over another.
pub(super) fn copy(from: &PathBuf, to: &PathBuf) {
    fs::copy(from, to).expect("copied");
}
