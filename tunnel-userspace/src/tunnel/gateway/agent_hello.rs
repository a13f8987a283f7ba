//! The uses of an agent's hello.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use h2::SendStream;
use jiff::Timestamp;
use tracing::debug;

use crate::{
    identity::Peer,
    tunnel::{
        SessionView, Sessions, TrafficView,
        hello::{self, AgentHello, GatewayLine},
        peer_certificates::PeerCertificates,
        session_token::SessionToken,
    },
};

/// Returns the view of a session that begins now.
pub(super) fn initial_view(agent: &Peer, answer: &AgentHello, peer: SocketAddr) -> SessionView {
    let skew = answer.time.map(hello::clock_skew);
    SessionView {
        name: answer.session.clone(),
        peer,
        since: Timestamp::now(),
        release: answer.release.clone(),
        boot: answer.boot.clone(),
        certificate_expires: agent.expires,
        certificate_issuer: agent.issuer.clone(),
        clock_skew_seconds: skew.map(|skew| skew.as_secs_f64()),
        traffic: TrafficView::default(),
    }
}

/// Renews earlier sessions of a node, and sends the agent the tokens of those that it has found.
pub(super) fn confirm_renewals(
    sessions: &Sessions,
    node: &Arc<str>,
    renews: Vec<SessionToken>,
    certificates: &PeerCertificates,
    hello: &mut SendStream<Bytes>,
) {
    if renews.is_empty() {
        return;
    }
    let renewed = sessions.renew(node, renews, certificates);
    if let Err(error) = hello.send_data(GatewayLine { renewed }.bytes(), false) {
        debug!(%node, %error, "the hello stream has ended");
    }
}
