//! Opens the certificate of a gateway or agent, and starts the tasks that read, request and renew it.

use std::sync::Arc;

use tokio::sync::watch;

use super::{RoleError, failed};
use crate::{
    config::{Config, RequestConfig},
    identity::{
        CertificateReceiver, CertificateStore, IdentityFiles, Role, clock,
        requester::{KubeApi, RequestState, Requester, Wanted},
    },
    source::kube::{self, KubeSettings},
    tasks::Tasks,
};

/// The directory of the certificate and its key, in the state directory.
const DIRECTORY: &str = "identity";

/// Opens the certificate that the config describes, and starts its tasks. Returns `None` if there is no section for it.
///
/// # Errors
///
/// Returns an error if the credentials for requests can't be used.
pub(super) async fn open(
    config: &Config,
    role: Role,
    tasks: &mut Tasks,
) -> Result<Option<CertificateReceiver>, RoleError> {
    let Some(identity) = &config.tunnel.identity else {
        return Ok(None);
    };
    clock::open(&config.state_dir);
    let (files, requests) = match (&identity.files, &identity.request) {
        (Some(files), _) => (files.clone(), None),
        (None, Some(request)) => {
            let (files, requests) = start_requests(config, role, request, tasks).await?;
            (files, Some(requests))
        }
        (None, None) => return Ok(None),
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
    Ok(Some(receiver))
}

async fn start_requests(
    config: &Config,
    role: Role,
    request: &RequestConfig,
    tasks: &mut Tasks,
) -> Result<(IdentityFiles, watch::Receiver<RequestState>), RoleError> {
    let settings = KubeSettings {
        kubeconfig: request.kubeconfig.clone(),
        ..KubeSettings::default()
    };
    let settings = match (&request.kubeconfig, &config.source.kube) {
        (None, Some(source)) => source.clone(),
        (Some(_), _) | (None, None) => settings,
    };
    let client = kube::client(&Arc::new(settings)).await;
    let client = client.map_err(failed("cannot request a certificate"))?;
    let wanted = Wanted {
        role,
        node: config.node_name.clone(),
        life: Some(request.life).filter(|life| !life.is_zero()),
        ca: request.ca.clone(),
        directory: config.state_dir.join(DIRECTORY),
    };
    let files = wanted.files();
    let clock = Box::new(clock::now);
    let (requester, state) = Requester::new(wanted, KubeApi::new(client), clock);
    tasks.start("certificate requests", requester.run(tasks.draining()));
    Ok((files, state))
}
