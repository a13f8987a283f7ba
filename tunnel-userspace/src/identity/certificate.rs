//! Parses certificates, and checks their names and usages.

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    prelude::FromDer as _,
    x509::{AttributeTypeAndValue, X509Name},
};

use super::{GATEWAY_NAME, Role, SerialNumber, check_node_name};

/// The fields of a certificate that the tunnel checks.
#[derive(Clone, Debug)]
pub(super) struct ParsedCertificate {
    pub(super) subject: String,
    pub(super) issuer: String,
    pub(super) serial: SerialNumber,
    pub(super) not_before: Timestamp,
    pub(super) not_after: Timestamp,
    /// True if this is a CA certificate, according to its basic constraints.
    pub(super) is_ca: bool,
    /// The subject's public key, as encoded in the certificate.
    pub(super) public_key: Vec<u8>,
    organizations: Vec<String>,
    common_names: Vec<String>,
    dns_names: Vec<String>,
    server_auth: bool,
    client_auth: bool,
}

impl ParsedCertificate {
    /// Parses a certificate. The error describes how it is malformed.
    pub(super) fn read(der: &CertificateDer<'_>) -> Result<Self, String> {
        let (rest, parsed) =
            X509Certificate::from_der(der).map_err(|error| match error.is_incomplete() {
                true => "a certificate in it is truncated".to_owned(),
                false => format!("a certificate in it is malformed: {error}"),
            })?;
        if !rest.is_empty() {
            return Err("a section has bytes after its certificate".to_owned());
        }
        let failed = |error| format!("a certificate in it is malformed: {error}");
        let usage = parsed.extended_key_usage().map_err(failed)?;
        let constraints = parsed.basic_constraints().map_err(failed)?;
        let names = parsed.subject_alternative_name().map_err(failed)?;
        let dns_names = names
            .iter()
            .flat_map(|names| &names.value.general_names)
            .filter_map(dns_name)
            .collect();
        Ok(Self {
            subject: escaped_name(parsed.subject()),
            issuer: escaped_name(parsed.issuer()),
            serial: SerialNumber::of_bytes(parsed.raw_serial()),
            not_before: timestamp(parsed.validity().not_before.timestamp())?,
            not_after: timestamp(parsed.validity().not_after.timestamp())?,
            is_ca: constraints.is_some_and(|constraints| constraints.value.ca),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            organizations: attribute_texts(parsed.subject().iter_organization())?,
            common_names: attribute_texts(parsed.subject().iter_common_name())?,
            dns_names,
            server_auth: usage.as_ref().is_some_and(|usage| usage.value.server_auth),
            client_auth: usage.as_ref().is_some_and(|usage| usage.value.client_auth),
        })
    }

    /// Returns the role that the certificate is for, or an error if it is for neither role.
    pub(super) fn role(&self) -> Result<Role, String> {
        match &*self.organizations {
            [organization] if organization == Role::Gateway.organization() => Ok(Role::Gateway),
            [organization] if organization == Role::Agent.organization() => Ok(Role::Agent),
            _ => Err(format!(
                "its subject is {}; expected O={} for a gateway, or O={} for an agent",
                self.subject,
                Role::Gateway.organization(),
                Role::Agent.organization()
            )),
        }
    }

    /// Returns the common name, after checking the names and usages that the role requires.
    pub(super) fn checked_name(&self, role: Role) -> Result<&str, String> {
        let [name] = &*self.common_names else {
            let subject = &self.subject;
            return Err(format!(
                "its subject is {subject}; expected exactly one common name (CN)"
            ));
        };
        let is_named = self.dns_names.iter().any(|name| name == GATEWAY_NAME);
        let (is_fit, usage) = match role {
            Role::Gateway if !is_named => {
                return Err(format!(
                    "it has no subject alternative name {GATEWAY_NAME} (DNS)"
                ));
            }
            Role::Gateway => (
                self.server_auth && !self.client_auth,
                "server authentication",
            ),
            Role::Agent => {
                check_node_name(name).map_err(|error| error.to_string())?;
                (
                    self.client_auth && !self.server_auth,
                    "client authentication",
                )
            }
        };
        if !is_fit {
            return Err(format!(
                "its extended key usage must be {usage} and nothing else"
            ));
        }
        Ok(name)
    }
}

fn dns_name(name: &GeneralName<'_>) -> Option<String> {
    if let GeneralName::DNSName(name) = name {
        Some(name.to_ascii_lowercase())
    } else {
        None
    }
}

/// Formats a name, with control characters escaped.
pub(super) fn escaped_name(name: &X509Name<'_>) -> String {
    name.to_string().escape_debug().to_string()
}

fn timestamp(seconds: i64) -> Result<Timestamp, String> {
    Timestamp::from_second(seconds)
        .map_err(|error| format!("the validity of a certificate is malformed: {error}"))
}

pub(super) fn attribute_texts<'a>(
    values: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>,
) -> Result<Vec<String>, String> {
    values
        .map(|value| value.as_str().map(str::to_owned))
        .collect::<Result<_, _>>()
        .map_err(|error| format!("the subject is malformed: {error}"))
}
