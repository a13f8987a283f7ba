//! The command line's end of the admin socket.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{Request, StatusCode, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer: the services of the largest clusters.
const MOST_BYTES: usize = 1 << 30;

/// The daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No daemon listens.
    #[error("no culvert node is running with this config: nobody answers on {path}")]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The socket may not be used.
    #[error("cannot talk to the daemon on {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The daemon is there but does not answer as it should.
    #[error("the daemon on {path} does not answer: {reason}")]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
}

/// Asks the daemon for a path and gives the body of its answer.
///
/// # Errors
///
/// No daemon runs, or it does not answer.
pub async fn ask(socket: &Path, path: &str) -> Result<Bytes, AskError> {
    let no_answer = |reason: String| AskError::NoAnswer {
        path: socket.to_owned(),
        reason,
    };
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|source| no_connection(socket, source))?;
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| e.to_string())?;
        let request = Request::get(path)
            .header(HOST, "culvert")
            .body(Empty::<Bytes>::new())
            .map_err(|error| error.to_string())?;
        let answer = async move {
            let response = sender
                .send_request(request)
                .await
                .map_err(|e| e.to_string())?;
            let code = response.status();
            let body = Limited::new(response.into_body(), MOST_BYTES)
                .collect()
                .await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            if code == StatusCode::OK {
                Ok(body)
            } else {
                Err(format!("{code}: {}", String::from_utf8_lossy(&body).trim()))
            }
        };
        let (answer, _closed) = tokio::join!(answer, connection);
        answer
    };
    match timeout(PATIENCE, exchange).await {
        Ok(answer) => answer.map_err(no_answer),
        Err(_) => Err(no_answer(format!(
            "nothing came in {} s",
            PATIENCE.as_secs()
        ))),
    }
}

fn no_connection(socket: &Path, source: io::Error) -> AskError {
    let path = socket.to_owned();
    let is_absent = matches!(
        source.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    );
    if is_absent {
        AskError::NoDaemon { path, source }
    } else {
        AskError::Connect { path, source }
    }
}
