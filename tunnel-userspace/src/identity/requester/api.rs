//! The requests to the API server.

use std::{future::Future, time::Duration};

use k8s_openapi::{
    ByteString,
    api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec},
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};

use crate::identity::{Role, request::MIN_EXPIRATION};

/// A request for a certificate.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The name of the object.
    pub name: &'a str,
    /// The role.
    pub role: Role,
    /// The request, as PEM.
    pub request: &'a [u8],
    /// The wanted life.
    pub life: Option<Duration>,
}

/// The state of a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum State {
    /// It was not decided about yet.
    Waits,
    /// The certificate, as PEM.
    Issued(Vec<u8>),
    /// It was denied, or failed: the reason.
    Refused(String),
    /// An object with the same name has another request.
    Foreign,
}

/// The error from a try.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The API server could not be asked.
    #[error("the API server can't be asked for a certificate: {0}")]
    Request(String),
    /// A file could not be read or written.
    #[error("{0}")]
    File(String),
}

/// Makes requests for certificates.
pub trait RequestApi: Send + Sync + 'static {
    /// Returns the state of a request, which is made if it does not exist.
    fn ask(&self, asked: &Asked<'_>) -> impl Future<Output = Result<State, ApiError>> + Send;
}

/// The API server.
pub struct KubeApi(Api<CertificateSigningRequest>);

impl KubeApi {
    /// Uses a client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self(Api::all(client))
    }
}

impl RequestApi for KubeApi {
    async fn ask(&self, asked: &Asked<'_>) -> Result<State, ApiError> {
        let failed = |error: kube::Error| ApiError::Request(crate::error_chain::chain(&error));
        if let Some(object) = self.0.get_opt(asked.name).await.map_err(failed)? {
            return Ok(state_of(&object, asked.request));
        }
        let object = object_for(asked);
        match self.0.create(&PostParams::default(), &object).await {
            Ok(object) => Ok(state_of(&object, asked.request)),
            // It was made by an earlier try whose answer was lost.
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(State::Waits),
            Err(error) => Err(failed(error)),
        }
    }
}

fn object_for(asked: &Asked<'_>) -> CertificateSigningRequest {
    let seconds = asked.life.map(|life| {
        let seconds = i64::try_from(life.as_secs()).unwrap_or(i64::MAX);
        i32::try_from(seconds.max(MIN_EXPIRATION)).unwrap_or(i32::MAX)
    });
    let usages = asked.role.usages().map(str::to_owned);
    CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(asked.name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(asked.request.to_vec()),
            signer_name: asked.role.signer().to_owned(),
            usages: Some(usages.into()),
            expiration_seconds: seconds,
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    }
}

fn state_of(object: &CertificateSigningRequest, request: &[u8]) -> State {
    if object.spec.request.0 != request {
        return State::Foreign;
    }
    let Some(status) = &object.status else {
        return State::Waits;
    };
    let conditions = status.conditions.iter().flatten();
    let mut refusals = conditions.filter(|it| matches!(&*it.type_, "Denied" | "Failed"));
    if let Some(refusal) = refusals.next() {
        let reason = refusal.reason.as_deref().unwrap_or("without a reason");
        let message = refusal.message.as_deref().unwrap_or_default();
        return State::Refused(format!("{reason}: {message}"));
    }
    match &status.certificate {
        Some(certificate) => State::Issued(certificate.0.clone()),
        None => State::Waits,
    }
}
