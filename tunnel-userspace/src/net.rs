//! The links, addresses and routes of this node: its uplinks, their guard, and the routes that make the
//! steering prefixes local; and the kernel's lists of sockets.
//!
//! - `follower`: follows the links, addresses and routes of this node
//! - `uplinks`: the links that lead outside (pure)
//! - `routes`: the routes that make the prefixes local, and the file that records them
//! - `snapshot`: links, addresses and routes at one moment (pure); `route`: a route of ours
//! - `netlink`: rtnetlink queries, and changes of routes
//! - `diag`: the sockets of a network namespace
//! - `listeners`: the addresses and ports with a local listener

mod diag;
mod follower;
mod listeners;
mod netlink;
mod route;
mod routes;
mod snapshot;
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
use tunnel_common::steering::Prefix;

pub(crate) use self::diag::messages_in;
use self::netlink::Kernel;
pub use self::{
    diag::{Diag, DiagError, Filter, Place, is_connected},
    follower::{Follower, Network},
    listeners::Listeners,
    netlink::NetError,
    routes::{record, remove as remove_routes},
};
use crate::{drain, failure::chain, latest};

/// The time for which changes are collected before they are processed.
const GATHER: Duration = Duration::from_millis(20);
/// The interval at which everything is checked without a change.
const ANYWAY: Duration = Duration::from_secs(30);
/// The delay before a failed check is repeated.
const RETRY: Duration = Duration::from_secs(2);

/// The guard, which drops packets from uplinks to the steering prefixes.
pub trait Keeper: Send {
    /// The error of guarding.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Guards every uplink, given by index and name. Guarded links stay guarded; `anew` attaches every
    /// guard again, in case another program removed it.
    ///
    /// # Errors
    ///
    /// A link can't be guarded.
    fn keep(&mut self, uplinks: &BTreeMap<u32, String>, anew: bool) -> Result<(), Self::Error>;

    /// Returns the indices of the links that are guarded, or were before their removal.
    fn guarded(&self) -> BTreeSet<u32>;

    /// Enables steering to the ingress for a family: IPv4, IPv6. Without it connects are refused.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    fn admit(&mut self, families: [bool; 2]) -> Result<(), Self::Error>;

    /// Removes the guards of links that are not uplinks.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    fn tidy(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), Self::Error>;
}

/// The settings of the network.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The names of the uplinks; empty to detect them.
    pub uplinks: Vec<String>,
    /// The prefixes to make local.
    pub prefixes: Vec<Prefix>,
    /// The routing protocol that marks our routes.
    pub protocol: u8,
    /// The file that records our routes for the next process.
    pub record: PathBuf,
}

/// The state of the network, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The uplinks, each guarded.
    pub uplinks: Vec<String>,
    /// The routes that exist, as text.
    pub routes: Vec<String>,
    /// The problem, if there is one.
    pub problem: Option<String>,
}

/// Guards the uplinks and maintains the routes, as the network of the node changes.
pub struct Net<K> {
    settings: Settings,
    keeper: K,
    kernel: Kernel,
    network: watch::Receiver<Network>,
    view: watch::Sender<View>,
    /// The indices of links that are or were uplinks.
    known: BTreeSet<u32>,
    /// The indices of the links from which steered connects come.
    inside: watch::Sender<Arc<BTreeSet<u32>>>,
}

impl<K: Keeper> Net<K> {
    /// Opens a netlink socket. Changes nothing. `network` must include routes; the state is published to
    /// `view`.
    ///
    /// # Errors
    ///
    /// The kernel refuses the netlink socket.
    pub fn open(
        settings: Settings,
        keeper: K,
        network: watch::Receiver<Network>,
        view: watch::Sender<View>,
    ) -> Result<Self, NetError> {
        Ok(Self {
            settings,
            keeper,
            kernel: Kernel::open()?,
            network,
            view,
            known: BTreeSet::new(),
            inside: watch::Sender::default(),
        })
    }

