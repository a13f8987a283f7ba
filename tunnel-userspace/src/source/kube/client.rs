//! The way to the API server: one of several, the next where one can't be reached.

use std::{
    future::Future,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, StatusCode, Uri, header::RETRY_AFTER};
use hyper_util::{
    client::legacy::{Client as Http, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client,
    client::{Body, ConfigExt as _},
    config::{Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tokio::time::{sleep, timeout};
use tower::{BoxError, Service, ServiceBuilder};
use tracing::{info, warn};

/// How long a connection may be silent until it is asked for a sign of life, how often it is asked
/// then, and how long an answer may take: one that is dead is noticed within half a minute, not
/// when a watch is over.
const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const UNANSWERED: Duration = Duration::from_secs(20);

/// How the API server is reached.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Access {
    /// A kubeconfig; without one the service account of the pod is used.
    pub(super) kubeconfig: Option<PathBuf>,
    /// The servers, in place of the one that the kubeconfig or the pod's environment names.
    pub(super) servers: Vec<Uri>,
    /// How long a connect may take.
    pub(super) connect_timeout: Duration,
}

/// How long an answer may take until it begins: a whole list of a large cluster may be a minute of
/// work.
const ANSWER: Duration = Duration::from_secs(60);

/// The API server can't be asked, whether it is there or not.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The kubeconfig can't be used.
    #[error("cannot use kubeconfig {path}")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// This is no pod with a service account, and no kubeconfig is given.
    #[error(
        "cannot use the pod's service account; outside of a pod, source.kube.kubeconfig is needed"
    )]
    InCluster(#[source] Box<InClusterError>),
    /// The certificates or the token can't be used.
    #[error("cannot make a client of the API server {server}")]
    Client {
        /// The server.
        server: Uri,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
}

/// A client that goes to the next server where one fails, and the one that it goes to now.
pub(super) async fn connect(access: &Access) -> Result<(Client, Current), AccessError> {
    let config = config(access).await?;
    let servers = if access.servers.is_empty() {
        vec![config.cluster_url.clone()]
    } else {
        access.servers.clone()
    };
    let one = |server: &Uri| {
        let mut config = config.clone();
        config.cluster_url = server.clone();
        client(&config).map_err(|source| AccessError::Client {
            server: server.clone(),
            source: Box::new(source),
        })
    };
    let clients = servers.iter().map(one).collect::<Result<Vec<_>, _>>()?;
    let current = Current {
        servers: servers.into(),
        index: Arc::default(),
    };
    let failover = Failover {
        clients: clients.into(),
        current: current.clone(),
    };
    Ok((Client::new(failover, config.default_namespace), current))
}

async fn config(access: &Access) -> Result<Config, AccessError> {
    let mut config = match &access.kubeconfig {
        Some(path) => {
            let failed = |source| AccessError::Kubeconfig {
                path: path.clone(),
                source: Box::new(source),
            };
            let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .map_err(failed)?
        }
        None => Config::incluster().map_err(|source| AccessError::InCluster(Box::new(source)))?,
    };
    config.connect_timeout = Some(access.connect_timeout);
    Ok(config)
}

/// The client of one server.
fn client(config: &Config) -> Result<Client, kube::Error> {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_keepalive(Some(KEEPALIVE));
    connector.set_keepalive_interval(Some(KEEPALIVE_EVERY));
    connector.set_tcp_user_timeout(Some(UNANSWERED));
    let connector = config.rustls_https_connector_with_connector(connector)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(Http::builder(TokioExecutor::new()).build(connector));
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Which server is asked now.
#[derive(Clone, Debug)]
pub(super) struct Current {
    servers: Arc<[Uri]>,
    index: Arc<AtomicUsize>,
}

impl Current {
    /// The server's address.
    pub(super) fn server(&self) -> String {
        let index = self.index.load(Ordering::Relaxed);
        self.servers
            .get(index)
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    /// Leaves a server, unless another request has done so already.
    fn leave(&self, index: usize, why: &str) {
        let next = (index + 1) % self.servers.len().max(1);
        if next == index {
            return;
        }
        let left = self
            .index
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() {
            warn!(why, "an API server does not answer");
            info!(server = self.server(), "asking another API server");
        }
    }
}

/// Clients of several servers as one.
#[derive(Clone)]
struct Failover {
    clients: Arc<[Client]>,
    current: Current,
}

impl Service<Request<Body>> for Failover {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let index = self.current.index.load(Ordering::Relaxed);
        let client = self.clients.get(index).cloned();
        let current = self.current.clone();
        Box::pin(async move {
            let Some(client) = client else {
                return Err("there is no API server to ask".into());
            };
            let answer = match timeout(ANSWER, client.send(request)).await {
                Ok(answer) => answer.map_err(BoxError::from),
                Err(elapsed) => Err(elapsed.into()),
            };
            match &answer {
                Ok(answer) => {
                    if is_of_server(answer.status()) {
                        current.leave(index, answer.status().as_str());
                    }
                    sleep(wanted_pause(answer)).await;
                }
                Err(error) => current.leave(index, &error.to_string()),
            }
            answer
        })
    }
}

/// How long a refusal says not to ask again, at most a minute. It stands in the head alone where the
/// API server has too much to do (apiserver `pkg/server/filters/priority-and-fairness.go`).
fn wanted_pause(answer: &Response<Body>) -> Duration {
    const LONGEST: Duration = Duration::from_secs(60);
    if answer.status() != StatusCode::TOO_MANY_REQUESTS {
        return Duration::ZERO;
    }
    let seconds = answer.headers().get(RETRY_AFTER);
    let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0)).min(LONGEST)
}

/// Whether an answer says that this server can't serve, where another may.
fn is_of_server(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::INTERNAL_SERVER_ERROR
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
    )
}
