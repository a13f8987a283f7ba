//! Ends sessions whose agents are no longer allowed to have them.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use h2::SendStream;
use tokio::{
    sync::watch,
    time::{interval, sleep, timeout},
};
use tracing::{debug, warn};
use tunnel_common::reason::Reason;

use super::Shared;
use crate::{
    identity::{Peer, Role, describe},
    tunnel::{
        access::AccessRules, http2::ClientConnection, peer_certificates::PeerCertificates,
        traffic::Traffic,
    },
};

/// The time limit for sending resets to the peer before the connection is closed.
const RESET_TIMEOUT: Duration = Duration::from_millis(500);
/// The time for which the connection stays open once its streams are reset, so that the resets are sent.
const RESET_DELAY: Duration = Duration::from_millis(20);
/// The time limit for sending the last bytes of streams that have ended.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// The interval between checks whether two machines use a node's certificate, and whether it is renewed in time.
const REPORT_INTERVAL: Duration = Duration::from_secs(15);

/// Reports if two machines use the node's certificate, or if it has not been renewed in time. Returns an error once the
/// agent's certificate is no longer
/// valid.
pub(super) async fn supervise(
    shared: &Shared,
    node: &Arc<str>,
    certificates: &PeerCertificates,
) -> String {
    let report = async {
        let mut interval = interval(REPORT_INTERVAL);
        loop {
            interval.tick().await;
            shared.sessions.report_shared_certificate(node);
            shared.sessions.report_late_certificate(node);
        }
    };
    let identity = shared.identity.clone();
    let error = tokio::select! {
        error = certificates.rejected(identity, Role::Agent) => describe(&error),
        () = report => String::new(),
    };
    let error = format!("the agent's certificate is no longer valid: {error}");
    shared
        .sessions
        .report_problem(node, Reason::IdentityRejected, &error);
    error
}

/// Waits until an agent must not have a session, by the certificate of its handshake or by the one that has renewed it, and
/// returns the cause.
pub(super) async fn revoked(
    access: &AccessRules,
    agent: &Peer,
    certificates: &PeerCertificates,
    ended: watch::Receiver<bool>,
) -> String {
    let of_handshake = access.revoked(agent, ended.clone());
    let mut changes = certificates.subscribe();
    let of_renewal = async {
        loop {
            changes.mark_unchanged();
            let latest = certificates.current();
            tokio::select! {
                cause = access.revoked(latest.agent.as_ref().unwrap_or(agent), ended.clone()) => return cause,
                Ok(()) = changes.changed() => {}
            }
        }
    };
    tokio::select! {
        cause = of_handshake => cause,
        cause = of_renewal => cause,
    }
}

/// Resets the streams of a session that the gateway ends although the agent's certificate is valid.
pub(super) async fn revoke(
    shared: &Shared,
    connection: &mut ClientConnection,
    (node, traffic): (&Arc<str>, &Traffic),
    stop: &watch::Sender<Option<Reason>>,
    cause: &str,
) {
    shared.sessions.record_revocation(node, cause);
    shared
        .sessions
        .report_problem(node, Reason::SessionRevoked, &cause);
    stop.send_replace(Some(Reason::SessionRevoked));
    tokio::select! {
        _ = connection => {}
        () = reset_streams(node, traffic) => {}
    }
}

/// Closes a session's connection, after the last bytes of its streams have been sent. Streams that are still open are
/// reset.
pub(super) async fn close(
    connection: &mut ClientConnection,
    mut hello: SendStream<Bytes>,
    (node, traffic): (&Arc<str>, &Traffic),
    stop: &watch::Sender<Option<Reason>>,
) {
    // Ending the hello stream asks the agent to open a replacement session.
    if let Err(error) = hello.send_data(Bytes::new(), true) {
        debug!(%node, %error, "the hello stream had already ended");
    }
    // The connection does not close while there is a handle to one of its streams.
    drop(hello);
    let closed = async {
        if traffic.streams() == 0 {
            // The last bytes of the streams may still be queued. The connection closes by itself once they
            // have been sent.
            sleep(FLUSH_TIMEOUT).await;
            return;
        }
        warn!(%node, streams = traffic.streams(), "the drain timed out; open streams are reset");
        stop.send_replace(Some(Reason::Draining));
        reset_streams(node, traffic).await;
    };
    tokio::select! {
        _ = connection => {}
        () = closed => {}
    }
}

/// Waits until the streams have been reset and the resets have been sent.
async fn reset_streams(node: &Arc<str>, traffic: &Traffic) {
    let reset = timeout(RESET_TIMEOUT, traffic.without_streams()).await;
    if reset.is_err() {
        debug!(%node, "some streams were not reset in time");
    }
    sleep(RESET_DELAY).await;
}
