//! A CA with its private key, which issues certificates in memory.

use std::{path::Path, time::SystemTime};

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber,
};
use rustls::{crypto::aws_lc_rs, pki_types::CertificateDer};

use super::{
    super::{
        FileProblem, GATEWAY_NAME, Role,
        certificate::ParsedCertificate,
        pem_files::{self, file_error},
        request::subject,
    },
    CA_CERT_FILE, CA_KEY_FILE, CaError,
};

/// The clock skew to tolerate between nodes: a certificate becomes valid this long before it is issued.
pub const SKEW: SignedDuration = SignedDuration::from_hours(1);

/// The length of a serial number, in bytes. 126 of its bits are random. RFC 5280 section 4.1.2.2 allows up to
/// 20 bytes.
const SERIAL: usize = 16;

/// A CA with its private key.
#[derive(Debug)]
pub struct Authority {
    /// The contents of the CA's certificate file: the CA's own certificate, and those of any CAs that it
    /// replaces.
    cert_pem: String,
    cert: CertificateDer<'static>,
    /// The time when the CA becomes valid.
    pub from: Timestamp,
    /// The time when the CA expires.
    pub until: Timestamp,
    key: KeyPair,
}

/// A certificate and its private key, as PEM.
pub(super) struct Pair {
    pub(super) cert: String,
    pub(super) key: String,
    pub(super) is_shortened: bool,
}

/// Checks that a file contains certificates, all of them those of CAs. Ends accept no other file with trusted CAs.
///
/// # Errors
///
/// Returns an error that names the first certificate that is damaged, or is none of a CA.
pub fn check_cas(path: &Path, bytes: &[u8]) -> Result<(), CaError> {
    let certificates = pem_files::parse_certificates(path, bytes)?;
    let other = certificates.into_iter().find(|(_, parsed)| !parsed.is_ca);
    other.map_or(Ok(()), |(_, parsed)| {
        Err(file_error(path, FileProblem::NotCa(parsed.subject)).into())
    })
}

