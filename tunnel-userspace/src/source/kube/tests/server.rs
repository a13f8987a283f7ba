//! A scripted API server on loopback.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use http::{
    Request, Response, Uri,
    header::{AUTHORIZATION, RETRY_AFTER},
};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::source::kube::ApiServer;

/// A request that the server received.
#[derive(Clone, Debug)]
pub(super) struct ReceivedRequest {
    pub(super) path: String,
    pub(super) query: BTreeMap<String, String>,
    /// The bearer token in the `Authorization` header.
    pub(super) token: Option<String>,
}

/// A scripted response.
#[derive(Debug)]
pub(super) enum ScriptedResponse {
    /// A response with this status code and JSON body.
    Complete(u16, Value),
    /// A 429 response with this number of seconds in the `Retry-After` header, and this JSON body.
    RetryLater(u32, Value),
    /// A response that sends these lines and then stays open.
    KeptOpen(Vec<String>),
    /// A response that sends these lines and then ends.
    Closed(Vec<String>),
    /// No response at all.
    Never,
}

type ResponseFn = dyn Fn(&ReceivedRequest, usize) -> ScriptedResponse + Send + Sync;

/// A server's script, which returns the response to each request.
pub(super) struct Script {
    respond: Box<ResponseFn>,
    /// True if the script handles only Services. Lists of other kinds are then empty.
    is_of_services: bool,
}

impl Script {
    /// Creates a script for Services. Probes are answered with the highest possible version.
    pub(super) fn new(
        respond: impl Fn(&ReceivedRequest) -> ScriptedResponse + Send + Sync + 'static,
    ) -> Self {
        Self::counting(move |request, _| {
            if request.query.get("limit").is_some_and(|limit| limit == "1") {
                return list_page(&[], u64::MAX, None);
            }
            respond(request)
        })
    }

    /// Creates a script for Services whose function is also passed the number of earlier requests.
    pub(super) fn counting(
        respond: impl Fn(&ReceivedRequest, usize) -> ScriptedResponse + Send + Sync + 'static,
    ) -> Self {
        Self {
            respond: Box::new(respond),
            is_of_services: true,
        }
    }

    /// Creates a script for all kinds.
    pub(super) fn all(
        respond: impl Fn(&ReceivedRequest) -> ScriptedResponse + Send + Sync + 'static,
    ) -> Self {
        Self {
            respond: Box::new(move |request, _| respond(request)),
            is_of_services: false,
        }
    }

    fn reply(&self, request: &ReceivedRequest, times: usize) -> ScriptedResponse {
        if self.is_of_services && request.path != "/api/v1/services" {
            return if request.query.contains_key("watch") {
                ScriptedResponse::KeptOpen(vec![end_of_list(1)])
            } else {
                list_page(&[], 1, None)
            };
        }
        (self.respond)(request, times)
    }
}

/// A server on loopback, which stops when it is dropped.
pub(super) struct Server {
    address: SocketAddr,
    log: Arc<Mutex<Vec<ReceivedRequest>>>,
    socket: Socket,
    running: Mutex<JoinSet<()>>,
}

impl Server {
    /// Reserves a port for a server that refuses connections until `open` is called.
    pub(super) fn reserved() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&any.into()).expect("bound");
        let address = socket.local_addr().expect("an address");
        Self {
            address: address.as_socket().expect("an IP address"),
            log: Arc::default(),
            socket,
            running: Mutex::default(),
        }
    }

    pub(super) fn start(script: Script) -> Self {
        let server = Self::reserved();
        server.open(script);
        server
    }

    pub(super) fn open(&self, script: Script) {
        self.socket.listen(16).expect("listening");
        self.socket.set_nonblocking(true).expect("set");
        let socket = self.socket.try_clone().expect("a socket");
        let listener = TcpListener::from_std(socket.into()).expect("a listener");
        let (script, log) = (Arc::new(script), Arc::clone(&self.log));
        let accepting = async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.expect("accepted");
                connections.spawn(serve(stream, Arc::clone(&script), Arc::clone(&log)));
            }
        };
        self.running.lock().spawn(accepting);
    }

    pub(super) fn uri(&self) -> Uri {
        format!("http://{}/", self.address)
            .parse()
            .expect("an address")
    }

    /// Returns the server's address in the form used by the config.
    pub(super) fn api_server(&self) -> ApiServer {
        let (text, uri) = (self.uri().to_string(), self.uri());
        ApiServer { text, uri }
    }

    /// Returns all requests received for a path.
    pub(super) fn requests(&self, path: &str) -> Vec<ReceivedRequest> {
        let log = self.log.lock();
        let requests = log.iter().filter(|request| request.path == path);
        requests.cloned().collect()
    }
}

async fn serve(stream: TcpStream, script: Arc<Script>, log: Arc<Mutex<Vec<ReceivedRequest>>>) {
    let service = service_fn(|request| {
        let response = respond(&request, &script, &log);
        async {
            match response {
                Some(response) => Ok::<_, Infallible>(response),
                None => std::future::pending().await,
            }
        }
    });
    drop(
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await,
    );
}

