//! The links, addresses and routes of this node: which links lead to the world, the guard on them,
//! and the routes that make the steering prefixes local; and what the kernel tells of sockets.
//!
//! - `follower`: the links, addresses and routes of this node, followed
//! - `uplinks`: which links lead to the world (pure)
//! - `routes`: the routes that make the prefixes local, and the file that says which are ours
//! - `snapshot`: links, addresses and routes at one moment (pure); `route`: a route of ours
//! - `netlink`: asking the kernel, and changing its routes
//! - `diag`: the sockets of a network namespace
//! - `listeners`: which addresses and ports something of this node listens at

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

/// How long changes are gathered before they are looked at.
const GATHER: Duration = Duration::from_millis(20);
/// How often everything is looked at although nothing was told.
const ANYWAY: Duration = Duration::from_secs(30);
/// When a look that failed is repeated.
const RETRY: Duration = Duration::from_secs(2);

/// What keeps the traffic of uplinks from the steering prefixes.
pub trait Keeper: Send {
    /// Why it could not.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Guards every uplink: index and name. What is guarded stays guarded; `anew` puts every guard in
    /// place once more, in case somebody took it off.
    ///
    /// # Errors
    ///
    /// One of them can't be guarded.
    fn keep(&mut self, uplinks: &BTreeMap<u32, String>, anew: bool) -> Result<(), Self::Error>;

    /// The indices of the links that are guarded, or were before they went.
    fn guarded(&self) -> BTreeSet<u32>;

    /// Lets connects be steered to the ingress: to IPv4, to IPv6. Otherwise they are refused.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    fn admit(&mut self, families: [bool; 2]) -> Result<(), Self::Error>;

    /// Ends the guards of links that are no uplinks.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    fn tidy(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), Self::Error>;
}

/// What is wanted of the network.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The names of the uplinks; empty to find them.
    pub uplinks: Vec<String>,
    /// The ranges to make local.
    pub prefixes: Vec<Prefix>,
    /// The routing protocol that marks our routes.
    pub protocol: u8,
    /// The file that says which routes are ours, for the process that comes after.
    pub record: PathBuf,
}

/// How it is, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The uplinks, each guarded.
    pub uplinks: Vec<String>,
    /// The routes that are there, in words.
    pub routes: Vec<String>,
    /// What is wrong.
    pub problem: Option<String>,
}

/// Guards the uplinks and keeps the routes, as the network of the node is at any time.
pub struct Net<K> {
    settings: Settings,
    keeper: K,
    kernel: Kernel,
    network: watch::Receiver<Network>,
    view: watch::Sender<View>,
    /// The indices of links that are uplinks, or were.
    known: BTreeSet<u32>,
    /// The indices of the links that steered connects come by.
    inside: watch::Sender<Arc<BTreeSet<u32>>>,
}

impl<K: Keeper> Net<K> {
    /// Opens a netlink socket. Nothing is changed. `network` is followed with its routes; how it is
    /// goes to the view.
    ///
    /// # Errors
    ///
    /// The kernel gives no netlink socket.
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

    /// The indices of the links that steered connects come by.
    #[must_use]
    pub fn inside(&self) -> watch::Receiver<Arc<BTreeSet<u32>>> {
        self.inside.subscribe()
    }

    /// Looks at the network, guards what is an uplink (`anew`: also what was guarded before), then
    /// makes the prefixes local. Says whether all went well; what did not is in the view.
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

    /// Says what went wrong.
    async fn arrange(&mut self, view: &mut View, anew: bool) -> Vec<String> {
        let Network { snapshot, problem } = self.network.borrow_and_update().clone();
        if let Some(problem) = problem {
            return vec![problem];
        }
        // Nothing is taken for inside that ever was an uplink, whatever became of its routes.
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
        // The ingress takes only what comes by these, also where the guard can't be put.
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
        // The guard is there before the routes are.
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
        // While an uplink is missing, a guard that seems to be of no use may be its.
        if may_route && let Err(error) = self.keeper.tidy(&found.uplinks) {
            problems.push(chain(&error));
        }
        problems
    }

    /// Takes away what an earlier process left: routes, then guards.
    ///
    /// # Errors
    ///
    /// The kernel refused.
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
