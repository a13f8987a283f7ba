//! The addresses of this node, for node ports.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{info, warn};

use super::{
    ANYWAY, GATHER, NetError, RETRY,
    netlink::{Kernel, Netlink},
};
use crate::{drain, latest};

/// Follows the addresses of this node's links.
pub struct Addresses {
    netlink: Netlink,
    known: watch::Sender<Arc<BTreeSet<IpAddr>>>,
}

impl Addresses {
    /// Asks the kernel for them once.
    ///
    /// # Errors
    ///
    /// The kernel gives no netlink socket, or doesn't answer.
    pub async fn open() -> Result<Self, NetError> {
        let netlink = Netlink::of_addresses()?;
        let known = netlink.kernel.addresses().await?;
        Ok(Self {
            netlink,
            known: watch::Sender::new(Arc::new(known)),
        })
    }

    /// The addresses, as they are at any time.
    #[must_use]
    pub fn known(&self) -> watch::Receiver<Arc<BTreeSet<IpAddr>>> {
        self.known.subscribe()
    }

    /// Runs until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut next = Instant::now() + ANYWAY;
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                told = self.netlink.changed() => {
                    if !told {
                        warn!("the kernel tells no more of addresses; it is asked every {} s", ANYWAY.as_secs());
                        // Where that fails too, it must not be tried without a pause.
                        sleep(RETRY).await;
                        self.netlink.reopen();
                    }
                    next = next.min(Instant::now() + GATHER);
                }
                () = sleep_until(next) => {
                    let is_well = look(&self.netlink.kernel, &self.known).await;
                    next = Instant::now() + if is_well { ANYWAY } else { RETRY };
                }
            }
        }
    }
}

/// Asks for the addresses, and says whether there was an answer.
async fn look(kernel: &Kernel, known: &watch::Sender<Arc<BTreeSet<IpAddr>>>) -> bool {
    let found = match kernel.addresses().await {
        Ok(found) => found,
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot ask for addresses; those that are known stay");
            return false;
        }
    };
    let count = found.len();
    if latest::put(known, Arc::new(found)) {
        info!(addresses = count, "the addresses of this node changed");
    }
    true
}
