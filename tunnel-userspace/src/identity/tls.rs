//! The TLS settings of gateways and agents, built from verified files.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use rustls::{
    CertificateError, ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};

use super::{
    ALPN, Files, GATEWAY_NAME, Reason, Rejected, Role,
    certificate::Facts,
    files::{self, Contents, reject},
};

/// A verified certificate of this process, and the TLS settings built from it: TLS 1.3 only, mutual
/// authentication, the protocol [`ALPN`], no session resumption.
pub struct Identity {
    /// The settings of a gateway. It requires a client certificate issued by the CA; [`super::agent_of`]
    /// then identifies the agent.
    pub server: Arc<ServerConfig>,
    /// The settings of an agent. It requires a server certificate issued by the CA for
    /// [`Self::gateway_name`].
    pub client: Arc<ClientConfig>,
    /// The common name of the certificate.
    pub name: String,
    /// The time when the certificate became valid.
    pub from: Timestamp,
    /// The time when the certificate expires.
    pub expires: Timestamp,
    /// The earliest time at which a trusted CA expires.
    pub ca_expires: Timestamp,
    /// The time at which the same files must be verified again, since the validity of a certificate begins
    /// or ends.
    pub(super) revisit: Timestamp,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// Returns the name that agents verify, instead of the address they dial.
    #[must_use]
    pub fn gateway_name() -> ServerName<'static> {
        // Never used, as the handshake tests show; no certificate has the unspecified address.
        let nobody = || ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        ServerName::try_from(GATEWAY_NAME).unwrap_or_else(|_| nobody())
    }

    /// Verifies the contents of the three files together, at the time `now`.
    pub(super) fn verified(
        files: &Files,
        contents: &Contents,
        role: Role,
        now: Timestamp,
    ) -> Result<Self, Rejected> {
        let authorities = files::certificates(&files.ca, &contents.ca)?;
        let chain = files::certificates(&files.cert, &contents.cert)?;
        let key = files::key(&files.key, &contents.key)?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let trust = trusted(files, authorities, now)?;
        let Some((_, facts)) = chain.first() else {
            return Err(reject(&files.cert, Reason::NoCertificate));
        };
        let facts = facts.clone();
        let (name, until) = fit(files, &facts, role, now)?;
        let chain: Vec<_> = chain.into_iter().map(|(der, _)| der).collect();
        let certified = certified(files, chain, key, &provider)?;
        let verifiers = Verifiers::new(&trust.roots, &provider)
            .map_err(|error| reject(&files.ca, Reason::Refused(error)))?;
        verifiers
            .verify(&certified.cert, role, now)
            .map_err(|error| reject(&files.cert, chain_reason(&error, &facts, &files.ca)))?;
        let failed = |error: Error| reject(&files.cert, Reason::Refused(error.to_string()));
        let resolver = Arc::new(SingleCertAndKey::from(certified));
        Ok(Self {
            server: Arc::new(server(&provider, &verifiers, Arc::clone(&resolver)).map_err(failed)?),
            client: Arc::new(client(&provider, &verifiers, resolver).map_err(failed)?),
            name,
            from: facts.from,
            expires: facts.until,
            ca_expires: trust.expires,
            revisit: trust.revisit.min(until),
        })
    }
}

/// The CA certificates that are valid now.
struct Trust {
    roots: Arc<RootCertStore>,
    expires: Timestamp,
    revisit: Timestamp,
}

