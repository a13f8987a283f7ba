//! An HTTP/1.1 server on TCP ports and on the admin socket.

use std::{
    convert::Infallible,
    fs, io,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
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
    net::{TcpListener, UnixListener},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tracing::{debug, info};

use super::{
    client::Client,
    connection_limit::{ConnectionLimit, SentRequest},
    flood_filter::FloodFilter,
};
use crate::listen::{self, UnboundPorts};

/// The maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 4096;
/// The pause after a failed accept().
const ACCEPT_RETRY: Duration = Duration::from_secs(1);
/// The timeout for reading a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum lifetime of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);

/// The body of a response, which may be created while it is sent.
pub type ResponseBody = UnsyncBoxBody<Bytes, io::Error>;

/// Maps a listener's paths to responses.
pub trait Routes: Send + Sync + 'static {
    /// The maximum number of concurrent connections per listener. Once it is reached, each new connection
    /// replaces another one.
    const MAX_CONNECTIONS: usize = 64;

    /// True if a client may send several requests over one connection.
    const KEEPS_ALIVE: bool = true;

    /// True if a listener on `0.0.0.0` accepts only IPv4 connections, and a listener on `[::]` only IPv6
    /// connections. Otherwise, each of them accepts both, as in kube-proxy.
    const ONE_FAMILY: bool = false;

    /// True if any method is accepted; otherwise, only GET and HEAD are.
    const ACCEPTS_ANY_METHOD: bool = false;

    /// Handles a POST request, which changes something. Returns `None` for a path that accepts none.
    fn post(&self, path: &str, query: &str) -> Option<Response<ResponseBody>> {
        let _unused = (path, query);
        None
    }

    /// Returns the response for a path and a query string (without the question mark), or `None` for an
    /// unknown path.
    fn respond(
        &self,
        path: &str,
        query: &str,
    ) -> impl Future<Output = Option<Response<ResponseBody>>> + Send;
}

/// Serves HTTP on a TCP port until the drain begins. If the port is in use, retries until it is free.
pub async fn serve_tcp<S: Routes>(
    name: &'static str,
    address: SocketAddr,
    routes: S,
    unbound_ports: UnboundPorts,
    draining: watch::Receiver<bool>,
) {
    let bind = || bind(address, S::ONE_FAMILY);
    let run = |listener: TcpListener, draining| async move {
        info!(endpoint = name, %address, "listening");
        let filter = FloodFilter::default();
        let accept = || filter.accept(name, &listener);
        serve(Arc::new(routes), accept, |client| Some(*client), draining).await;
    };
    listen::bind_and_serve(
        format!("{name} {address}"),
        bind,
        unbound_ports,
        draining,
        run,
    )
    .await;
}

fn bind(address: SocketAddr, one_family: bool) -> io::Result<TcpListener> {
    if !one_family && address.ip().is_unspecified() {
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port()));
        match bind_one(both, false) {
            // Without IPv6, fall through and bind 0.0.0.0.
            Err(error) if has_no_ipv6(&error) && address.is_ipv4() => {}
            bound => return bound,
        }
    }
    bind_one(address, true)
}

