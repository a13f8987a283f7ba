//! Adapts responses from the API server: it limits how long they may be silent, and passes on the requested
//! delay before a retry.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Response, StatusCode, header::RETRY_AFTER};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::{
    client::Body,
    core::{Status, response::StatusDetails},
};
use tokio::time::timeout;
use tower::BoxError;

/// The body of a response from the API server.
pub(super) type ResponseBody = UnsyncBoxBody<Bytes, BoxError>;

/// The error for a response that stalls in the middle.
#[derive(Debug, thiserror::Error)]
#[error("the API server sent no data for {0:?} in the middle of a response")]
struct SilenceError(Duration);

/// Converts a body without limiting how long it may be silent.
pub(super) fn without_limit(body: Body) -> ResponseBody {
    body.map_err(BoxError::from).boxed_unsync()
}

/// Limits how long a body may be silent, since TCP keep-alive detects dead connections but not a stuck
/// server. When the limit is reached, `on_silence` is called and the body fails.
pub(super) fn with_silence_limit(
    body: Body,
    max_silence: Duration,
    on_silence: impl FnOnce(&str) + Send + 'static,
) -> ResponseBody {
    let frames = stream::try_unfold(
        (body, Some(on_silence)),
        move |(mut body, mut on_silence)| async move {
            match timeout(max_silence, body.frame()).await {
                Ok(Some(frame)) => Ok(Some((frame?, (body, on_silence)))),
                Ok(None) => Ok(None),
                Err(_) => {
                    let error = SilenceError(max_silence);
                    if let Some(on_silence) = on_silence.take() {
                        on_silence(&error.to_string());
                    }
                    Err(BoxError::from(error))
                }
            }
        },
    );
    StreamBody::new(frames).boxed_unsync()
}

/// Copies the delay in the `Retry-After` header of a 429 response into the body, since callers see only the
/// body. An overloaded API server sends the delay only in the header (apiserver
/// `pkg/server/filters/priority-and-fairness.go`).
pub(super) async fn with_retry_after(
    response: Response<ResponseBody>,
) -> Result<Response<ResponseBody>, BoxError> {
    let seconds = response.headers().get(RETRY_AFTER);
    let seconds = seconds.and_then(|value| value.to_str().ok()?.parse::<u32>().ok());
    let Some(seconds) = seconds.filter(|_| response.status() == StatusCode::TOO_MANY_REQUESTS)
    else {
        return Ok(response);
    };
    let (parts, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    let mut status = serde_json::from_slice(&body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(&body);
        Status::failure(text.trim(), "TooManyRequests").with_code(parts.status.as_u16())
    });
    let details = status.details.get_or_insert_with(|| StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: 0,
    });
    details.retry_after_seconds = details.retry_after_seconds.max(seconds);
    let body = Full::from(serde_json::to_vec(&status)?);
    let body = body.map_err(|never| match never {}).boxed_unsync();
    Ok(Response::from_parts(parts, body))
}
