//! Follows the links and addresses of this node and, where connects are steered, its routes.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{info, warn};

use super::{ANYWAY, GATHER, NetError, RETRY, netlink::Netlink, snapshot::Snapshot};
use crate::{drain, failure::chain, latest};

/// Follows the network of this node, and publishes its state.
pub struct Follower {
    netlink: Netlink,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    network: watch::Sender<Network>,
}

/// The network of this node by the kernel's last answer.
#[derive(Clone)]
pub struct Network {
    pub(super) snapshot: Arc<Snapshot>,
    /// The problem that may make the snapshot outdated.
    pub(super) problem: Option<String>,
}

impl Follower {
    /// Queries the kernel once. Includes and follows routes only `with_routes`.
    ///
    /// # Errors
    ///
    /// The kernel refuses the netlink socket, or doesn't answer.
    pub async fn open(with_routes: bool) -> Result<Self, NetError> {
        let netlink = Netlink::open(with_routes)?;
        let snapshot = Arc::new(netlink.snapshot().await?);
        Ok(Self {
            netlink,
            addresses: watch::Sender::new(Arc::clone(&snapshot.own)),
            network: watch::Sender::new(Network {
                snapshot,
                problem: None,
            }),
        })
    }

    /// Returns a receiver of the addresses of the links, without link-local ones of IPv6.
    #[must_use]
    pub fn addresses(&self) -> watch::Receiver<Arc<BTreeSet<IpAddr>>> {
        self.addresses.subscribe()
    }

    /// Returns a receiver of the complete network.
    #[must_use]
    pub fn network(&self) -> watch::Receiver<Network> {
        self.network.subscribe()
    }

    /// Runs until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut next = Instant::now() + ANYWAY;
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                is_alive = self.netlink.changed() => {
                    if !is_alive {
                        warn!("the kernel reports no more changes of the network; it is asked every {} s", ANYWAY.as_secs());
                        // Reopening may fail, too, and must not be repeated without a pause.
                        sleep(RETRY).await;
                        self.netlink.reopen();
                    }
                    next = next.min(Instant::now() + GATHER);
                }
                () = sleep_until(next) => {
                    let is_well = self.publish().await;
                    next = Instant::now() + if is_well { ANYWAY } else { RETRY };
                }
            }
        }
    }

    /// Queries the kernel and publishes the answer; returns false if there was none.
    async fn publish(&self) -> bool {
        match self.netlink.snapshot().await {
            Ok(snapshot) => {
                let count = snapshot.own.len();
                if latest::put(&self.addresses, Arc::clone(&snapshot.own)) {
                    info!(addresses = count, "the addresses of this node changed");
                }
                // Published even if equal: a program that changed it in the meantime must see that
                // undone.
                self.network.send_replace(Network {
                    snapshot: Arc::new(snapshot),
                    problem: None,
                });
                true
            }
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot ask for the network of this node; what is known of it stays"
                );
                let problem = Some(chain(&error));
                self.network
                    .send_modify(|network| network.problem = problem);
                false
            }
        }
    }
}
