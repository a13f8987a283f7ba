//! Certificate signing requests (PKCS #10, RFC 2986): creates those of gateways and agents, and reads them strictly.

use rcgen::{
    CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{SignatureVerificationAlgorithm, alg_id, pem::SectionKind},
};
use x509_parser::{
    certification_request::X509CertificationRequest,
    cri_attributes::ParsedCriAttribute,
    extensions::{GeneralName, ParsedExtension},
    oid_registry::OID_SIG_ECDSA_WITH_SHA256,
    prelude::FromDer as _,
    x509::X509Version,
};

use super::{
    GATEWAY_NAME, Role,
    certificate::{attribute_texts, escaped_name},
    pem_files,
};

/// The minimum of `expirationSeconds` of a CertificateSigningRequest, in seconds (Kubernetes
/// `pkg/apis/certificates/validation`).
pub const MIN_EXPIRATION: i64 = 600;

/// The maximum size of a request, in bytes.
pub const MAX_REQUEST: usize = 8 << 10;

/// A certificate signing request that is well-formed and was signed with its own ECDSA P-256 key. The names and extensions are
/// those that the requester wants; none of them has been checked.
#[derive(Debug)]
pub struct CertificateRequest {
    /// The subject, for messages.
    pub subject: String,
    /// The organisations (O) in the subject.
    pub organizations: Vec<String>,
    /// The common names (CN) in the subject.
    pub common_names: Vec<String>,
    /// The number of all attributes in the subject.
    pub subject_attributes: usize,
    /// The DNS names among the subject alternative names.
    pub dns_names: Vec<String>,
    /// A subject alternative name of another kind, if there is one.
    pub other_name: Option<String>,
    /// An extension other than the subject alternative names, or another attribute, if there is one.
    pub extra: Option<String>,
    /// The public key.
    pub public_key: rcgen::SubjectPublicKeyInfo,
}

impl CertificateRequest {
    /// Reads a request: one PEM block with nothing around it.
    ///
    /// # Errors
    ///
    /// Returns an error that describes what is wrong with the form, the key or the signature.
    pub fn read(pem: &[u8]) -> Result<Self, String> {
        let (request, signed) = Self::parse(&only_section(pem)?)?;
        signed.verify()?;
        Ok(request)
    }

    /// Parses the contents of a request, and returns what its signature covers. The signature was not verified.
    pub(crate) fn parse(der: &[u8]) -> Result<(Self, Signed), String> {
        let malformed = |what: &str, error: &dyn ToString| {
            format!("{what} is malformed: {}", error.to_string())
        };
        let (rest, request) = X509CertificationRequest::from_der(der)
            .map_err(|error| malformed("the request", &error))?;
        if !rest.is_empty() {
            return Err("there are extra bytes behind the request".to_owned());
        }
        let info = &request.certification_request_info;
        if info.version != X509Version::V1 {
            return Err(format!("its version is {}; expected 0", info.version.0));
        }
        let key = &info.subject_pki;
        let public_key = rcgen::SubjectPublicKeyInfo::from_der(key.raw)
            .map_err(|error| malformed("the public key", &error))?;
        if *rcgen::PublicKeyData::algorithm(&public_key) != PKCS_ECDSA_P256_SHA256 {
            return Err("the key must be an ECDSA key on the curve P-256".to_owned());
        }
        if request.signature_algorithm.algorithm != OID_SIG_ECDSA_WITH_SHA256 {
            return Err("the signature must be an ECDSA signature with SHA-256".to_owned());
        }
        let signed = Signed {
            key: key.subject_public_key.data.to_vec(),
            message: info.raw.to_vec(),
            signature: request.signature_value.data.to_vec(),
        };
        let mut read = Self {
            subject: escaped_name(&info.subject),
            organizations: attribute_texts(info.subject.iter_organization())?,
            common_names: attribute_texts(info.subject.iter_common_name())?,
            subject_attributes: info.subject.iter_attributes().count(),
            dns_names: Vec::new(),
            other_name: None,
            extra: None,
            public_key,
        };
        for attribute in info.iter_attributes() {
            match attribute.parsed_attribute() {
                ParsedCriAttribute::ExtensionRequest(wanted) => {
                    for extension in &wanted.extensions {
                        read.add_extension(extension.parsed_extension(), &extension.oid)?;
                    }
                }
                ParsedCriAttribute::ChallengePassword(_)
                | ParsedCriAttribute::UnsupportedAttribute => {
                    read.extra = Some(format!("the attribute {}", attribute.oid));
                }
            }
        }
        Ok((read, signed))
    }

