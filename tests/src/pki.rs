//! Issues certificates for kubelet-like servers, gateways and agents.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer,
    DnType::{self, CommonName, OrganizationName},
    ExtendedKeyUsagePurpose::{self, ClientAuth, ServerAuth},
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    version::TLS13,
};

/// The time for which a certificate is valid, both before and after it is issued.
const VALIDITY: Duration = Duration::from_hours(24);

/// The organisations (O) in the certificates of agents and of gateways.
const ORGANIZATIONS: [&str; 2] = ["culvert:agents", "culvert:gateways"];

/// The DNS name in gateways' certificates. Agents verify it.
pub const GATEWAY: &str = "gateway.culvert.dev";

/// Generates a key pair, and returns the private key and the public key in PEM.
pub fn key_pair() -> Result<[String; 2]> {
    let key = KeyPair::generate()?;
    Ok([key.serialize_pem(), key.public_key_pem()])
}

/// A certificate authority.
#[derive(Debug)]
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its private key, both in PEM.
#[derive(Clone, Debug)]
pub struct CertifiedKey {
    pub cert: String,
    pub key: String,
}

/// The period for which a certificate is valid.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Validity {
    /// Valid now and for one more day.
    Current,
    /// Valid now and for two more days.
    Longer,
    /// Valid now and for a time in seconds.
    Seconds(u64),
    /// Valid since an hour ago, and for two more days.
    SinceAnHour,
}

impl Authority {
    pub fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // Longer than that of the certificates.
        set_validity(&mut params, Validity::Longer);
        Ok(Self {
            issuer: CertifiedIssuer::self_signed(params, KeyPair::generate()?)?,
        })
    }

    #[must_use]
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    #[must_use]
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a server certificate that has no subject and is valid for the given DNS names and addresses.
    pub fn named_server(&self, names: &[&str], addresses: &[IpAddr]) -> Result<CertifiedKey> {
        self.issue(&[], (names, addresses), ServerAuth, Validity::Current)
    }

    /// Issues a server certificate whose subject is a common name, valid for the given addresses.
    pub fn server(&self, name: &str, addresses: &[IpAddr]) -> Result<CertifiedKey> {
        let subject = [(CommonName, name)];
        self.issue(&subject, (&[], addresses), ServerAuth, Validity::Current)
    }

    /// Issues a certificate for a node's agent.
    pub fn agent(&self, node: &str, validity: Validity) -> Result<CertifiedKey> {
        self.client(node, ORGANIZATIONS[0], validity)
    }

    /// Issues a client certificate whose subject is a common name and an organisation.
    pub fn client(
        &self,
        name: &str,
        organization: &str,
        validity: Validity,
    ) -> Result<CertifiedKey> {
        let subject = [(OrganizationName, organization), (CommonName, name)];
        self.issue(&subject, (&[], &[]), ClientAuth, validity)
    }

    pub fn gateway(&self, validity: Validity) -> Result<CertifiedKey> {
        let subject = [
            (OrganizationName, ORGANIZATIONS[1]),
            (CommonName, "gateway"),
        ];
        self.issue(&subject, (&[GATEWAY], &[]), ServerAuth, validity)
    }

    fn issue(
        &self,
        subject: &[(DnType, &str)],
        (names, addresses): (&[&str], &[IpAddr]),
        usage: ExtendedKeyUsagePurpose,
        validity: Validity,
    ) -> Result<CertifiedKey> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        for (kind, name) in subject {
            params.distinguished_name.push(kind.clone(), *name);
        }
        let addresses = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names.extend(addresses);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, validity);
        let key = KeyPair::generate()?;
        Ok(CertifiedKey {
            cert: params.signed_by(&key, &self.issuer)?.pem(),
            key: key.serialize_pem(),
        })
    }
}

fn set_validity(params: &mut CertificateParams, validity: Validity) {
    let now = SystemTime::now();
    let from = match validity {
        Validity::Current | Validity::Longer | Validity::Seconds(_) => now - VALIDITY,
        Validity::SinceAnHour => now - Duration::from_hours(1),
    };
    params.not_before = from.into();
    params.not_after = match validity {
        Validity::Current => now + VALIDITY,
        Validity::Longer | Validity::SinceAnHour => now + VALIDITY * 2,
        Validity::Seconds(seconds) => now + Duration::from_secs(seconds),
    }
    .into();
}

/// The paths of three PEM files: the trusted CAs, a certificate, and the certificate's private key.
#[derive(Clone, Debug)]
pub struct PemFiles {
    /// The CAs that the peer's certificate must chain to.
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl PemFiles {
    /// Returns the paths of the files in `directory` that are named `stem`, plus an extension.
    #[must_use]
    pub fn in_directory(directory: &Path, stem: &str) -> Self {
        let file = |kind: &str| directory.join(format!("{stem}.{kind}"));
        Self {
            ca: file("ca.pem"),
            cert: file("pem"),
            key: file("key"),
        }
    }

    /// Returns the paths of the files that `culvert ca` writes to `directory`.
    #[must_use]
    pub fn issued(directory: &Path) -> Self {
        Self {
            ca: directory.join("ca.pem"),
            cert: directory.join("cert.pem"),
            key: directory.join("key.pem"),
        }
    }

    /// Writes each file atomically: writes a temporary file, then renames it.
    pub fn write(&self, ca: &str, pair: &CertifiedKey) -> Result<()> {
        for (path, text) in [
            (&self.ca, ca),
            (&self.cert, &pair.cert),
            (&self.key, &pair.key),
        ] {
            let draft = path.with_added_extension("draft");
            fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
            fs::rename(&draft, path)?;
        }
        Ok(())
    }

    /// Builds the config of a TLS 1.3 server that uses this certificate and doesn't authenticate clients.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>> {
        let chain = CertificateDer::pem_file_iter(&self.cert)?.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(&self.key)?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Arc::new(config))
    }
}

/// Builds the config of a TLS 1.3 client that trusts the CAs in the file `ca`.
pub fn client_config(ca: &Path) -> Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_file_iter(ca)? {
        roots.add(root?)?;
    }
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// Returns the cryptography provider, the same one that Culvert uses.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}
