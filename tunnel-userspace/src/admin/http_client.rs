//! The HTTP client that the command line uses to query the admin socket.

use std::{
    error::Error,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Method, Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};

/// The timeout for a response, and for each part of its body. The daemon loads programs for an explanation, which takes seconds on
/// a slow machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum size of a response, in bytes. This is enough for all Services in the largest clusters.
const MAX_RESPONSE_BYTES: usize = 1 << 30;

/// The error from a failed request to the daemon.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No daemon listens on the socket.
    #[error("no Culvert daemon is running with this config: nothing listens on {0}")]
    NoDaemon(PathBuf, #[source] io::Error),
    /// Connecting to the socket failed, for example because of missing permissions.
    #[error("cannot connect to the daemon at {0}")]
    Connect(PathBuf, #[source] io::Error),
    /// The daemon responded with status 503 and gave this reason.
    #[error("the daemon at {0} refused the request: {1}")]
    Refused(PathBuf, String),
    /// The daemon sent no valid response in time.
    #[error("no valid response from the daemon at {0}: {1}")]
    NoValidResponse(PathBuf, String),
}

/// Requests a path from the daemon and returns the response body.
///
/// # Errors
///
/// Returns an error if no daemon is running, or if it sends no valid response.
pub async fn request(socket: &Path, path: &str) -> Result<Bytes, RequestError> {
    send(socket, Method::GET, path).await
}

/// Sends a request that changes something to the daemon, and returns the response body.
///
/// # Errors
///
/// Returns an error if no daemon is running, or if it sends no valid response.
pub async fn post(socket: &Path, path: &str) -> Result<Bytes, RequestError> {
    send(socket, Method::POST, path).await
}

async fn send(socket: &Path, method: Method, path: &str) -> Result<Bytes, RequestError> {
    let at = socket.to_owned();
    let stream = UnixStream::connect(socket).await.map_err(|error| {
        let not_listening = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
        if not_listening.contains(&error.kind()) {
            RequestError::NoDaemon(at.clone(), error)
        } else {
            RequestError::Connect(at.clone(), error)
        }
    })?;
    let (code, body) = exchange(stream, method, path)
        .await
        .map_err(|error| RequestError::NoValidResponse(at.clone(), error.to_string()))?;
    let text = || String::from_utf8_lossy(&body).trim().to_owned();
    match code {
        StatusCode::OK => Ok(body),
        StatusCode::SERVICE_UNAVAILABLE => Err(RequestError::Refused(at, text())),
        _ => Err(RequestError::NoValidResponse(
            at,
            format!("{code}: {}", text()),
        )),
    }
}

type ExchangeError = Box<dyn Error + Send + Sync>;

async fn exchange(
    stream: UnixStream,
    method: Method,
    path: &str,
) -> Result<(StatusCode, Bytes), ExchangeError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "culvert")
        .body(Empty::<Bytes>::new())?;
    let exchanged = async move {
        let response = in_time(sender.send_request(request)).await??;
        let (head, body) = response.into_parts();
        let mut body = pin!(Limited::new(body, MAX_RESPONSE_BYTES));
        let mut received = BytesMut::new();
        // The daemon creates a long body while it sends it.
        while let Some(frame) = in_time(body.frame()).await? {
            if let Ok(data) = frame?.into_data() {
                received.extend_from_slice(&data);
            }
        }
        Ok((head.status, received.freeze()))
    };
    let mut exchanged = pin!(exchanged);
    tokio::select! {
        biased;
        exchanged = &mut exchanged => exchanged,
        _closed = connection => exchanged.await,
    }
}

/// Waits for the next part of a response.
async fn in_time<T>(part: impl Future<Output = T>) -> Result<T, ExchangeError> {
    let why = || format!("none within {} s", RESPONSE_TIMEOUT.as_secs());
    timeout(RESPONSE_TIMEOUT, part)
        .await
        .map_err(|_elapsed| why().into())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
    };

    use super::*;

    /// Sends a request to a daemon that responds with `response`, or never responds if that is `None`.
    /// Returns the error from the request.
    async fn request_error(response: Option<&str>) -> String {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("bound");
        let daemon = async {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_buf(&mut request).await.expect("a request");
            }
            match response {
                Some(response) => stream
                    .write_all(response.as_bytes())
                    .await
                    .expect("written"),
                None => std::future::pending::<()>().await,
            }
            drop(stream);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            response = request(&socket, "/services") => response.expect_err("an error").to_string(),
            () = daemon => String::new(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_response_times_out() {
        let error = timeout(
            RESPONSE_TIMEOUT + Duration::from_secs(1),
            request_error(None),
        )
        .await;
        let error = error.expect("timed out");
        assert!(error.ends_with(": none within 30 s"), "{error}");
    }

    #[tokio::test]
    async fn a_503_response_is_quoted_in_the_error() {
        let response =
            "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 15\r\n\r\nnot ready: why\n";
        let error = request_error(Some(response)).await;
        assert!(
            error.ends_with("refused the request: not ready: why"),
            "{error}"
        );
    }
}
