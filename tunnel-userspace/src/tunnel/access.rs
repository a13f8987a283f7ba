//! The rules by which a gateway refuses agents, or ends their sessions, although their certificates are valid: the
//! deny list, and Nodes that do not exist.

use std::{error::Error, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::watch,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, TlsStream};

use super::{http2::TlsConnection, missing_nodes::MissingNodes, socket::SessionSocket};
use crate::{
    identity::{DeniedAgent, DenyListReceiver, Identity, Peer},
    model::NodeList,
};

/// The interval between checks whether the Node of a session still exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The time for which a connection whose agent was refused stays open, so that the agent receives the TLS alert
/// instead of a reset.
const LINGER_TIMEOUT: Duration = Duration::from_millis(500);
/// The maximum number of bytes to read from such a connection.
const MAX_LINGER_BYTES: u64 = 64 << 10;

/// The state that the rules depend on.
#[derive(Clone, Debug, Default)]
pub struct AccessInputs {
    /// The deny list.
    pub deny_list: DenyListReceiver,
    /// The names of all Nodes; `None` if the sources do not read all Nodes.
    pub nodes: Option<watch::Receiver<NodeList>>,
}

/// The rules by which a gateway refuses agents whose certificates are valid.
#[derive(Debug)]
pub(super) struct AccessRules {
    deny_list: DenyListReceiver,
    missing_nodes: Option<MissingNodes>,
}

/// The error from a TLS handshake with an agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum TlsError {
    /// The agent has a valid certificate, but is on the deny list.
    #[error(transparent)]
    Denied(DeniedAgent),
    /// The handshake failed for another reason.
    #[error(transparent)]
    Failed(Box<dyn Error + Send + Sync>),
}

impl AccessRules {
    /// Creates the rules. A `missing_node_timeout` of zero means that Nodes need not exist.
    pub(super) fn new(inputs: AccessInputs, missing_node_timeout: Duration) -> Self {
        let nodes = inputs.nodes.filter(|_| !missing_node_timeout.is_zero());
        Self {
            deny_list: inputs.deny_list,
            missing_nodes: nodes.map(|nodes| MissingNodes::new(nodes, missing_node_timeout)),
        }
    }

    /// Returns the reason why the gateway cannot accept any agents, if there is one.
    pub(super) fn not_ready(&self) -> Option<String> {
        let problem = || self.deny_list.state().problem.unwrap_or_default();
        let is_known = self.deny_list.current().is_some();
        (!is_known).then(|| format!("the deny list has never been valid: {}", problem()))
    }

    /// Performs the TLS handshake with an agent. An agent on the deny list receives a TLS alert.
    pub(super) async fn accept(
        &self,
        own: &Identity,
        socket: SessionSocket,
    ) -> Result<TlsConnection, TlsError> {
        let failed = |error: rustls::Error| TlsError::Failed(error.into());
        let deny_list = self.deny_list.current().unwrap_or_default();
        let (config, denial) = own.server_with(deny_list).map_err(failed)?;
        let accepted = TlsAcceptor::from(config).accept(socket).into_fallible();
        match accepted.await {
            Ok(tls) => Ok(TlsStream::Server(tls)),
            Err((error, socket)) => match denial.get() {
                Some(denied) => {
                    linger(socket).await;
                    Err(TlsError::Denied(denied.clone()))
                }
                None => Err(TlsError::Failed(error.into())),
            },
        }
    }

    /// Returns an error with the cause if a node must not have sessions.
    pub(super) fn check_node(&self, node: &str) -> Result<(), String> {
        let missing = self.missing_nodes.as_ref();
        let checked = missing.map_or(Ok(()), |missing| missing.check(node));
        checked.map_err(|missing| missing.to_string())
    }

    /// Waits until an agent must not have a session, and returns the cause. `ended` becomes true when an operator
    /// ends the session.
    pub(super) async fn revoked(&self, agent: &Peer, mut ended: watch::Receiver<bool>) -> String {
        let mut changes = self.deny_list.clone();
        loop {
            let list = changes.current();
            if let Some(denied) = list.and_then(|list| list.entry_of(agent)) {
                return denied.to_string();
            }
            if let Err(cause) = self.check_node(&agent.node) {
                return cause;
            }
            tokio::select! {
                () = changes.changed() => {}
                () = sleep(CHECK_INTERVAL), if self.missing_nodes.is_some() => {}
                Ok(_) = ended.wait_for(|ended| *ended) => {
                    return "an operator has ended the session (culvert nodes end)".to_owned();
                }
            }
        }
    }
}

/// Waits until the peer has closed the connection, which shows that it has received everything.
async fn linger(mut socket: SessionSocket) {
    let closed = async {
        socket.shutdown().await?;
        let mut received = socket.take(MAX_LINGER_BYTES);
        tokio::io::copy(&mut received, &mut tokio::io::sink()).await
    };
    drop(timeout(LINGER_TIMEOUT, closed).await);
}