fn has_no_ipv6(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| matches!(number, libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

fn bind_one(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    listen::tcp(address, BACKLOG, |socket| match address {
        SocketAddr::V4(_) => Ok(()),
        SocketAddr::V6(_) => socket.set_only_v6(only_v6),
    })
}

/// The error returned if the admin socket can't be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {path}")]
pub struct SocketError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Binds the admin socket with mode 0600. Replaces a socket left by an earlier process: that process must
/// have exited, since this one has locked the pin directory. The returned future serves HTTP until the drain
/// begins.
/// If the socket can't be bound because the disk is full, or if `retries` is true, the attempt is repeated until
/// it succeeds.
///
/// # Errors
///
/// Returns an error if the socket can't be bound for another reason and `retries` is false.
pub fn serve_unix<S: Routes>(
    path: &Path,
    routes: S,
    retries: bool,
    unbound_ports: UnboundPorts,
    draining: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<S>, SocketError> {
    let path = path.to_owned();
    let mut first = match listen::unix(&path) {
        Err(source) if !retries && !listen::is_unwritable(&source) => {
            return Err(SocketError { path, source });
        }
        bound => bound.ok(),
    };
    Ok(async move {
        let run = |listener: UnixListener, draining| async move {
            serve(Arc::new(routes), || listener.accept(), |_| None, draining).await;
        };
        match first.take() {
            Some(listener) => run(listener, draining).await,
            None => {
                let name = format!("admin socket {}", path.display());
                let bind = || listen::unix(&path);
                listen::bind_and_serve(name, bind, unbound_ports, draining, run).await;
            }
        }
        if let Err(error) = fs::remove_file(&path) {
            debug!(%error, "cannot remove the admin socket");
        }
    })
}

/// Accepts and serves connections until the drain begins.
async fn serve<S: Routes, T, P, F>(
    routes: Arc<S>,
    accept: impl Fn() -> F + Send,
    source: impl Fn(&P) -> Option<Client> + Send + Sync,
    draining: watch::Receiver<bool>,
) where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    P: Send,
    F: Future<Output = io::Result<(T, P)>> + Send,
{
    let mut limit = ConnectionLimit::new(S::MAX_CONNECTIONS);
    let admit = |connections: &mut JoinSet<()>, (stream, peer)| {
        let source = source(&peer);
        limit.make_room(source);
        let sent = SentRequest::default();
        let served = serve_connection(Arc::clone(&routes), stream, Arc::clone(&sent));
        limit.add(source, sent, connections.spawn(served));
    };
    listen::accept_all(accept, ACCEPT_RETRY, &mut JoinSet::new(), draining, admit).await;
}

/// Serves the requests on one connection.
async fn serve_connection<S: Routes, T>(routes: Arc<S>, stream: T, has_sent_request: SentRequest)
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = service_fn(move |request| {
        has_sent_request.store(true, Ordering::Relaxed);
        let routes = Arc::clone(&routes);
        async move { Ok::<_, Infallible>(route_request(&*routes, &request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .title_case_headers(true)
        .keep_alive(S::KEEPS_ALIVE)
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "connection failed"),
        Err(_) => debug!("connection closed after its maximum lifetime"),
    }
}

async fn route_request<S: Routes>(
    routes: &S,
    request: &Request<Incoming>,
) -> Response<ResponseBody> {
    let path = request.uri().path();
    let query = request.uri().query().unwrap_or_default();
    if request.method() == Method::POST
        && let Some(response) = routes.post(path, query)
    {
        return response;
    }
    let is_get_or_head = [Method::GET, Method::HEAD].contains(request.method());
    if !is_get_or_head && !S::ACCEPTS_ANY_METHOD {
        let body = "only GET and HEAD are supported\n".to_owned();
        return text(StatusCode::METHOD_NOT_ALLOWED, body);
    }
    let response = routes.respond(path, query).await;
    response.unwrap_or_else(|| text(StatusCode::NOT_FOUND, format!("{path} not found\n")))
}

pub(super) fn json(code: StatusCode, value: &impl Serialize) -> Response<ResponseBody> {
    match serde_json::to_vec(value) {
        Ok(body) => respond(code, "application/json", body.into()),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

pub(super) fn text(code: StatusCode, body: String) -> Response<ResponseBody> {
    respond(code, "text/plain; charset=utf-8", body.into())
}

pub(super) fn respond(code: StatusCode, kind: &'static str, body: Bytes) -> Response<ResponseBody> {
    let body = Full::new(body).map_err(|never| match never {});
    respond_with(code, kind, body.boxed_unsync())
}

/// Responds with a body that may be created while it is sent.
pub(super) fn respond_with(
    code: StatusCode,
    kind: &'static str,
    body: ResponseBody,
) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    response
}