impl Authority {
    /// Creates a CA with a new key, which expires at `until`.
    ///
    /// # Errors
    ///
    /// Returns an error if the key or the certificate can't be created.
    pub fn new(now: Timestamp, until: Timestamp) -> Result<Self, CaError> {
        let (from, until) = (truncate_to_seconds(now - SKEW), truncate_to_seconds(until));
        let key = new_key()?;
        let mut params = params(from, until)?;
        // A random part in the name keeps the certificates of different CAs apart.
        let own: String = random::<4>()?
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, "culvert");
        name.push(DnType::CommonName, format!("culvert CA {own}"));
        params.distinguished_name = name;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let cert = params.self_signed(&key).map_err(create_error("a CA"))?;
        Ok(Self {
            cert_pem: cert.pem(),
            cert: cert.der().clone(),
            from,
            until,
            key,
        })
    }

    /// Reads a CA from its directory.
    pub(super) fn read(dir: &Path, now: Timestamp) -> Result<Self, CaError> {
        let (cert_path, key_path) = (dir.join(CA_CERT_FILE), dir.join(CA_KEY_FILE));
        let (cert_bytes, _) = pem_files::read(&cert_path)?;
        let (key_bytes, _) = pem_files::read(&key_path)?;
        let authority = Self::parse((&cert_path, &cert_bytes), (&key_path, &key_bytes))?;
        authority.check_validity(&cert_path, now)?;
        Ok(authority)
    }

    /// Parses a CA's certificates and its private key, each given with its path or name. The CA need not be valid now.
    ///
    /// # Errors
    ///
    /// Returns an error if one of them can't be parsed, or if no certificate of a CA belongs to the key.
    pub fn parse(
        (cert_path, cert_bytes): (&Path, &[u8]),
        (key_path, key_bytes): (&Path, &[u8]),
    ) -> Result<Self, CaError> {
        let certificates = pem_files::parse_certificates(cert_path, cert_bytes)?;
        let der = pem_files::parse_private_key(key_path, key_bytes)?;
        let key = KeyPair::try_from(&der)
            .map_err(|error| file_error(key_path, FileProblem::UnusableKey(error.to_string())))?;
        let own = |(_, parsed): &(_, ParsedCertificate)| parsed.public_key == key.public_key_raw();
        let Some((cert, parsed)) = certificates.into_iter().find(own) else {
            return Err(CaError::OtherKey {
                cert: cert_path.to_owned(),
                key: key_path.to_owned(),
            });
        };
        if !parsed.is_ca {
            return Err(file_error(cert_path, FileProblem::NotCa(parsed.subject)).into());
        }
        let (from, until) = (parsed.not_before, parsed.not_after);
        Ok(Self {
            cert_pem: String::from_utf8_lossy(cert_bytes).into_owned(),
            cert,
            from,
            until,
            key,
        })
    }

    /// Checks that the CA is valid at a time.
    ///
    /// # Errors
    ///
    /// Returns an error with the validity period if it is not.
    pub fn check_validity(&self, path: &Path, now: Timestamp) -> Result<(), CaError> {
        let (from, until) = (self.from, self.until);
        if now < from || now >= until {
            return Err(CaError::NotValid {
                path: path.to_owned(),
                from,
                until,
            });
        }
        Ok(())
    }

    /// Returns the CA's own certificate, and those of any CAs that it replaces.
    #[must_use]
    pub fn cert_pem(&self) -> String {
        self.cert_pem.clone()
    }

    /// Returns the private key.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Issues a certificate that expires no later than the CA.
    pub(super) fn issue(
        &self,
        role: Role,
        common_name: &str,
        days: u32,
        now: Timestamp,
    ) -> Result<Pair, CaError> {
        let wanted = truncate_to_seconds(now + days_duration(days));
        let key = new_key()?;
        Ok(Pair {
            cert: self.certify(&key, role, common_name, (now, wanted))?,
            key: key.serialize_pem(),
            is_shortened: self.until < wanted,
        })
    }

    /// Issues a certificate for a public key, which expires at `until`, but no later than the CA. Returns it as PEM.
    ///
    /// # Errors
    ///
    /// Returns an error if the certificate can't be created.
    pub fn certify(
        &self,
        key: &impl PublicKeyData,
        role: Role,
        common_name: &str,
        (now, until): (Timestamp, Timestamp),
    ) -> Result<String, CaError> {
        let from = truncate_to_seconds(now - SKEW).max(self.from);
        let mut params = params(from, truncate_to_seconds(until).min(self.until))?;
        params.distinguished_name = subject(role, common_name);
        let usage = match role {
            Role::Gateway => {
                let dns = GATEWAY_NAME
                    .try_into()
                    .map_err(create_error("a certificate"))?;
                params.subject_alt_names = vec![rcgen::SanType::DnsName(dns)];
                ExtendedKeyUsagePurpose::ServerAuth
            }
            Role::Agent => ExtendedKeyUsagePurpose::ClientAuth,
        };
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let cert = Issuer::from_ca_cert_der(&self.cert, &self.key)
            .and_then(|issuer| params.signed_by(key, &issuer))
            .map_err(create_error("a certificate"))?;
        Ok(cert.pem())
    }
}

fn params(from: Timestamp, until: Timestamp) -> Result<CertificateParams, CaError> {
    let mut serial = random::<SERIAL>()?;
    // Make the number positive and its first byte non-zero, so that its DER encoding has exactly this length.
    serial[0] = serial[0] & 0x7f | 0x40;
    let mut params = CertificateParams::default();
    params.not_before = SystemTime::from(from).into();
    params.not_after = SystemTime::from(until).into();
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn new_key() -> Result<KeyPair, CaError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(create_error("a key"))
}

fn random<const N: usize>() -> Result<[u8; N], CaError> {
    let mut bytes = [0; N];
    match aws_lc_rs::default_provider().secure_random.fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(CaError::Create {
            what: "a random number",
            reason: format!("{error:?}"),
        }),
    }
}

pub(super) fn days_duration(days: u32) -> SignedDuration {
    SignedDuration::from_hours(i64::from(days) * 24)
}

/// Truncates a time to whole seconds, the resolution of times in certificates.
fn truncate_to_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn create_error(what: &'static str) -> impl Fn(rcgen::Error) -> CaError {
    move |error| CaError::Create {
        what,
        reason: error.to_string(),
    }
}
