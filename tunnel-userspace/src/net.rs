//! This node's network: its links, addresses and routes, the guards on its uplinks, the routes that make the
//! steering prefixes local, and the kernel's lists of sockets.
//!
//! - `follower`: follows this node's links, addresses and routes
//! - `uplinks`: finds the links that lead outside the node, and those that lead to its pods (pure)
//! - `route_sync`: maintains the routes that make the steering prefixes local, and the file that records them
//! - `steering_route`: a route that makes a steering prefix local
//! - `packets`: keeps the programs that translate packets attached to the uplinks
//! - `filters`: lists the filters of others on uplinks
//! - `blocking_netlink`: netlink sockets for callers that may block
//! - `qdisc`: the qdiscs at which filters for packets that arrive on links are
//! - `kernel_settings`: settings of the kernel that keep packets from their receivers
//! - `link_header`: the link-layer headers of packets
//! - `local_senders`: the senders of packets that count as local
//! - `snapshot`: the links, addresses and routes at one point in time (pure)
//! - `netlink`: queries rtnetlink, and changes routes
//! - `sock_diag`: lists and ends the sockets in a network namespace
//! - `local_listeners`: finds local listeners on given addresses and ports

mod blocking_netlink;
mod filters;
mod follower;
mod kernel_settings;
mod link_header;
mod local_listeners;
mod local_senders;
mod netlink;
mod packets;
mod qdisc;
mod route_lookup;
mod route_sync;
mod snapshot;
mod sock_diag;
mod steering_route;
mod uplinks;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tracing::{info, warn};
use tunnel_common::{addr::Address, steering::Prefix};

use self::netlink::RouteSocket;
pub(crate) use self::sock_diag::messages_in;
pub use self::{
    filters::FILTER_HANDLE,
    follower::{LinkClassifier, NetworkFollower, NetworkState},
    local_listeners::Listeners,
    local_senders::{LocalOnLink, LocalSenders},
    netlink::NetError,
    packets::{
        AddressPair, PacketLinkSettings, PacketLinks, PacketPrograms, PacketsView, SenderRanges,
        TranslatedLink,
    },
    qdisc::ingress_qdiscs,
    route_lookup::{Origin, Way, index_of_link, way_to},
    route_sync::{record_path, remove as remove_routes},
    sock_diag::{DiagError, ListedSocket, SockDiag, SocketFilter, is_connected},
    uplinks::{LinkSettings, PodRanges, matches_link},
};
use crate::{drain, error_chain::chain, model::OwnNode, publish};

/// The delay after a network change, during which further changes are collected.
const CHANGE_DELAY: Duration = Duration::from_millis(20);
/// The interval between checks when nothing changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The delay before a failed check is retried.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// The guard on the uplinks: programs that drop packets to steering prefixes if they arrive over an uplink.
pub trait UplinkGuard: Send {
    /// The type of the errors that the operations return.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Attaches the guard to every uplink, given by index and name. Other links keep their guards. If
    /// `reattach` is true, the guard is attached once more to uplinks that already have it, in case another
    /// program removed it.
    ///
    /// # Errors
    ///
    /// Returns an error if the guard can't be attached to a link.
    fn guard_uplinks(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), Self::Error>;

    /// Returns the indices of the links that have a guard, including links that no longer exist.
    fn guarded_links(&self) -> BTreeSet<u32>;

    /// Enables or disables steering to the ingress for each address family: IPv4, then IPv6. While steering
    /// is disabled, connections that would be steered are refused. The kernel keeps the last state after this process.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be written.
    fn set_steering(&mut self, families: [bool; 2]) -> Result<(), Self::Error>;

    /// Removes the guard from all links that are not uplinks.
    ///
    /// # Errors
    ///
    /// Returns an error if a guard can't be removed.
    fn remove_unused(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), Self::Error>;
}

/// The settings for guarding uplinks and routing the steering prefixes.
#[derive(Clone, Debug)]
pub struct NetworkSettings {
    /// True if the config names the uplinks, so that they are not detected.
    pub names_uplinks: bool,
    /// The steering prefixes to make local.
    pub prefixes: Vec<Prefix>,
    /// The routing protocol number that marks Culvert's routes.
    pub protocol: u8,
    /// The interval between checks of the guards and routes.
    pub check_interval: Duration,
    /// The path of the file in which the routes are recorded for the next process.
    pub record: PathBuf,
}

