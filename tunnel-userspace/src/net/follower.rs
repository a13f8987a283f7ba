//! Follows this node's links and addresses, and also its routes if the node steers connections.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{info, warn};
use tunnel_common::steering::Prefix;

use super::{
    CHANGE_DELAY, CHECK_INTERVAL, NetError, RETRY_DELAY,
    netlink::NetworkMonitor,
    snapshot::Snapshot,
    uplinks::{self, LinkSettings, PodRanges},
};
use crate::{drain, error_chain::chain, model::LinkNetworks, publish};

/// Follows this node's network, and publishes its current state.
pub struct NetworkFollower {
    netlink: NetworkMonitor,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    network: watch::Sender<NetworkState>,
    networks: watch::Sender<Arc<LinkNetworks>>,
    /// Decides which links lead to pods.
    rules: FollowedRules,
    /// The indices of the links that are, or once were, uplinks.
    former_uplinks: BTreeSet<u32>,
}

/// The rules that decide which links lead to pods.
pub struct FollowedRules {
    /// The settings in the config.
    pub settings: LinkSettings,
    /// The pod ranges in this node's Node object.
    pub node_ranges: watch::Receiver<Arc<[Prefix]>>,
}

impl Default for FollowedRules {
    fn default() -> Self {
        Self {
            settings: LinkSettings::default(),
            node_ranges: watch::Sender::new(Arc::from([])).subscribe(),
        }
    }
}

/// The state of this node's network, as last read from the kernel.
#[derive(Clone)]
pub struct NetworkState {
    pub(super) snapshot: Arc<Snapshot>,
    /// The error from the last query, if it failed. The snapshot may then be out of date.
    pub(super) problem: Option<String>,
}

impl NetworkFollower {
    /// Subscribes to changes, and reads the current state. Routes are included only if `rules` is not `None`: if
    /// this node steers connections.
    ///
    /// # Errors
    ///
    /// Returns an error if the netlink socket can't be opened, or if a query fails.
    pub async fn open(rules: Option<FollowedRules>) -> Result<Self, NetError> {
        let netlink = NetworkMonitor::open(rules.is_some())?;
        let rules = rules.unwrap_or_default();
        let snapshot = Arc::new(netlink.snapshot().await?);
        let mut former_uplinks = BTreeSet::new();
        let networks = rules.networks(&snapshot, &mut former_uplinks);
        Ok(Self {
            netlink,
            addresses: watch::Sender::new(Arc::clone(&snapshot.own_addresses)),
            networks: watch::Sender::new(Arc::new(networks)),
            rules,
            former_uplinks,
            network: watch::Sender::new(NetworkState {
                snapshot,
                problem: None,
            }),
        })
    }

    /// Returns a receiver for the node's addresses, except link-local IPv6 addresses.
    #[must_use]
    pub fn addresses(&self) -> watch::Receiver<Arc<BTreeSet<IpAddr>>> {
        self.addresses.subscribe()
    }

    /// Returns a receiver for the state of the node's network.
    #[must_use]
    pub fn network(&self) -> watch::Receiver<NetworkState> {
        self.network.subscribe()
    }

    /// Returns a receiver for the networks that this node has routes to, except default routes.
    #[must_use]
    pub fn networks(&self) -> watch::Receiver<Arc<LinkNetworks>> {
        self.networks.subscribe()
    }

    /// Runs until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut next = Instant::now() + CHECK_INTERVAL;
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                is_alive = self.netlink.changed() => {
                    if !is_alive {
                        let interval = CHECK_INTERVAL.as_secs();
                        warn!(
                            interval,
                            "the netlink socket was closed; polling until it is reopened"
                        );
                        // Reopening the socket may fail, and must not be retried without a delay.
                        sleep(RETRY_DELAY).await;
                        self.netlink.reopen();
                    }
                    next = next.min(Instant::now() + CHANGE_DELAY);
                }
                Ok(()) = self.rules.node_ranges.changed() => next = Instant::now(),
                () = sleep_until(next) => {
                    let is_well = self.publish().await;
                    next = Instant::now() + if is_well { CHECK_INTERVAL } else { RETRY_DELAY };
                }
            }
        }
    }

    /// Queries the network, and publishes its state. Returns false if the query failed.
    async fn publish(&mut self) -> bool {
        match self.netlink.snapshot().await {
            Ok(snapshot) => {
                let count = snapshot.own_addresses.len();
                if publish::publish_if_changed(&self.addresses, Arc::clone(&snapshot.own_addresses))
                {
                    info!(addresses = count, "the addresses of this node changed");
                }
                let networks = self.rules.networks(&snapshot, &mut self.former_uplinks);
                publish::publish_if_changed(&self.networks, Arc::new(networks));
                // Published even if it equals the last snapshot, since another program may have removed a
                // route that the receiver had added in between.
                self.network.send_replace(NetworkState {
                    snapshot: Arc::new(snapshot),
                    problem: None,
                });
                true
            }
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot read the network of this node; its last known state stays in use"
                );
                let problem = Some(chain(&error));
                self.network
                    .send_modify(|network| network.problem = problem);
                false
            }
        }
    }
}

impl FollowedRules {
    /// Returns the networks that this node has routes to. A network is that of pods if its link is a pod link.
    /// A link that was once an uplink stays one while its routes are missing.
    fn networks(&self, snapshot: &Snapshot, former_uplinks: &mut BTreeSet<u32>) -> LinkNetworks {
        let ranges = PodRanges {
            configured: self.settings.pod_ranges.clone(),
            of_node: self.node_ranges.borrow().to_vec(),
        };
        let rules = self
            .settings
            .rules(&ranges, &snapshot.gateways, former_uplinks);
        let links = uplinks::classify(&snapshot.links, rules);
        former_uplinks.extend(links.uplinks.keys().copied());
        former_uplinks.retain(|index| snapshot.links.iter().any(|link| link.index == *index));
        snapshot.networks(&links.inside_links)
    }
}