fn trusted(
    files: &Files,
    authorities: Vec<(CertificateDer<'static>, Facts)>,
    now: Timestamp,
) -> Result<Trust, Rejected> {
    let mut roots = RootCertStore::empty();
    let mut expires = Timestamp::MAX;
    let mut revisit = Timestamp::MAX;
    let mut out_of_date = None;
    for (der, facts) in authorities {
        if !facts.is_authority {
            return Err(reject(&files.ca, Reason::NotAuthority(facts.subject)));
        }
        match validity(&facts, now) {
            Ok(until) => {
                roots
                    .add(der)
                    .map_err(|error| reject(&files.ca, Reason::Damaged(error.to_string())))?;
                expires = expires.min(facts.until);
                revisit = revisit.min(until);
            }
            Err(reason) => {
                if let Reason::NotYetValid(from) = reason {
                    revisit = revisit.min(from);
                }
                out_of_date.get_or_insert(reason);
            }
        }
    }
    match out_of_date {
        Some(reason) if roots.is_empty() => Err(reject(&files.ca, reason)),
        _ => Ok(Trust {
            roots: Arc::new(roots),
            expires,
            revisit,
        }),
    }
}

/// Checks that a certificate is valid now; returns the second after its expiry.
fn validity(facts: &Facts, now: Timestamp) -> Result<Timestamp, Reason> {
    if now < facts.from {
        return Err(Reason::NotYetValid(facts.from));
    }
    // The validity includes its last second (RFC 5280 section 4.1.2.5).
    let after = facts.until.as_second() + 1;
    if now.as_second() >= after {
        return Err(Reason::Expired(facts.until));
    }
    Ok(Timestamp::from_second(after).unwrap_or(Timestamp::MAX))
}

/// Checks that a certificate is valid now and for the role; returns its common name, and the second after
/// its expiry.
fn fit(
    files: &Files,
    facts: &Facts,
    role: Role,
    now: Timestamp,
) -> Result<(String, Timestamp), Rejected> {
    let failed = |reason| reject(&files.cert, reason);
    let until = validity(facts, now).map_err(failed)?;
    let is = facts.role().map_err(|why| failed(Reason::Unfit(why)))?;
    if is != role {
        return Err(failed(Reason::OtherRole { is, wanted: role }));
    }
    let name = facts.name(role).map_err(|why| failed(Reason::Unfit(why)))?;
    Ok((name.to_owned(), until))
}

fn certified(
    files: &Files,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, Rejected> {
    CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        let is_other = error == Error::InconsistentKeys(InconsistentKeys::KeyMismatch);
        let reason = if is_other {
            Reason::OtherKey {
                cert: files.cert.clone(),
            }
        } else {
            Reason::KeyRefused(error.to_string())
        };
        reject(&files.key, reason)
    })
}

/// The verifiers of the peer's certificate in a handshake.
struct Verifiers {
    of_clients: Arc<dyn ClientCertVerifier>,
    of_servers: Arc<WebPkiServerVerifier>,
}

impl Verifiers {
    fn new(roots: &Arc<RootCertStore>, provider: &Arc<CryptoProvider>) -> Result<Self, String> {
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
        let servers =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
        Ok(Self {
            of_clients: clients.build().map_err(|error| error.to_string())?,
            of_servers: servers.build().map_err(|error| error.to_string())?,
        })
    }

    /// Verifies this process's certificate as the peer will.
    fn verify(
        &self,
        chain: &[CertificateDer<'static>],
        role: Role,
        now: Timestamp,
    ) -> Result<(), Error> {
        let Some((leaf, between)) = chain.split_first() else {
            return Err(Error::NoCertificatesPresented);
        };
        let seconds = u64::try_from(now.as_second()).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        match role {
            Role::Agent => {
                self.of_clients.verify_client_cert(leaf, between, now)?;
            }
            Role::Gateway => {
                let name = Identity::gateway_name();
                self.of_servers
                    .verify_server_cert(leaf, between, &name, &[], now)?;
            }
        }
        Ok(())
    }
}

fn chain_reason(error: &Error, facts: &Facts, ca: &Path) -> Reason {
    let is_other = matches!(
        error,
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)
    );
    if is_other {
        Reason::OtherAuthority {
            issuer: facts.issuer.clone(),
            ca: ca.to_owned(),
        }
    } else {
        Reason::Refused(error.to_string())
    }
}

fn server(
    provider: &Arc<CryptoProvider>,
    verifiers: &Verifiers,
    resolver: Arc<SingleCertAndKey>,
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::clone(&verifiers.of_clients))
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would skip the verification of the certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client(
    provider: &Arc<CryptoProvider>,
    verifiers: &Verifiers,
    resolver: Arc<SingleCertAndKey>,
) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_webpki_verifier(Arc::clone(&verifiers.of_servers))
        .with_client_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}
