//! The links, addresses and routes of this node: which links lead to the world, the guard on them,
//! and the routes that make the steering prefixes local.
//!
//! - `uplinks`: which links lead to the world (pure)
//! - `netlink`: what the kernel has, and the routes we write

mod netlink;
mod uplinks;

use std::{
    collections::{BTreeMap, BTreeSet},
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

use self::netlink::{Kernel, Netlink, Scene};
pub use self::netlink::{NetError, remove_routes};
use crate::drain;

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

    /// Whether there is a guard anywhere.
    fn is_anywhere(&self) -> bool;

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

/// Follows the network, guards the uplinks and keeps the routes.
pub struct Net<K> {
    settings: Settings,
    keeper: K,
    netlink: Netlink,
    view: watch::Sender<View>,
    /// The indices of the uplinks.
    uplinks: watch::Sender<Arc<BTreeSet<u32>>>,
}

impl<K: Keeper> Net<K> {
    /// Opens the way to the kernel. Nothing is changed. How it is goes to the view.
    ///
    /// # Errors
    ///
    /// The kernel gives no netlink socket.
    pub fn open(
        settings: Settings,
        keeper: K,
        view: watch::Sender<View>,
    ) -> Result<Self, NetError> {
        Ok(Self {
            settings,
            keeper,
            netlink: Netlink::open()?,
            view,
            uplinks: watch::Sender::default(),
        })
    }

    /// The indices of the uplinks.
    #[must_use]
    pub fn uplinks(&self) -> watch::Receiver<Arc<BTreeSet<u32>>> {
        self.uplinks.subscribe()
    }

    /// Looks at the network, guards what is an uplink (`anew`: also what was guarded before), then
    /// makes the prefixes local. Says whether all went well; what did not is in the view.
    pub async fn look(&mut self, anew: bool) -> bool {
        let mut view = View::default();
        let result = self.arrange(&mut view, anew).await;
        view.problem = result.err();
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

    async fn arrange(&mut self, view: &mut View, anew: bool) -> Result<(), String> {
        let scene = self.netlink.kernel.scene().await.map_err(in_words)?;
        let uplinks = uplinks::find(&scene.links, &scene.gateways, &self.settings.uplinks);
        let indices: BTreeSet<u32> = uplinks.keys().copied().collect();
        // The ingress refuses what comes by them, also where the guard can't be put.
        self.uplinks.send_if_modified(|old| {
            let is_new = **old != indices;
            if is_new {
                *old = Arc::new(indices);
            }
            is_new
        });
        // The guard is there before the routes are.
        self.keeper.keep(&uplinks, anew).map_err(in_words)?;
        view.uplinks = uplinks.values().cloned().collect();
        keep_routes(&self.settings, &self.netlink.kernel, &scene, view).await?;
        self.keeper.tidy(&uplinks).map_err(in_words)?;
        missing(&self.settings.uplinks, &scene)
    }

    /// Takes away what an earlier process left: routes, then guards.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    pub async fn clear(mut keeper: K, protocol: u8) -> Result<(), String> {
        if keeper.is_anywhere() {
            let routes = remove_routes(protocol).await.map_err(in_words)?;
            keeper.tidy(&BTreeMap::new()).map_err(in_words)?;
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
                told = self.netlink.changed() => {
                    if !told {
                        warn!("the kernel tells no more of the network; it is asked every {} s", ANYWAY.as_secs());
                        self.reopen();
                    }
                    next = next.min(Instant::now() + GATHER);
                }
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

    fn reopen(&mut self) {
        match Netlink::open() {
            Ok(netlink) => self.netlink = netlink,
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "cannot follow the network"
            ),
        }
    }
}

/// Makes the prefixes local, and removes routes of ours that are not wanted.
async fn keep_routes(
    settings: &Settings,
    kernel: &Kernel,
    scene: &Scene,
    view: &mut View,
) -> Result<(), String> {
    let protocol = settings.protocol;
    let wanted: Vec<_> = settings
        .prefixes
        .iter()
        .filter_map(|prefix| scene.route_for(*prefix, protocol))
        .collect();
    for route in &wanted {
        if let Some(other) = scene.foreign(route) {
            return Err(format!(
                "{} is already routed by another (protocol {other}); give tunnel.steering \
                     another prefix",
                route.destination()
            ));
        }
        if !scene.has(route) {
            kernel.add(route).await.map_err(in_words)?;
        }
        view.routes.push(route.to_string());
    }
    for stale in scene.stale(&wanted, protocol) {
        kernel.remove(stale).await.map_err(in_words)?;
    }
    if wanted.is_empty() {
        return Err("no address of this node is known to answer from".to_owned());
    }
    Ok(())
}

/// Names of the config that no link has.
fn missing(names: &[String], scene: &Scene) -> Result<(), String> {
    let is_there = |name: &String| scene.links.iter().any(|link| link.name == *name);
    match names.iter().find(|name| !is_there(name)) {
        Some(name) => Err(format!(
            "service.uplinks names {name}, and there is no such link"
        )),
        None => Ok(()),
    }
}

/// An error with its causes, in a line.
fn in_words(error: impl std::error::Error) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        words = format!("{words}: {cause}");
        source = cause.source();
    }
    words
}