fn respond(
    request: &Request<Incoming>,
    script: &Script,
    log: &Mutex<Vec<ReceivedRequest>>,
) -> Option<Response<BoxBody<Bytes, Infallible>>> {
    let query = request.uri().query().unwrap_or_default();
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let request = ReceivedRequest {
        path: request.uri().path().to_owned(),
        query: pairs
            .map(|(key, value)| (key.to_owned(), percent_decode(value)))
            .collect(),
        token: request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|value| Some(value.to_str().ok()?.strip_prefix("Bearer ")?.to_owned())),
    };
    let times = {
        let mut log = log.lock();
        let times = log.iter().filter(|earlier| earlier.path == request.path);
        let times = times.count();
        log.push(request.clone());
        times
    };
    let frames = |lines: Vec<String>| {
        let frames = lines
            .into_iter()
            .map(|line| Ok(Frame::data(Bytes::from(line + "\n"))));
        futures_util::stream::iter(frames)
    };
    let mut retry_after = None;
    let (code, body) = match script.reply(&request, times) {
        ScriptedResponse::Complete(code, value) => (code, Full::from(value.to_string()).boxed()),
        ScriptedResponse::RetryLater(seconds, value) => {
            retry_after = Some(seconds);
            (429, Full::from(value.to_string()).boxed())
        }
        ScriptedResponse::Never => return None,
        ScriptedResponse::Closed(lines) => (200, StreamBody::new(frames(lines)).boxed()),
        ScriptedResponse::KeptOpen(lines) => {
            let open =
                futures_util::StreamExt::chain(frames(lines), futures_util::stream::pending());
            (200, StreamBody::new(open).boxed())
        }
    };
    let mut response = Response::builder().status(code);
    if let Some(seconds) = retry_after {
        response = response.header(RETRY_AFTER, seconds);
    }
    Some(response.body(body).expect("an answer"))
}

/// Decodes a percent-encoded query value.
fn percent_decode(value: &str) -> String {
    let mut parts = value.split('%');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at(2);
        let byte = u8::from_str_radix(code, 16).expect("two digits");
        plain.push(char::from(byte));
        plain.push_str(rest);
    }
    plain
}

fn service(name: &str, address: &str, version: u64) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "resourceVersion": version.to_string()},
        "spec": {"clusterIP": address, "ports": [{"port": 80}]},
    })
}

/// Formats a watch event as a line of JSON.
pub(super) fn watch_line(event_type: &str, object: &Value) -> String {
    format!(r#"{{"type":"{event_type}","object":{object}}}"#)
}

/// Formats a watch event for a Service as a line of JSON.
pub(super) fn service_line(event_type: &str, name: &str, address: &str, version: u64) -> String {
    watch_line(event_type, &service(name, address, version))
}

/// Returns the lines of a streamed list with one Service. `list` is the version of the list.
pub(super) fn list_of_one(name: &str, address: &str, version: u64, list: u64) -> Vec<String> {
    vec![
        service_line("ADDED", name, address, version),
        end_of_list(list),
    ]
}

/// Returns the bookmark that ends a streamed list.
pub(super) fn end_of_list(version: u64) -> String {
    let metadata = json!({
        "resourceVersion": version.to_string(),
        "annotations": {"k8s.io/initial-events-end": "true"},
    });
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
    watch_line("BOOKMARK", &object)
}

fn status_body(code: u16, reason: &str, seconds: u32) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "message": reason,
        "reason": reason,
        "details": {"retryAfterSeconds": seconds},
    })
}

/// Returns the line for an error within a watch.
pub(super) fn error_line(code: u16, reason: &str) -> String {
    watch_line("ERROR", &status_body(code, reason, 0))
}

/// Returns an error response.
pub(super) fn error_status(code: u16, reason: &str) -> ScriptedResponse {
    ScriptedResponse::Complete(code, status_body(code, reason, 0))
}

/// Returns a 429 response with these delays, in seconds, in the header and the body.
pub(super) fn too_many_requests(head: u32, body: u32) -> ScriptedResponse {
    ScriptedResponse::RetryLater(head, status_body(429, "too many requests", body))
}

/// Returns one page of a list of Services.
pub(super) fn list_page(
    services: &[(&str, &str)],
    version: u64,
    next: Option<&str>,
) -> ScriptedResponse {
    let items = services
        .iter()
        .map(|(name, address)| service(name, address, version));
    let list = json!({
        "apiVersion": "v1",
        "kind": "ServiceList",
        "metadata": {"resourceVersion": version.to_string(), "continue": next},
        "items": items.collect::<Vec<_>>(),
    });
    ScriptedResponse::Complete(200, list)
}

/// Returns a kubeconfig for a server, without any credentials.
pub(super) fn kubeconfig(server: &Server) -> String {
    kubeconfig_of(server, &json!({}))
}

/// Returns a kubeconfig for a server, with this user's credentials.
pub(super) fn kubeconfig_of(server: &Server, user: &Value) -> String {
    let cluster = json!({"name": "test", "cluster": {"server": server.uri().to_string()}});
    let context = json!({"name": "test", "context": {"cluster": "test", "user": "test"}});
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [cluster],
        "contexts": [context],
        "users": [{"name": "test", "user": user}],
    })
    .to_string()
}
