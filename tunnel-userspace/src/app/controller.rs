//! `culvert controller`: issues the certificates of gateways and agents.

use std::sync::Arc;

use tokio::sync::watch;
use tracing::info;

use super::{RoleError, failed, shutdown_signals::ShutdownSignals};
use crate::{
    admin::{self, ControllerViews},
    config::Config,
    controller::{self, ControllerState},
    identity::DenyListStore,
    source::kube,
    tasks::Tasks,
};

/// The time limit for the tasks to stop. Each write can be repeated by another controller.
const STOP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Runs the controller until SIGTERM, SIGINT or SIGHUP.
///
/// # Errors
///
/// Returns an error if the API server's credentials can't be used, or a task ends unexpectedly.
pub async fn controller(config: Config) -> Result<(), RoleError> {
    let mut stop = ShutdownSignals::new().map_err(failed("cannot wait for signals"))?;
    let settings = config.source.kube.clone().unwrap_or_default();
    let client = kube::client(&Arc::new(settings)).await;
    let client = client.map_err(failed("cannot use the API server"))?;
    let mut tasks = Tasks::default();
    let deny_list = config.controller.deny_file.clone().map(|path| {
        let (store, deny_list) = DenyListStore::open(path);
        tasks.start("deny list", store.run(tasks.draining()));
        deny_list
    });
    let state = watch::Sender::new(ControllerState::new());
    let views = ControllerViews {
        state: state.subscribe(),
        deny_list: deny_list.clone(),
        unbound_ports: watch::Sender::default(),
    };
    let waiting = views.unbound_ports.clone();
    let address = config.controller.admin_address;
    let admin = admin::serve_tcp("controller", address, views, waiting, tasks.draining());
    tasks.start("admin", admin);
    let settings = config.controller.for_run(&config.node_name);
    let running = controller::run(
        client,
        settings,
        deny_list.unwrap_or_default(),
        state,
        tasks.draining(),
    );
    tasks.start("controller", running);
    info!(
        namespace = config.controller.namespace,
        "controller started"
    );
    tokio::select! {
        () = stop.wait() => {}
        name = tasks.ended() => return Err(RoleError::TaskEnded { name }),
    }
    info!("stopping");
    tasks.finish(STOP_TIMEOUT).await;
    Ok(())
}
