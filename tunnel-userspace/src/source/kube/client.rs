//! The HTTP client for the API servers. If one server fails, it fails over to the next.

mod credentials;
mod response;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{Request, Response, StatusCode, Uri};
use hyper_util::{
    client::legacy::{Client as Http, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client,
    client::{Body, ConfigExt as _},
    config::{Config, InClusterError, KubeconfigError},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tower::{BoxError, ServiceBuilder, service_fn};
use tracing::{info, warn};

use self::{credentials::CredentialFiles, response::ResponseBody};
use super::KubeSettings;

/// The idle time before TCP keep-alive probes are sent. Together, this and the next two limits ensure that a
/// dead connection is detected within half a minute, rather than only when the watch ends.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The interval between TCP keep-alive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// The longest that sent data may remain unacknowledged (`TCP_USER_TIMEOUT`).
const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// The directory with the API server's address in the manifests.
const MOUNTED_ADDRESS: &str = "/etc/culvert-apiserver";

/// The address of an API server, in the form `https://HOST:PORT`.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct ApiServer {
    /// The address, spelt as in the config.
    pub(super) text: String,
    pub(super) uri: Uri,
}

/// The error for text that is not a valid API server address.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an API server address of the form https://HOST:PORT")]
pub struct InvalidApiServer(String);

impl ApiServer {
    /// Returns the IP address, or `None` if the config has a host name.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        let host = self.uri.host()?;
        host.trim_matches(['[', ']']).parse().ok()
    }
}

impl TryFrom<String> for ApiServer {
    type Error = InvalidApiServer;

    fn try_from(text: String) -> Result<Self, InvalidApiServer> {
        let url = text.parse::<Uri>().ok().filter(|url| {
            let is_https = url.scheme_str() == Some("https");
            is_https && url.host().is_some() && matches!(url.path(), "" | "/")
        });
        match url {
            Some(uri) => Ok(Self { text, uri }),
            None => Err(InvalidApiServer(text)),
        }
    }
}

impl From<ApiServer> for String {
    fn from(server: ApiServer) -> Self {
        server.text
    }
}

