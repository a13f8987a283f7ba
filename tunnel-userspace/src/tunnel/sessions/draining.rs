//! The drain of a gateway and its ingress, which serve new connections until no stream is left.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::info;

use super::Sessions;
use crate::drain;

/// The interval between checks for open streams.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Sessions {
    /// Waits until the drain begins, and then until no client is connected and no stream is open, but at most
    /// for `limit`.
    pub(in crate::tunnel) async fn drained(
        &self,
        mut draining: watch::Receiver<bool>,
        limit: Duration,
    ) {
        drain::begun(&mut draining).await;
        let (clients, seconds) = (self.clients.total(), limit.as_secs());
        info!(
            clients,
            seconds, "draining: new connections are still served"
        );
        let unused = async {
            while self.clients.total() > 0 || self.streams() > 0 {
                sleep(POLL_INTERVAL).await;
            }
        };
        if timeout(limit, unused).await.is_err() {
            let clients = self.clients.total();
            info!(clients, "the drain timed out; open streams are reset");
        }
    }

    /// Returns the number of open streams in all sessions.
    fn streams(&self) -> u32 {
        let nodes = self.nodes.lock();
        let sessions = nodes.values().flat_map(|node| &node.sessions);
        sessions.map(|session| session.traffic.streams()).sum()
    }
}
