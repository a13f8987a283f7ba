//! Opens the certificate of a gateway or agent, and starts the tasks that read, request and renew it.

use std::sync::Arc;

use tokio::sync::{OnceCell, watch};

use crate::{
    config::{Config, RequestConfig},
    error_chain::chain,
    identity::{
        CertificateReceiver, CertificateStore, IdentityFiles, Role, clock,
        requester::{ApiError, Asked, KubeApi, RequestApi, RequestState, Requester, State, Wanted},
    },
    source::kube::{self, KubeSettings},
    tasks::Tasks,
};

/// The directory of the certificate and its key, in the state directory.
const DIRECTORY: &str = "identity";

/// Opens the certificate that the config describes, and starts its tasks. Returns `None` if there is no section for it.
pub(super) fn open(config: &Config, role: Role, tasks: &mut Tasks) -> Option<CertificateReceiver> {
    let identity = config.tunnel.identity.as_ref()?;
    clock::open(&config.state_dir);
    let (files, requests) = match (&identity.files, &identity.request) {
        (Some(files), _) => (files.clone(), None),
        (None, Some(request)) => {
            let (files, requests) = start_requests(config, role, request, tasks);
            (files, Some(requests))
        }
        (None, None) => return None,
    };
    let (mut store, mut receiver) = CertificateStore::open(files, role);
    if role == Role::Agent {
        store.expect_name(&config.node_name);
    }
    if let Some(requests) = requests {
        store.expect_renewal();
        receiver.add_requests(requests);
    }
    tasks.start("identity", store.run(tasks.draining()));
    Some(receiver)
}

fn start_requests(
    config: &Config,
    role: Role,
    request: &RequestConfig,
    tasks: &mut Tasks,
) -> (IdentityFiles, watch::Receiver<RequestState>) {
    let settings = KubeSettings {
        kubeconfig: request.kubeconfig.clone(),
        ..KubeSettings::default()
    };
    let settings = match (&request.kubeconfig, &config.source.kube) {
        (None, Some(source)) => source.clone(),
        (Some(_), _) | (None, None) => settings,
    };
    let api = ApiServer {
        settings: Arc::new(settings),
        api: OnceCell::new(),
    };
    let wanted = Wanted {
        role,
        node: config.node_name.clone(),
        life: Some(request.life).filter(|life| !life.is_zero()),
        ca: request.ca.clone(),
        directory: config.state_dir.join(DIRECTORY),
    };
    let files = wanted.files();
    let clock = Box::new(clock::now);
    let (requester, state) = Requester::new(wanted, api, clock);
    tasks.start("certificate requests", requester.run(tasks.draining()));
    (files, state)
}

/// The API server. Its credentials are read for the first request, and again as long as they can't be used: a kubelet may not have
/// written its own yet.
struct ApiServer {
    settings: Arc<KubeSettings>,
    api: OnceCell<KubeApi>,
}

impl RequestApi for ApiServer {
    async fn ask(&self, asked: &Asked<'_>) -> Result<State, ApiError> {
        let connect = || async {
            let client = kube::client(&self.settings).await;
            let client = client.map_err(|error| ApiError::Request(chain(&error)))?;
            Ok(KubeApi::new(client))
        };
        let api = self.api.get_or_try_init(connect).await?;
        api.ask(asked).await
    }
}