    /// Returns a receiver of the indices of the links from which steered connects come.
    #[must_use]
    pub fn inside(&self) -> watch::Receiver<Arc<BTreeSet<u32>>> {
        self.inside.subscribe()
    }

    /// Checks the network: guards the uplinks (with `anew`, also those already guarded), then makes the
    /// prefixes local. Returns false on a problem, which is in the view.
    pub async fn look(&mut self, anew: bool) -> bool {
        let mut view = View::default();
        let problems = self.arrange(&mut view, anew).await;
        view.problem = (!problems.is_empty()).then(|| problems.join("; "));
        let is_well = view.problem.is_none();
        self.view.send_if_modified(|old| {
            if *old == view {
                return false;
            }
            match &view.problem {
                Some(problem) => warn!(%problem, "the network is not as steering needs it"),
                None => info!(uplinks = ?view.uplinks, routes = ?view.routes, "the network is as steering needs it"),
            }
            *old = view;
            true
        });
        is_well
    }

    /// Returns the problems.
    async fn arrange(&mut self, view: &mut View, anew: bool) -> Vec<String> {
        let Network { snapshot, problem } = self.network.borrow_and_update().clone();
        if let Some(problem) = problem {
            return vec![problem];
        }
        // A link that ever was an uplink never counts as inside, whatever its routes are now.
        self.known.extend(self.keeper.guarded());
        let found = uplinks::find(
            &snapshot.links,
            &snapshot.gateways,
            &self.settings.uplinks,
            &self.known,
        );
        self.known.extend(found.uplinks.keys().copied());
        self.known
            .retain(|index| snapshot.links.iter().any(|link| link.index == *index));
        // The ingress accepts connects from these links only, also if guarding fails.
        latest::put(&self.inside, Arc::new(found.inside));
        let missing = found
            .missing
            .map(|name| format!("service.uplinks names {name}, and there is no such link"));
        let mut problems = Vec::from_iter(missing);
        if found.uplinks.is_empty() && problems.is_empty() {
            problems.push(
                "no link is known to lead to the world; name it in service.uplinks".to_owned(),
            );
        }
        // The guard must exist before the routes do.
        if let Err(error) = self.keeper.keep(&found.uplinks, anew) {
            problems.push(chain(&error));
        }
        view.uplinks = found.uplinks.values().cloned().collect();
        let may_route = problems.is_empty();
        let routed = routes::keep(&self.settings, &self.kernel, &snapshot, may_route).await;
        view.routes = routed.routes;
        problems.extend(routed.problems);
        if let Err(error) = self.keeper.admit(routed.families) {
            problems.push(chain(&error));
        }
        // While an uplink is missing, a guard that seems unused may be that uplink's.
        if may_route && let Err(error) = self.keeper.tidy(&found.uplinks) {
            problems.push(chain(&error));
        }
        problems
    }

    /// Removes the routes, then the guards, of an earlier process.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub async fn clear(mut keeper: K, record: &Path) -> Result<(), NetError> {
        let routes = remove_routes(record).await?;
        if routes > 0 || !keeper.guarded().is_empty() {
            keeper
                .tidy(&BTreeMap::new())
                .map_err(|error| NetError::Guard(error.into()))?;
            info!(
                routes,
                "steering is off: its routes and guards were removed"
            );
        }
        Ok(())
    }

    /// Runs until the drain begins. Guards and routes stay.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut next = Instant::now() + ANYWAY;
        let mut anew_at = next;
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                // The follower ends only with the drain.
                Ok(()) = self.network.changed() => next = Instant::now(),
                () = sleep_until(next) => {
                    let anew = Instant::now() >= anew_at;
                    if anew {
                        anew_at = Instant::now() + ANYWAY;
                    }
                    let is_well = self.look(anew).await;
                    next = Instant::now() + if is_well { ANYWAY } else { RETRY };
                }
            }
        }
    }
}
