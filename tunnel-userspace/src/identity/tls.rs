//! The TLS settings for gateways and agents, built from verified files.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::Arc,
};

use jiff::Timestamp;
use rustls::{
    CertificateError, ClientConfig, Error, InconsistentKeys, RootCertStore, ServerConfig,
    client::{Resumption, WebPkiServerVerifier, danger::ServerCertVerifier as _},
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
    time_provider::TimeProvider,
    version::TLS13,
};

use super::{
    ALPN, DenyList, FileError, FileProblem, GATEWAY_NAME, HandshakeDenial, IdentityFiles, Role,
    certificate::ParsedCertificate,
    clock,
    deny_verifier::DenyVerifier,
    late_clock_verifier::{LateClockVerifier, timestamp, unix_time},
    pem_files::{self, FileContents, file_error},
};

/// This process's certificate after verification, and the TLS settings built from it: TLS 1.3 only, mutual
/// authentication, the protocol in [`ALPN`], and no session resumption.
pub struct Identity {
    /// The settings for a gateway. They require a client certificate issued by a trusted CA;
    /// [`super::identify_agent`] then identifies the agent.
    pub server: Arc<ServerConfig>,
    /// The settings for an agent. They require a server certificate issued by a trusted CA for
    /// [`Self::gateway_name`].
    pub client: Arc<ClientConfig>,
    /// The certificate's common name.
    pub name: String,
    /// The time when the certificate became valid.
    pub from: Timestamp,
    /// The time when the certificate expires.
    pub expires: Timestamp,
    /// The time when the first of the trusted CAs expires.
    pub ca_expires: Timestamp,
    /// The name of the CA that has issued the certificate.
    pub issuer: String,
    /// The time at which the same files must be verified again, because a certificate then becomes valid or
    /// expires.
    pub(super) reverify_at: Timestamp,
    /// The certificate itself.
    leaf: CertificateDer<'static>,
    verifiers: Verifiers,
    provider: Arc<CryptoProvider>,
    resolver: Arc<SingleCertAndKey>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// Returns the name that agents verify instead of the address that they dial.
    #[must_use]
    pub fn gateway_name() -> ServerName<'static> {
        // Never used, as the handshake tests show. No certificate is valid for the unspecified address.
        let unused = || ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        ServerName::try_from(GATEWAY_NAME).unwrap_or_else(|_| unused())
    }

    /// Returns true if both have the same certificate. The trusted CAs may differ.
    #[must_use]
    pub fn has_same_certificate(&self, other: &Self) -> bool {
        self.leaf == other.leaf
    }

    /// Returns the settings for a gateway's handshake that also refuse the agents on a deny list. If the handshake
    /// refuses an agent because of the list, the second value names the agent.
    ///
    /// # Errors
    ///
    /// Returns an error if the TLS library rejects the settings.
    pub fn server_with(
        &self,
        deny_list: Arc<DenyList>,
    ) -> Result<(Arc<ServerConfig>, HandshakeDenial), Error> {
        let denial = HandshakeDenial::default();
        if deny_list.is_empty() {
            return Ok((Arc::clone(&self.server), denial));
        }
        let verifier = Arc::new(DenyVerifier {
            inner: Arc::clone(&self.verifiers.client_verifier),
            deny_list,
            denial: Arc::clone(&denial),
        });
        let config = server_config(&self.provider, verifier, Arc::clone(&self.resolver))?;
        Ok((Arc::new(config), denial))
    }

    /// Verifies the certificates that a peer has shown in its handshake, as of the time `now`. `chain` begins with
    /// the peer's own certificate.
    ///
    /// # Errors
    ///
    /// Returns an error if the certificate has expired, or if its CA is no longer trusted.
    pub fn verify_peer(
        &self,
        chain: &[CertificateDer<'static>],
        role: Role,
        now: Timestamp,
    ) -> Result<(), Error> {
        self.verifiers.verify(chain, role, now)
    }

    /// Verifies the contents of the three files together, as of the time `now`.
    pub(super) fn verify(
        files: &IdentityFiles,
        contents: &FileContents,
        role: Role,
        now: Timestamp,
    ) -> Result<Self, FileError> {
        let cas = pem_files::parse_certificates(&files.ca, &contents.ca)?;
        let chain = pem_files::parse_certificates(&files.cert, &contents.cert)?;
        let key = pem_files::parse_private_key(&files.key, &contents.key)?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let trust = trusted_cas(files, cas, now)?;
        let Some((_, parsed)) = chain.first() else {
            return Err(file_error(&files.cert, FileProblem::NoCertificate));
        };
        let parsed = parsed.clone();
        let (name, until) = check_certificate(files, &parsed, role, now)?;
        let chain: Vec<_> = chain.into_iter().map(|(der, _)| der).collect();
        let certified = certified_key(files, chain, key, &provider)?;
        let verifiers = Verifiers::new(&trust.roots, &provider)
            .map_err(|error| file_error(&files.ca, FileProblem::RefusedByTls(error)))?;
        verifiers
            .verify(&certified.cert, role, now)
            .map_err(|error| file_error(&files.cert, chain_problem(&error, &parsed, &files.ca)))?;
        let failed =
            |error: Error| file_error(&files.cert, FileProblem::RefusedByTls(error.to_string()));
        let leaf = certified.cert.first().cloned();
        let leaf = leaf.ok_or_else(|| file_error(&files.cert, FileProblem::NoCertificate))?;
        let resolver = Arc::new(SingleCertAndKey::from(certified));
        Ok(Self {
            leaf,
            server: Arc::new(
                server_config(
                    &provider,
                    Arc::clone(&verifiers.client_verifier),
                    Arc::clone(&resolver),
                )
                .map_err(failed)?,
            ),
            client: Arc::new(
                client_config(&provider, &verifiers, Arc::clone(&resolver)).map_err(failed)?,
            ),
            name,
            from: parsed.not_before,
            expires: parsed.not_after,
            ca_expires: trust.expires,
            issuer: parsed.issuer,
            reverify_at: trust.reverify_at.min(until),
            verifiers,
            provider,
            resolver,
        })
    }
}

