//! The check of the deny list within the TLS handshake, so that the gateway refuses an agent as if its certificate
//! were not valid.

use std::sync::{Arc, OnceLock};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    pki_types::{CertificateDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

use super::{DeniedAgent, DenyList, identify_agent};

/// The agent that a handshake has refused because of the deny list, if it has.
pub type HandshakeDenial = Arc<OnceLock<DeniedAgent>>;

/// Verifies an agent's certificate, and then compares it with the deny list.
#[derive(Debug)]
pub(super) struct DenyVerifier {
    pub(super) inner: Arc<dyn ClientCertVerifier>,
    pub(super) deny_list: Arc<DenyList>,
    pub(super) denial: HandshakeDenial,
}

impl ClientCertVerifier for DenyVerifier {
    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.inner
            .verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    /// Checks the deny list only now, because the signature shows that the peer has the certificate's private key.
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let valid = self.inner.verify_tls13_signature(message, cert, dss)?;
        // A certificate that is not an agent's is refused after the handshake.
        let agent = identify_agent(cert).ok();
        let Some(denied) = agent.and_then(|agent| self.deny_list.entry_of(&agent)) else {
            return Ok(valid);
        };
        let error = match &denied {
            DeniedAgent::Node(_) => CertificateError::ApplicationVerificationFailure,
            DeniedAgent::Certificate(..) => CertificateError::Revoked,
        };
        self.denial.get_or_init(|| denied);
        Err(error.into())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.inner.requires_raw_public_keys()
    }
}