/// The JSON view of this node's network, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkView {
    /// The names of the uplinks.
    pub uplinks: Vec<String>,
    /// The names of the links over which the connections of pods may reach the ingress.
    #[serde(default)]
    pub pod_links: Vec<String>,
    /// The names of the links that may lead to pods, but over which no pod's address is reached. The ingress
    /// resets connections that arrive over them.
    #[serde(default)]
    pub refused_links: Vec<String>,
    /// The known ranges of the pods' addresses, or `None` if they are not used because the config names the uplinks.
    #[serde(default)]
    pub pod_ranges: Option<Vec<String>>,
    /// The existing routes for the steering prefixes, as text.
    pub routes: Vec<String>,
    /// The current problem, if there is one.
    pub problem: Option<String>,
}

/// The times at which programs on uplinks are checked.
struct CheckSchedule {
    interval: Duration,
    /// The time of the next check.
    next: Instant,
    /// The time from which a check also repairs programs that are attached already.
    reattach_at: Instant,
}

impl CheckSchedule {
    fn new(interval: Duration) -> Self {
        let next = Instant::now() + interval;
        Self {
            interval,
            next,
            reattach_at: next,
        }
    }

    /// Makes the next check due.
    fn check_now(&mut self) {
        self.next = Instant::now();
    }

    /// Begins a check. Returns true if it also repairs programs that are attached already.
    fn begin(&mut self) -> bool {
        let reattach = Instant::now() >= self.reattach_at;
        if reattach {
            self.reattach_at = Instant::now() + self.interval;
        }
        reattach
    }

    /// Sets the time of the next check, which is earlier if there is a problem.
    fn end(&mut self, is_well: bool) {
        let retry_delay = RETRY_DELAY.min(self.interval);
        self.next = Instant::now() + if is_well { self.interval } else { retry_delay };
    }
}

/// Returns the pod ranges in this node's Node object.
fn pod_ranges_of(own_node: &OwnNode) -> Vec<Prefix> {
    let ranges = own_node.pod_cidrs.iter();
    ranges
        .filter_map(|(network, length)| Prefix::containing(Address::from_ip(*network), *length))
        .collect()
}

/// Waits until the network includes the addresses in this node's Node object, by which the links are classified, or can't be
/// read. `network` must include routes.
pub async fn wait_until_classified(
    network: &mut watch::Receiver<NetworkState>,
    own_node: &OwnNode,
) {
    let of_node = pod_ranges_of(own_node);
    let is_current = |state: &NetworkState| {
        state.problem.is_some()
            || state.pod_ranges.of_node == of_node && state.internal_ips == own_node.internal_ips
    };
    // The follower ends only with the daemon.
    drop(network.wait_for(is_current).await);
}

/// Guards the uplinks, and maintains the routes for the steering prefixes, as the node's network changes.
pub struct NetworkSetup<K> {
    settings: NetworkSettings,
    guard: K,
    kernel: RouteSocket,
    network: watch::Receiver<NetworkState>,
    view: watch::Sender<NetworkView>,
    /// The indices of the links over which steered connections may arrive.
    inside_links: watch::Sender<Arc<BTreeSet<u32>>>,
}

impl<K: UplinkGuard> NetworkSetup<K> {
    /// Opens a netlink socket, but changes nothing yet. `network` must include routes. The resulting state is published
    /// to `view`.
    ///
    /// # Errors
    ///
    /// Returns an error if the netlink socket can't be opened.
    pub fn open(
        settings: NetworkSettings,
        guard: K,
        network: watch::Receiver<NetworkState>,
        view: watch::Sender<NetworkView>,
    ) -> Result<Self, NetError> {
        Ok(Self {
            settings,
            guard,
            kernel: RouteSocket::open()?,
            network,
            view,
            inside_links: watch::Sender::default(),
        })
    }

