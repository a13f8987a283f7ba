//! The facts of a certificate that the tunnel checks.

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use x509_parser::{
    certificate::X509Certificate,
    extensions::GeneralName,
    prelude::FromDer as _,
    x509::{AttributeTypeAndValue, X509Name},
};

use super::{AGENTS, GATEWAY_NAME, GATEWAYS, Role, check_node_name};

/// The facts of a certificate that the tunnel checks.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) subject: String,
    pub(super) issuer: String,
    pub(super) from: Timestamp,
    pub(super) until: Timestamp,
    /// True if it may issue certificates (the CA basic constraint).
    pub(super) is_authority: bool,
    /// The subject's public key, as encoded in the certificate.
    pub(super) public_key: Vec<u8>,
    organizations: Vec<String>,
    common_names: Vec<String>,
    dns_names: Vec<String>,
    for_servers: bool,
    for_clients: bool,
}

impl Facts {
    /// Reads a certificate; the error describes the damage.
    pub(super) fn read(der: &CertificateDer<'_>) -> Result<Self, String> {
        let (rest, parsed) = X509Certificate::from_der(der)
            .map_err(|error| format!("not a certificate: {error}"))?;
        if !rest.is_empty() {
            return Err("there are bytes after the certificate".to_owned());
        }
        let failed = |error| format!("not a certificate: {error}");
        let usage = parsed.extended_key_usage().map_err(failed)?;
        let constraints = parsed.basic_constraints().map_err(failed)?;
        let names = parsed.subject_alternative_name().map_err(failed)?;
        let dns_names = names
            .iter()
            .flat_map(|names| &names.value.general_names)
            .filter_map(dns_name)
            .collect();
        Ok(Self {
            subject: shown(parsed.subject()),
            issuer: shown(parsed.issuer()),
            from: timestamp(parsed.validity().not_before.timestamp())?,
            until: timestamp(parsed.validity().not_after.timestamp())?,
            is_authority: constraints.is_some_and(|constraints| constraints.value.ca),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            organizations: texts(parsed.subject().iter_organization())?,
            common_names: texts(parsed.subject().iter_common_name())?,
            dns_names,
            for_servers: usage.as_ref().is_some_and(|usage| usage.value.server_auth),
            for_clients: usage.as_ref().is_some_and(|usage| usage.value.client_auth),
        })
    }

    /// Returns the role in the tunnel that the certificate is for, or the reason why it has none.
    pub(super) fn role(&self) -> Result<Role, String> {
        match &*self.organizations {
            [organization] if organization == GATEWAYS => Ok(Role::Gateway),
            [organization] if organization == AGENTS => Ok(Role::Agent),
            _ => Err(format!(
                "its subject, {}, is neither a gateway's (O={GATEWAYS}) nor an agent's \
                 (O={AGENTS})",
                self.subject
            )),
        }
    }

    /// Returns the common name if the certificate is complete for the role, or the reason why it is not.
    pub(super) fn name(&self, role: Role) -> Result<&str, String> {
        let [name] = &*self.common_names else {
            let subject = &self.subject;
            return Err(format!(
                "its subject, {subject}, has not one common name (CN)"
            ));
        };
        let is_named = self.dns_names.iter().any(|name| name == GATEWAY_NAME);
        let (is_fit, usage) = match role {
            Role::Gateway if !is_named => {
                return Err(format!("it lacks the DNS name {GATEWAY_NAME}"));
            }
            Role::Gateway => (
                self.for_servers && !self.for_clients,
                "a server, and no client",
            ),
            Role::Agent => {
                check_node_name(name).map_err(|error| error.to_string())?;
                (
                    self.for_clients && !self.for_servers,
                    "a client, and no server",
                )
            }
        };
        if !is_fit {
            return Err(format!("its extended key usage must be that of {usage}"));
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

/// Formats a name with its control characters escaped.
fn shown(name: &X509Name<'_>) -> String {
    name.to_string().escape_debug().to_string()
}

fn timestamp(seconds: i64) -> Result<Timestamp, String> {
    Timestamp::from_second(seconds).map_err(|error| format!("its validity: {error}"))
}

fn texts<'a>(
    values: impl Iterator<Item = &'a AttributeTypeAndValue<'a>>,
) -> Result<Vec<String>, String> {
    values
        .map(|value| value.as_str().map(str::to_owned))
        .collect::<Result<_, _>>()
        .map_err(|error| format!("its subject: {error}"))
}
