//! Creates PKCS #10 requests, also ones that no honest requester makes.

use anyhow::Result;
use rcgen::{
    CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, KeyPair,
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, SanType,
};

/// An attribute of a request's subject.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Attribute {
    Organization(String),
    CommonName(String),
    /// An organisation or common name in addition to the first one. The library replaces an attribute of the same type, so that
    /// it has to be made like one of another type, with the last number of its identifier.
    Second(u64, String),
}

/// An alternative name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Name {
    Dns(&'static str),
    Mail(&'static str),
    Uri(&'static str),
}

/// The parts of a request.
#[derive(Clone, Debug, Default)]
pub struct CertificateRequest {
    pub subject: Vec<Attribute>,
    pub names: Vec<Name>,
    /// True if the request is for a CA.
    pub is_ca: bool,
    /// True if the request has an extension that nobody knows.
    pub has_unknown_extension: bool,
    /// True if the key is on the curve P-384 instead of P-256.
    pub has_larger_key: bool,
}

impl CertificateRequest {
    /// Returns the request in PEM, signed with a new key.
    pub fn pem(&self) -> Result<String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for attribute in &self.subject {
            let (kind, text) = match attribute {
                Attribute::Organization(text) => (DnType::OrganizationName, text),
                Attribute::CommonName(text) => (DnType::CommonName, text),
                Attribute::Second(last, text) => (DnType::CustomDnType(vec![2, 5, 4, *last]), text),
            };
            params.distinguished_name.push(kind, text.as_str());
        }
        for name in &self.names {
            params.subject_alt_names.push(match name {
                Name::Dns(name) => SanType::DnsName((*name).try_into()?),
                Name::Mail(name) => SanType::Rfc822Name((*name).try_into()?),
                Name::Uri(name) => SanType::URI((*name).try_into()?),
            });
        }
        if self.is_ca {
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        }
        if self.has_unknown_extension {
            let unknown = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
            params.custom_extensions = vec![unknown];
        }
        let algorithm = if self.has_larger_key {
            &PKCS_ECDSA_P384_SHA384
        } else {
            &PKCS_ECDSA_P256_SHA256
        };
        let key = KeyPair::generate_for(algorithm)?;
        Ok(params.serialize_request(&key)?.pem()?)
    }
}
