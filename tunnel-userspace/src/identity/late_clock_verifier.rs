//! The verification of a gateway's certificate on a machine whose clock may have woken in 1970.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
};

use super::clock;

/// The maximum number of certificates of a chain that may show a later time.
const MAX_CHAIN: usize = 4;

/// Verifies a gateway's certificate. While the clock of this machine can't be right, a certificate that a trusted CA has signed
/// and that is not valid yet shows that it is later already: it is verified as of the beginning of its validity, and so is
/// everything after it.
#[derive(Debug)]
pub(super) struct LateClockVerifier(pub(super) Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for LateClockVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verify = |as_of| {
            let inner = &self.0;
            inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, as_of)
        };
        let mut as_of = now;
        let mut verified = verify(as_of);
        for _ in 0..MAX_CHAIN {
            let Err(Error::InvalidCertificate(CertificateError::NotValidYetContext {
                not_before,
                ..
            })) = verified
            else {
                break;
            };
            if clock::problem().is_none() || not_before <= as_of {
                break;
            }
            as_of = not_before;
            verified = verify(as_of);
        }
        if verified.is_ok() && as_of > now {
            clock::learn(timestamp(as_of));
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Converts a time of the TLS library.
pub(super) fn timestamp(time: UnixTime) -> Timestamp {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}

/// Converts a time to one of the TLS library.
pub(super) fn unix_time(time: Timestamp) -> UnixTime {
    let seconds = u64::try_from(time.as_second()).unwrap_or_default();
    UnixTime::since_unix_epoch(Duration::from_secs(seconds))
}