/// The maximum time to wait for a response to begin. The server may need a minute to list the objects of a
/// large cluster.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// An error in the kubeconfig or in the credentials for the API server.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The kubeconfig can't be used.
    #[error("cannot use kubeconfig {path}")]
    Kubeconfig {
        /// The path of the kubeconfig.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// The kubeconfig names no current context.
    #[error(
        "kubeconfig {path} has no current context; check that it is the right file, or select a context \
             with: kubectl --kubeconfig {path} config use-context CONTEXT"
    )]
    NoContext {
        /// The path of the kubeconfig.
        path: PathBuf,
    },
    /// There is no kubeconfig, and the process does not run in a pod with a service account.
    #[error("cannot use the pod's service account; outside a pod, set source.kube.kubeconfig")]
    InCluster(#[source] Box<InClusterError>),
    /// The address that is mounted can't be used.
    #[error("{}: the files KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT", directory.display())]
    MountedAddress {
        /// The directory with the files.
        directory: PathBuf,
        /// The cause.
        #[source]
        error: InvalidApiServer,
    },
    /// The certificates or the token can't be used.
    #[error("cannot create a client for API server {server}")]
    Client {
        /// The address of the server.
        server: Uri,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Creates a client that fails over between the servers, and returns it together with a handle to the server
/// in use. `silence` is how long a response other than a watch may go without sending any data.
pub(super) async fn connect(
    settings: &Arc<KubeSettings>,
    silence: Duration,
) -> Result<(Client, CurrentServer), AccessError> {
    let mut files = CredentialFiles::default();
    let config = files.read(settings).await?;
    let (servers, clients) = create_clients(settings, &config)?;
    let current = CurrentServer {
        servers: Arc::new(Mutex::new(ServerList { servers, index: 0 })),
    };
    let failover = Failover {
        settings: Arc::clone(settings),
        silence,
        credentials: Arc::new(tokio::sync::Mutex::new(CredentialClients {
            files,
            clients,
        })),
        credentials_refused: Arc::default(),
        current: current.clone(),
    };
    let service = service_fn(move |request| failover.clone().send(request));
    Ok((Client::new(service, config.default_namespace), current))
}

/// Creates a client for each server, and returns the servers' addresses and the clients.
fn create_clients(
    settings: &KubeSettings,
    config: &Config,
) -> Result<(Vec<Uri>, Vec<Client>), AccessError> {
    let configured = settings.api_servers.iter();
    let mut servers: Vec<Uri> = configured.map(|server| server.uri.clone()).collect();
    if servers.is_empty() {
        let mounted = match &settings.kubeconfig {
            None => mounted_server(Path::new(MOUNTED_ADDRESS))?,
            Some(_) => None,
        };
        servers.push(mounted.unwrap_or_else(|| config.cluster_url.clone()));
    }
    let client = |server: &Uri| {
        let mut config = config.clone();
        config.cluster_url = server.clone();
        create_client(&config).map_err(|source| AccessError::Client {
            server: server.clone(),
            source: Box::new(source),
        })
    };
    let clients = servers.iter().map(client).collect::<Result<_, _>>()?;
    Ok((servers, clients))
}

/// Returns the address in a directory with the files `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, which a ConfigMap
/// fills. Returns `None` if there is no such directory. Variables of the environment would not do: a kubelet that can't reach
/// the API server starts no container whose environment is from a ConfigMap.
fn mounted_server(directory: &Path) -> Result<Option<Uri>, AccessError> {
    let read = |name: &str| {
        let text = fs::read_to_string(directory.join(name));
        text.map(|text| text.trim().to_owned())
    };
    let Ok(host) = read("KUBERNETES_SERVICE_HOST") else {
        return Ok(None);
    };
    let port = read("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".to_owned());
    let host = match host.parse() {
        Ok(IpAddr::V6(_)) => format!("[{host}]"),
        _ => host,
    };
    let address = format!("https://{host}:{port}");
    let server = match port.parse::<u16>() {
        Ok(_) => ApiServer::try_from(address),
        Err(_) => Err(InvalidApiServer(address)),
    };
    let server = server.map_err(|error| AccessError::MountedAddress {
        directory: directory.to_owned(),
        error,
    })?;
    Ok(Some(server.uri))
}

/// Creates a client for one server.
fn create_client(config: &Config) -> Result<Client, kube::Error> {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    connector.set_tcp_user_timeout(Some(USER_TIMEOUT));
    let connector = config.rustls_https_connector_with_connector(connector)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(Http::builder(TokioExecutor::new()).build(connector));
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// The server that is currently in use. Clones share the state.
#[derive(Clone, Debug)]
pub(super) struct CurrentServer {
    servers: Arc<Mutex<ServerList>>,
}

#[derive(Debug)]
struct ServerList {
    servers: Vec<Uri>,
    index: usize,
}

impl CurrentServer {
    fn lock(&self) -> MutexGuard<'_, ServerList> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of the server in use.
    pub(super) fn server(&self) -> String {
        let list = self.lock();
        list.servers
            .get(list.index)
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    /// Returns the index of the server in use.
    pub(super) fn index(&self) -> usize {
        self.lock().index
    }

    /// Fails over from the server with this index to the next one, unless another request has already
    /// done so.
    pub(super) fn fail_over(&self, index: usize, error: &str) {
        let mut list = self.lock();
        let next = (index + 1) % list.servers.len().max(1);
        if next == index || list.index != index {
            return;
        }
        list.index = next;
        drop(list);
        warn!(error, "an API server failed");
        info!(server = self.server(), "failing over to another API server");
    }

    /// Replaces the list of servers. If it has changed, the first server is used from now on.
    fn replace(&self, servers: Vec<Uri>) {
        let mut list = self.lock();
        if list.servers != servers {
            *list = ServerList { servers, index: 0 };
        }
    }
}

/// The credential files, and clients that use the last valid credentials read from them.
struct CredentialClients {
    files: CredentialFiles,
    clients: Vec<Client>,
}

/// A client that sends each request to whichever server is in use.
#[derive(Clone)]
struct Failover {
    settings: Arc<KubeSettings>,
    silence: Duration,
    credentials: Arc<tokio::sync::Mutex<CredentialClients>>,
    /// True if a server has rejected the credentials (status 401) since they were last read.
    credentials_refused: Arc<AtomicBool>,
    current: CurrentServer,
}

impl Failover {
    /// Returns the index of the server in use, and its client. If a credential file has changed or a server
    /// has rejected the credentials, the files are read again first. If they are invalid, the previous
    /// credentials stay in use.
    async fn client(&self) -> Option<(usize, Client)> {
        let mut credentials = self.credentials.lock().await;
        let have_changed = credentials.files.have_changed();
        if self.credentials_refused.swap(false, Ordering::Relaxed) || have_changed {
            let config = credentials.files.read(&self.settings).await;
            match config.and_then(|config| create_clients(&self.settings, &config)) {
                Ok((servers, clients)) => {
                    credentials.clients = clients;
                    self.current.replace(servers);
                    if have_changed {
                        info!("using the changed credentials for the API server");
                    }
                }
                Err(error) if have_changed => {
                    let error = &error as &dyn std::error::Error;
                    warn!(
                        error,
                        "cannot use the changed credentials for the API server; continuing with the previous ones"
                    );
                }
                Err(_) => {}
            }
        }
        let index = self.current.index();
        Some((index, credentials.clients.get(index)?.clone()))
    }

    async fn send(self, request: Request<Body>) -> Result<Response<ResponseBody>, BoxError> {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.split('&').any(|pair| pair == "watch=true");
        let Some((index, client)) = self.client().await else {
            return Err("no API server is configured".into());
        };
        let current = self.current;
        let response = timeout(RESPONSE_TIMEOUT, client.send(request)).await;
        let response = response.map_err(BoxError::from);
        let response = response.and_then(|response| response.map_err(BoxError::from));
        let response =
            response.inspect_err(|error| current.fail_over(index, &error.to_string()))?;
        let status = response.status();
        if is_server_fault(status) {
            current.fail_over(index, status.as_str());
        }
        if status == StatusCode::UNAUTHORIZED {
            self.credentials_refused.store(true, Ordering::Relaxed);
        }
        if is_watch && status.is_success() {
            return Ok(response.map(response::without_limit));
        }
        let on_silence = move |error: &str| current.fail_over(index, error);
        let response =
            response.map(|body| response::with_silence_limit(body, self.silence, on_silence));
        response::with_retry_after(response).await
    }
}

/// Returns true if the status indicates a fault in this server, so that another server may succeed.
const fn is_server_fault(status: StatusCode) -> bool {
    matches!(status.as_u16(), 500 | 502 | 503 | 504)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mounted_address_is_used_and_a_wrong_one_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let server = || mounted_server(directory.path());
        let write = |name: &str, text: &str| {
            fs::write(directory.path().join(name), text).expect("written");
        };
        assert!(server().expect("none is mounted").is_none());

        write("KUBERNETES_SERVICE_HOST", "192.0.2.10\n");
        write("KUBERNETES_SERVICE_PORT", "6443");
        let text = |server: Result<Option<Uri>, AccessError>| {
            server.expect("valid").expect("mounted").to_string()
        };
        assert_eq!(text(server()), "https://192.0.2.10:6443/");
        write("KUBERNETES_SERVICE_HOST", "fd00::10");
        assert_eq!(text(server()), "https://[fd00::10]:6443/");
        write("KUBERNETES_SERVICE_PORT", "https");
        let error = server().expect_err("no port").to_string();
        assert!(
            error.contains(&directory.path().display().to_string()),
            "{error}"
        );
    }
}
