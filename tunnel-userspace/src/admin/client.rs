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
    /// The daemon refuses to answer.
    #[error("the daemon on {path} refuses: {reason}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// What it says.
        reason: String,
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
            Ok::<_, String>((code, body))
        };
        let (answer, _closed) = tokio::join!(answer, connection);
        answer
    };
    match timeout(PATIENCE, exchange).await {
        Ok(Ok((StatusCode::OK, body))) => Ok(body),
        Ok(Ok((StatusCode::SERVICE_UNAVAILABLE, body))) => Err(AskError::Refused {
            path: socket.to_owned(),
            reason: String::from_utf8_lossy(&body).trim().to_owned(),
        }),
        Ok(Ok((code, body))) => {
            let text = String::from_utf8_lossy(&body);
            Err(no_answer(format!("{code}: {}", text.trim())))
        }
        Ok(Err(reason)) => Err(no_answer(reason)),
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

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixListener,
    };

    use super::*;

    /// Asks a daemon that answers with these bytes, or never.
    async fn asked(answer: Option<&str>) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("bound");
        let daemon = async {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_buf(&mut request).await.expect("a request");
            }
            match answer {
                Some(answer) => stream.write_all(answer.as_bytes()).await.expect("written"),
                None => std::future::pending::<()>().await,
            }
            drop(stream);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answer = ask(&socket, "/services") => answer.expect_err("no answer").to_string(),
            () = daemon => String::new(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_says_nothing_is_not_waited_for() {
        let said = timeout(PATIENCE + Duration::from_secs(1), asked(None)).await;
        let said = said.expect("no longer than that");
        assert!(
            said.ends_with("does not answer: nothing came in 10 s"),
            "{said}"
        );
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_ready_is_quoted() {
        let answer =
            "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 15\r\n\r\nnot ready: why\n";
        let said = asked(Some(answer)).await;
        assert!(said.ends_with("refuses: not ready: why"), "{said}");
    }
}
