//! Follows the links and addresses of this node and, where connects are steered, its routes.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{info, warn};

use super::{ANYWAY, GATHER, NetError, RETRY, netlink::Netlink, snapshot::Snapshot};
use crate::{drain, failure::chain, latest};

/// Follows the network of this node, and publishes how it is.
pub struct Follower {
    netlink: Netlink,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    network: watch::Sender<Network>,
}

/// The network of this node as the kernel last described it.
#[derive(Clone)]
pub struct Network {
    pub(super) snapshot: Arc<Snapshot>,
    /// Why the description may be out of date.
    pub(super) problem: Option<String>,
}

impl Follower {
    /// Asks the kernel once. Routes are asked for and followed only `with_routes`.
    ///
    /// # Errors
    ///
    /// The kernel gives no netlink socket, or doesn't answer.
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

    /// The addresses of the links, without link-local ones of IPv6.
    #[must_use]
    pub fn addresses(&self) -> watch::Receiver<Arc<BTreeSet<IpAddr>>> {
        self.addresses.subscribe()
    }

    /// Everything that is followed.
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
                        // Where reopening fails too, it must not be tried without a pause.
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

    /// Asks the kernel and publishes its answer; returns whether there was one.
    async fn publish(&self) -> bool {
        match self.netlink.snapshot().await {
            Ok(snapshot) => {
                let count = snapshot.own.len();
                if latest::put(&self.addresses, Arc::clone(&snapshot.own)) {
                    info!(addresses = count, "the addresses of this node changed");
                }
                // Also if it is as it was: who changed it meanwhile must see that this was undone.
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