    fn add_extension(
        &mut self,
        extension: &ParsedExtension<'_>,
        oid: &dyn ToString,
    ) -> Result<(), String> {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "all others are refused alike"
        )]
        match extension {
            ParsedExtension::SubjectAlternativeName(names) => {
                for name in &names.general_names {
                    match name {
                        GeneralName::DNSName(name) => self.dns_names.push((*name).to_owned()),
                        other => {
                            self.other_name = Some(other.to_string().escape_debug().to_string())
                        }
                    }
                }
            }
            ParsedExtension::ParseError { error } => {
                return Err(format!(
                    "the extension {} is malformed: {error}",
                    oid.to_string()
                ));
            }
            ParsedExtension::BasicConstraints(constraints) if constraints.ca => {
                self.extra = Some("the right to act as a CA".to_owned());
            }
            _ => self.extra = Some(format!("the extension {}", oid.to_string())),
        }
        Ok(())
    }
}

/// Returns the contents of a request's only PEM section.
fn only_section(pem: &[u8]) -> Result<Vec<u8>, String> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE REQUEST-----";
    const END: &[u8] = b"-----END CERTIFICATE REQUEST-----";
    if pem.len() > MAX_REQUEST {
        return Err(format!(
            "it is too long; a request has at most {MAX_REQUEST} bytes"
        ));
    }
    let sections = pem_files::sections(pem).map_err(|problem| problem.to_string())?;
    let [(SectionKind::Csr, der)] = &*sections else {
        return Err("it must be exactly one PEM block CERTIFICATE REQUEST".to_owned());
    };
    if !pem.starts_with(BEGIN) || !pem.trim_ascii_end().ends_with(END) {
        return Err("there is text around the PEM block".to_owned());
    }
    Ok(der.clone())
}

/// The signature of a request, and what it covers.
pub(crate) struct Signed {
    key: Vec<u8>,
    message: Vec<u8>,
    signature: Vec<u8>,
}

impl Signed {
    /// Verifies the ECDSA P-256 signature.
    fn verify(&self) -> Result<(), String> {
        let all = aws_lc_rs::default_provider().signature_verification_algorithms;
        let is_wanted = |it: &&&dyn SignatureVerificationAlgorithm| {
            it.public_key_alg_id() == alg_id::ECDSA_P256
                && it.signature_alg_id() == alg_id::ECDSA_SHA256
        };
        let algorithm = all.all.iter().find(is_wanted);
        match algorithm.map(|it| it.verify_signature(&self.key, &self.message, &self.signature)) {
            Some(Ok(())) => Ok(()),
            _ => Err("its signature was not made with its key".to_owned()),
        }
    }
}

/// Parses the contents of a request, for fuzzing. Returns false if the result is larger than the request, or if an error is
/// empty.
#[must_use]
pub fn parses_within_bounds(der: &[u8]) -> bool {
    match CertificateRequest::parse(der) {
        Ok((read, _)) => {
            let names = read.organizations.iter().chain(&read.common_names);
            let length = names.chain(&read.dns_names).map(String::len).sum::<usize>();
            length <= 4 * der.len() && read.subject_attributes <= der.len()
        }
        Err(error) => !error.is_empty(),
    }
}

/// A request and its private key, as PEM.
#[derive(Clone)]
pub struct NewRequest {
    /// The request.
    pub request: String,
    /// The private key.
    pub key: String,
}

/// Creates a request with a new key for the certificate of a node's gateway or agent.
///
/// # Errors
///
/// Returns an error if the key can't be generated.
pub fn create(role: Role, node: &str) -> Result<NewRequest, rcgen::Error> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = subject(role, node);
    if role == Role::Gateway {
        params.subject_alt_names = vec![SanType::DnsName(GATEWAY_NAME.try_into()?)];
    }
    Ok(NewRequest {
        request: params.serialize_request(&key)?.pem()?,
        key: key.serialize_pem(),
    })
}

/// Returns the subject of a certificate.
pub(super) fn subject(role: Role, common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, role.organization());
    name.push(DnType::CommonName, common_name);
    name
}

#[cfg(test)]
mod tests;
