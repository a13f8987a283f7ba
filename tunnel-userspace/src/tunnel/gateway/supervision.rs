//! Ends sessions whose agents are no longer allowed to have them.

use std::{pin::Pin, sync::Arc, time::Duration};

use rustls::pki_types::CertificateDer;
use tokio::{
    sync::watch,
    time::{interval, sleep, timeout},
};
use tracing::debug;
use tunnel_common::reason::Reason;

use super::{RESET_DELAY, RESET_TIMEOUT, Shared};
use crate::{
    error_chain::chain,
    identity::Role,
    tunnel::{http2::ClientConnection, traffic::Traffic},
};

/// The interval between checks whether two machines use a node's certificate.
const SHARING_INTERVAL: Duration = Duration::from_secs(15);

/// Reports if two machines use the node's certificate. Returns an error once the agent's certificate is no longer
/// valid.
pub(super) async fn supervise(
    shared: &Shared,
    node: &Arc<str>,
    certificates: &[CertificateDer<'static>],
) -> String {
    let report_sharing = async {
        let mut interval = interval(SHARING_INTERVAL);
        loop {
            interval.tick().await;
            shared.sessions.report_shared_certificate(node);
        }
    };
    let mut identity = shared.identity.clone();
    let error = tokio::select! {
        error = identity.peer_rejected(certificates, Role::Agent) => chain(&error),
        () = report_sharing => String::new(),
    };
    let error = format!("the agent's certificate is no longer valid: {error}");
    shared
        .sessions
        .report_problem(node, Reason::IdentityRejected, &error);
    error
}

/// Resets the streams of a session that the gateway ends although the agent's certificate is valid.
pub(super) async fn revoke(
    shared: &Shared,
    connection: Pin<&mut ClientConnection>,
    (node, traffic): (&Arc<str>, &Traffic),
    stop: &watch::Sender<Option<Reason>>,
    cause: &str,
) {
    shared.sessions.record_revocation(node, cause);
    shared
        .sessions
        .report_problem(node, Reason::SessionRevoked, &cause);
    stop.send_replace(Some(Reason::SessionRevoked));
    let reset = async {
        let reset = timeout(RESET_TIMEOUT, traffic.without_streams()).await;
        sleep(RESET_DELAY).await;
        reset
    };
    tokio::select! {
        _ = connection => {}
        reset = reset => if reset.is_err() {
            debug!(%node, "some streams were not reset in time");
        }
    }
}