/// The CA certificates that are currently valid.
struct TrustedCas {
    roots: Arc<RootCertStore>,
    expires: Timestamp,
    reverify_at: Timestamp,
}

fn trusted_cas(
    files: &IdentityFiles,
    cas: Vec<(CertificateDer<'static>, ParsedCertificate)>,
    now: Timestamp,
) -> Result<TrustedCas, FileError> {
    let mut roots = RootCertStore::empty();
    let mut expires = Timestamp::MAX;
    let mut reverify_at = Timestamp::MAX;
    let mut first_problem = None;
    for (der, parsed) in cas {
        if !parsed.is_ca {
            return Err(file_error(&files.ca, FileProblem::NotCa(parsed.subject)));
        }
        match check_validity(&parsed, now) {
            Ok(until) => {
                roots.add(der).map_err(|error| {
                    file_error(&files.ca, FileProblem::Damaged(error.to_string()))
                })?;
                expires = expires.min(parsed.not_after);
                reverify_at = reverify_at.min(until);
            }
            Err(problem) => {
                if let FileProblem::NotYetValid { from, .. } = problem {
                    reverify_at = reverify_at.min(from);
                }
                first_problem.get_or_insert(problem);
            }
        }
    }
    match first_problem {
        Some(problem) if roots.is_empty() => Err(file_error(&files.ca, problem)),
        _ => Ok(TrustedCas {
            roots: Arc::new(roots),
            expires,
            reverify_at,
        }),
    }
}

/// Checks that a certificate is currently valid. Returns the first second after it expires.
fn check_validity(parsed: &ParsedCertificate, now: Timestamp) -> Result<Timestamp, FileProblem> {
    if now < parsed.not_before {
        let from = parsed.not_before;
        return Err(FileProblem::NotYetValid { from, now });
    }
    // The validity period includes its last second (RFC 5280 section 4.1.2.5).
    let after = parsed.not_after.as_second() + 1;
    if now.as_second() >= after {
        let at = parsed.not_after;
        return Err(FileProblem::Expired { at, now });
    }
    Ok(Timestamp::from_second(after).unwrap_or(Timestamp::MAX))
}

/// Checks that a certificate is currently valid and is for the given role. Returns its common name, and the
/// first second after it expires.
fn check_certificate(
    files: &IdentityFiles,
    parsed: &ParsedCertificate,
    role: Role,
    now: Timestamp,
) -> Result<(String, Timestamp), FileError> {
    let failed = |problem| file_error(&files.cert, problem);
    let until = check_validity(parsed, now).map_err(failed)?;
    let found = parsed
        .role()
        .map_err(|error| failed(FileProblem::WrongPurpose(error)))?;
    if found != role {
        return Err(failed(FileProblem::WrongRole {
            found,
            wanted: role,
        }));
    }
    let name = parsed
        .checked_name(role)
        .map_err(|error| failed(FileProblem::WrongPurpose(error)))?;
    Ok((name.to_owned(), until))
}

fn certified_key(
    files: &IdentityFiles,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, FileError> {
    CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        let is_other = error == Error::InconsistentKeys(InconsistentKeys::KeyMismatch);
        let problem = if is_other {
            FileProblem::KeyMismatch {
                cert: files.cert.clone(),
            }
        } else {
            FileProblem::UnusableKey(error.to_string())
        };
        file_error(&files.key, problem)
    })
}