    /// Returns a receiver for the indices of the links over which steered connections may arrive.
    #[must_use]
    pub fn inside_links(&self) -> watch::Receiver<Arc<BTreeSet<u32>>> {
        self.inside_links.subscribe()
    }

    /// Guards the uplinks, then adds missing routes. If `reattach` is true, also reattaches existing guards.
    /// Returns false if there is a problem, which is described in the view.
    pub async fn check(&mut self, reattach: bool) -> bool {
        let mut view = NetworkView::default();
        let problems = self.apply(&mut view, reattach).await;
        view.problem = (!problems.is_empty()).then(|| problems.join("; "));
        let is_well = view.problem.is_none();
        self.view.send_if_modified(|old| {
            if *old == view {
                return false;
            }
            // The links of pods change too often to be logged.
            let logged = |view: &NetworkView| {
                (
                    view.uplinks.clone(),
                    view.routes.clone(),
                    view.problem.clone(),
                )
            };
            match &view.problem {
                _ if logged(old) == logged(&view) => {}
                Some(problem) => {
                    warn!(%problem, "the network of this node is not ready for steering");
                }
                None => info!(
                    uplinks = ?view.uplinks,
                    routes = ?view.routes,
                    "the network of this node is ready for steering"
                ),
            }
            *old = view;
            true
        });
        is_well
    }

    /// Applies the guards and routes, and returns any problems.
    async fn apply(&mut self, view: &mut NetworkView, reattach: bool) -> Vec<String> {
        let network = self.network.borrow_and_update().clone();
        if let Some(problem) = network.problem {
            return vec![problem];
        }
        let (snapshot, links) = (network.snapshot, network.links);
        // The ingress accepts connections only over these links, even if guarding fails.
        publish::publish_if_changed(&self.inside_links, Arc::new(links.inside_links.clone()));
        let mut problems = Vec::from_iter(links.missing_uplink());
        if links.uplinks.is_empty() && problems.is_empty() {
            let text = "no uplink was found; name the links that lead outside in service.uplinks";
            problems.push(text.to_owned());
        }
        // The guard must be attached before the routes are added.
        if let Err(error) = self.guard.guard_uplinks(&links.uplinks, reattach) {
            problems.push(chain(&error));
        }
        view.uplinks = links.uplinks.values().cloned().collect();
        view.pod_links = links.pod_links.values().cloned().collect();
        view.refused_links.clone_from(&links.unproven_links);
        let ranges = network.pod_ranges.all().map(ToString::to_string);
        view.pod_ranges = (!self.settings.names_uplinks).then(|| ranges.collect());
        let may_route = problems.is_empty();
        let routed = route_sync::maintain(&self.settings, &self.kernel, &snapshot, may_route).await;
        view.routes = routed.routes;
        problems.extend(routed.problems);
        if let Err(error) = self.guard.set_steering(routed.families) {
            problems.push(chain(&error));
        }
        // While a configured uplink is missing, a guard that seems unused may be on that uplink, under
        // another name.
        if may_route && let Err(error) = self.guard.remove_unused(&links.uplinks) {
            problems.push(chain(&error));
        }
        problems
    }

    /// Disables steering, and removes the routes and then the guards that an earlier process left behind.
    ///
    /// # Errors
    ///
    /// Returns an error if steering can't be disabled, or if a route or a guard can't be removed.
    pub async fn clear(mut guard: K, record: &Path) -> Result<(), NetError> {
        let disabled = guard.set_steering([false; 2]);
        disabled.map_err(|error| NetError::Guard(error.into()))?;
        let routes = remove_routes(record).await?;
        if routes > 0 || !guard.guarded_links().is_empty() {
            guard
                .remove_unused(&BTreeMap::new())
                .map_err(|error| NetError::Guard(error.into()))?;
            info!(
                routes,
                "removed the routes and guards of an earlier process, since steering is off"
            );
        }
        Ok(())
    }

    /// Runs until the drain begins. The guards and routes are left in place.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut schedule = CheckSchedule::new(self.settings.check_interval);
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                // The follower stops only when the drain begins.
                Ok(()) = self.network.changed() => schedule.check_now(),
                () = sleep_until(schedule.next) => {
                    let is_well = self.check(schedule.begin()).await;
                    schedule.end(is_well);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
