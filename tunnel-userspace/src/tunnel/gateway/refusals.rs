//! Refuses sessions of agents whose certificates are valid.

use std::net::IpAddr;

use tunnel_common::reason::Reason;

use super::{HandshakeError, Shared};
use crate::{
    identity::{Identity, Peer},
    tunnel::{access::TlsError, http2::TlsConnection, socket::SessionSocket},
};

/// Performs the TLS handshake with an agent, and refuses agents on the deny list.
pub(super) async fn accept_tls(
    shared: &Shared,
    own: &Identity,
    socket: SessionSocket,
) -> Result<TlsConnection, HandshakeError> {
    shared
        .access
        .accept(own, socket)
        .await
        .map_err(|error| match error {
            TlsError::Failed(error) => HandshakeError(Reason::HandshakeFailed, error),
            TlsError::Denied(denied) => {
                let (node, error) = (denied.node(), denied.to_string());
                shared.sessions.record_revocation(node, &error);
                HandshakeError(Reason::SessionRevoked, error.into())
            }
        })
}

/// Returns an error with the reason and the cause if an agent that connects from `source` must not have another
/// session.
pub(super) fn check_session(
    shared: &Shared,
    agent: &Peer,
    source: IpAddr,
) -> Result<(), (Reason, String)> {
    let (node, sessions) = (&agent.node, &shared.sessions);
    shared.access.check_node(node).map_err(|cause| {
        sessions.record_revocation(node, &cause);
        (Reason::SessionRevoked, cause)
    })?;
    let room = sessions.check_room(node, source, shared.settings.max_sessions);
    room.map_err(|limit| {
        sessions.warn_of_session_limit(node, limit);
        (Reason::SessionLimit, limit.to_string())
    })
}
