//! HTTP on the admin socket and the two ports.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs, io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{Views, health, metrics, status::Status};
use crate::{drain, reconcile::Query};

/// Connections that are served at once on one listener.
const MOST_CONNECTIONS: usize = 64;
/// How long a client may take for its request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may live.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// How long until a port that is taken is tried again, and until an accept that failed is.
const RETRY: Duration = Duration::from_secs(1);

/// A listener, and what it answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Endpoint {
    /// The socket of the command line: everything.
    Socket,
    /// The admin port: metrics and status.
    Admin,
    /// The health port.
    Healthz,
}

impl Endpoint {
    const fn name(self) -> &'static str {
        match self {
            Self::Socket => "socket",
            Self::Admin => "admin",
            Self::Healthz => "healthz",
        }
    }

    fn answers(self, path: &str) -> bool {
        let paths: &[&str] = match self {
            Self::Socket => &["/status", "/services", "/metrics", "/healthz", "/livez"],
            Self::Admin => &["/status", "/services", "/metrics"],
            Self::Healthz => &["/healthz", "/livez"],
        };
        paths.contains(&path)
    }
}

/// A listener of streams, on either kind of socket.
trait Listener: Sync {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

type Answers = Arc<Mutex<metrics::Answers>>;

struct Server {
    endpoint: Endpoint,
    views: Arc<Views>,
    answers: Answers,
}

/// Serves a TCP port until the drain begins. A port that is taken, by another proxy that still
/// runs, is tried again until it is free.
pub async fn serve(
    endpoint: Endpoint,
    address: SocketAddr,
    views: Arc<Views>,
    answers: Arc<Mutex<BTreeMap<(&'static str, u16), u64>>>,
    mut draining: watch::Receiver<bool>,
) {
    let name = format!("{} {address}", endpoint.name());
    let listener = tokio::select! {
        listener = listen(&name, address, &views) => listener,
        () = drain::begun(&mut draining) => return,
    };
    info!(endpoint = endpoint.name(), %address, "listening");
    let server = Arc::new(Server {
        endpoint,
        views,
        answers,
    });
    server.accept_all(&listener, draining).await;
}

async fn listen(name: &str, address: SocketAddr, views: &Views) -> TcpListener {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                views.listening.send_modify(|waiting| {
                    waiting.remove(name);
                });
                return listener;
            }
            Err(error) => {
                views.listening.send_if_modified(|waiting| {
                    let is_new = waiting.insert(name.to_owned(), error.to_string()).is_none();
                    if is_new {
                        warn!(name, %error, "cannot listen, trying again until it is free");
                    }
                    is_new
                });
                sleep(RETRY).await;
            }
        }
    }
}

/// The admin socket can't be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {path}")]
pub struct SocketError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Binds the admin socket, which only its owner may use. A socket that an earlier daemon left
/// behind is replaced: that it is gone is known, since the pins are held. The second value serves
/// it until the drain begins.
///
/// # Errors
///
/// The folder or the socket can't be made.
pub fn serve_socket(
    path: &Path,
    views: Arc<Views>,
    answers: Arc<Mutex<BTreeMap<(&'static str, u16), u64>>>,
    draining: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<>, SocketError> {
    let failed = |source| SocketError {
        path: path.to_owned(),
        source,
    };
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    let path = path.to_owned();
    Ok(async move {
        let server = Arc::new(Server {
            endpoint: Endpoint::Socket,
            views,
            answers,
        });
        server.accept_all(&listener, draining).await;
        if let Err(error) = fs::remove_file(&path) {
            debug!(%error, "the admin socket was gone already");
        }
    })
}

impl Server {
    async fn accept_all(
        self: Arc<Self>,
        listener: &impl Listener,
        mut draining: watch::Receiver<bool>,
    ) {
        let mut connections = JoinSet::new();
        loop {
            let has_room = connections.len() < MOST_CONNECTIONS;
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                Some(_) = connections.join_next() => {}
                accepted = listener.next(), if has_room => match accepted {
                    Ok(stream) => {
                        connections.spawn(Arc::clone(&self).connection(stream));
                    }
                    Err(error) => {
                        warn!(%error, "accept failed");
                        sleep(RETRY).await;
                    }
                },
            }
        }
    }

    async fn connection<S>(self: Arc<Self>, stream: S)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let service = service_fn(move |request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(&request).await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(16 * 1024)
            .serve_connection(TokioIo::new(stream), service);
        match timeout(CONNECTION_TIMEOUT, connection).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "a client broke off"),
            Err(_) => debug!("a client took too long"),
        }
    }

    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET is answered\n".into(),
            );
        }
        if !self.endpoint.answers(path) {
            return text(StatusCode::NOT_FOUND, format!("there is no {path} here\n"));
        }
        match path {
            "/status" => json(StatusCode::OK, &Status::of(&self.views)),
            "/services" => self.services().await,
            "/metrics" => self.metrics(),
            "/healthz" => self.health("/healthz", true),
            _ => self.health("/livez", false),
        }
    }

    async fn services(&self) -> Response<Full<Bytes>> {
        let (reply, answer) = oneshot::channel();
        if self
            .views
            .queries
            .send(Query::Services(reply))
            .await
            .is_ok()
            && let Ok(services) = answer.await
        {
            return json(StatusCode::OK, &services);
        }
        text(
            StatusCode::SERVICE_UNAVAILABLE,
            "the daemon is stopping\n".into(),
        )
    }

    fn metrics(&self) -> Response<Full<Bytes>> {
        let answers = self
            .answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        match metrics::render(&self.views, answers) {
            Ok(body) => {
                let mut response = Response::new(Full::from(body));
                let kind = HeaderValue::from_static(metrics::CONTENT_TYPE);
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }

    fn health(&self, path: &'static str, asks_eligible: bool) -> Response<Full<Bytes>> {
        let health = health::of(&self.views, asks_eligible);
        let code = if health.healthy {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let count = answers.entry((path, code.as_u16())).or_default();
        *count = count.saturating_add(1);
        drop(answers);
        json(code, &health)
    }
}

fn json(code: StatusCode, value: &impl Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(body) => respond(code, "application/json", body.into()),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn text(code: StatusCode, body: String) -> Response<Full<Bytes>> {
    respond(code, "text/plain; charset=utf-8", body.into())
}

fn respond(code: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    response
}