/// The verifiers for the peer's certificate in a handshake.
struct Verifiers {
    client_verifier: Arc<dyn ClientCertVerifier>,
    server_verifier: Arc<WebPkiServerVerifier>,
}

impl Verifiers {
    fn new(roots: &Arc<RootCertStore>, provider: &Arc<CryptoProvider>) -> Result<Self, String> {
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
        let servers =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
        Ok(Self {
            client_verifier: clients.build().map_err(|error| error.to_string())?,
            server_verifier: servers.build().map_err(|error| error.to_string())?,
        })
    }

    /// Verifies the certificates that an end with the given role shows.
    fn verify(
        &self,
        chain: &[CertificateDer<'static>],
        role: Role,
        now: Timestamp,
    ) -> Result<(), Error> {
        let Some((leaf, between)) = chain.split_first() else {
            return Err(Error::NoCertificatesPresented);
        };
        let now = unix_time(now);
        match role {
            Role::Agent => {
                self.client_verifier
                    .verify_client_cert(leaf, between, now)?;
            }
            Role::Gateway => {
                let name = Identity::gateway_name();
                self.server_verifier
                    .verify_server_cert(leaf, between, &name, &[], now)?;
            }
        }
        Ok(())
    }
}

/// The clock that handshakes use.
#[derive(Debug)]
struct VerificationClock;

impl TimeProvider for VerificationClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(clock::now()))
    }
}

/// Returns the message of an error. If it is about the dates of a certificate, the message has these and the time of the clock.
#[must_use]
pub fn describe(error: &Error) -> String {
    let Error::InvalidCertificate(problem) = error else {
        return error.to_string();
    };
    let (dates, time) = if let CertificateError::ExpiredContext { time, not_after } = problem {
        (format!("expired on {}", timestamp(*not_after)), time)
    } else if let CertificateError::NotValidYetContext { time, not_before } = problem {
        (
            format!("is not valid before {}", timestamp(*not_before)),
            time,
        )
    } else {
        return error.to_string();
    };
    let clock = clock::describe(timestamp(*time));
    format!("the peer's certificate {dates}, and {clock}")
}

fn chain_problem(error: &Error, parsed: &ParsedCertificate, ca: &Path) -> FileProblem {
    let is_other = matches!(
        error,
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)
    );
    if is_other {
        FileProblem::OtherIssuer {
            issuer: parsed.issuer.clone(),
            ca: ca.to_owned(),
        }
    } else {
        FileProblem::RefusedByTls(error.to_string())
    }
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
    resolver: Arc<SingleCertAndKey>,
) -> Result<ServerConfig, Error> {
    let clock = Arc::new(VerificationClock);
    let mut config = ServerConfig::builder_with_details(Arc::clone(provider), clock)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would skip certificate verification.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    verifiers: &Verifiers,
    resolver: Arc<SingleCertAndKey>,
) -> Result<ClientConfig, Error> {
    let clock = Arc::new(VerificationClock);
    let verifier = LateClockVerifier(Arc::clone(&verifiers.server_verifier));
    let mut config = ClientConfig::builder_with_details(Arc::clone(provider), clock)
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}
