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
    route_sync,
    snapshot::Snapshot,
    uplinks::{self, ClassifiedLinks, Link, LinkKind, LinkSettings, PodRanges},
};
use crate::{
    drain,
    error_chain::chain,
    model::{LinkNetworks, OwnNode},
    publish,
};

/// Follows this node's network, and publishes its current state.
pub struct NetworkFollower {
    netlink: NetworkMonitor,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
    network: watch::Sender<NetworkState>,
    networks: watch::Sender<Arc<LinkNetworks>>,
    classifier: LinkClassifier,
}

/// Classifies the links whenever they change.
pub struct LinkClassifier {
    /// The settings in the config.
    pub settings: LinkSettings,
    /// The addresses in this node's Node object.
    pub own_node: watch::Receiver<Arc<OwnNode>>,
    /// The indices of the links that were uplinks earlier. Such a link stays an uplink while its routes are missing.
    pub former_uplinks: BTreeSet<u32>,
}

impl Default for LinkClassifier {
    fn default() -> Self {
        Self {
            settings: LinkSettings::default(),
            own_node: watch::Sender::default().subscribe(),
            former_uplinks: BTreeSet::new(),
        }
    }
}

/// The state of this node's network, as last read from the kernel.
#[derive(Clone)]
pub struct NetworkState {
    pub(super) snapshot: Arc<Snapshot>,
    pub(super) links: Arc<ClassifiedLinks>,
    /// The pod ranges by which the links were classified.
    pub(super) pod_ranges: PodRanges,
    /// The addresses of type `InternalIP` in this node's Node object.
    pub(super) internal_ips: Vec<IpAddr>,
    /// The error from the last query, if it failed. The other fields may then be out of date.
    pub(super) problem: Option<String>,
}

impl NetworkState {
    /// Returns the address families, IPv4 and then IPv6, of the steering prefixes that have a route with this routing
    /// protocol number.
    #[must_use]
    pub fn routed_families(&self, prefixes: &[Prefix], protocol: u8) -> [bool; 2] {
        route_sync::routed_families(&self.snapshot, prefixes, protocol)
    }
}

impl NetworkFollower {
    /// Subscribes to changes, and reads the current state. Routes are included, and links are classified, only if
    /// `classifier` is not `None`: if this node steers connections.
    ///
    /// # Errors
    ///
    /// Returns an error if the netlink socket can't be opened, or if a query fails.
    pub async fn open(classifier: Option<LinkClassifier>) -> Result<Self, NetError> {
        let netlink = NetworkMonitor::open(classifier.is_some())?;
        let mut classifier = classifier.unwrap_or_default();
        let network = classifier.classify(netlink.snapshot().await?);
        let networks = network.snapshot.networks(&network.links.proven_pod_links);
        Ok(Self {
            netlink,
            addresses: watch::Sender::new(Arc::clone(&network.snapshot.own_addresses)),
            networks: watch::Sender::new(Arc::new(networks)),
            classifier,
            network: watch::Sender::new(network),
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
                Ok(()) = self.classifier.own_node.changed() => next = Instant::now(),
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
                let network = self.classifier.classify(snapshot);
                let snapshot = &network.snapshot;
                let count = snapshot.own_addresses.len();
                if publish::publish_if_changed(&self.addresses, Arc::clone(&snapshot.own_addresses))
                {
                    info!(addresses = count, "the addresses of this node changed");
                }
                let networks = snapshot.networks(&network.links.proven_pod_links);
                publish::publish_if_changed(&self.networks, Arc::new(networks));
                // Published even if it equals the last snapshot, since another program may have removed a
                // route that the receiver had added in between.
                self.network.send_replace(network);
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

impl LinkClassifier {
    /// Classifies the links in a snapshot.
    fn classify(&mut self, snapshot: Snapshot) -> NetworkState {
        let own_node = Arc::clone(&self.own_node.borrow_and_update());
        let pod_ranges = PodRanges {
            configured: self.settings.pod_ranges.clone(),
            of_node: super::pod_ranges_of(&own_node),
        };
        let rules = self
            .settings
            .rules(&pod_ranges, &snapshot.gateways, &self.former_uplinks);
        let links = uplinks::classify(&snapshot.links, rules);
        // Other kinds of links need no memory: what they are doesn't depend on routes and addresses. A veth is of
        // such a kind until its peer is in another namespace.
        let may_change = |link: &&Link| matches!(link.kind, LinkKind::Pair | LinkKind::Bridge);
        let indices = snapshot.links.iter().filter(may_change).map(|it| it.index);
        self.former_uplinks
            .extend(indices.filter(|index| links.uplinks.contains_key(index)));
        self.former_uplinks
            .retain(|index| snapshot.links.iter().any(|link| link.index == *index));
        NetworkState {
            snapshot: Arc::new(snapshot),
            links: Arc::new(links),
            pod_ranges,
            internal_ips: own_node.internal_ips.clone(),
            problem: None,
        }
    }
}
