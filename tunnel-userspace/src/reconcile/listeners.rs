//! Cluster IPs that this node has on a link, and at which of their fronts something listens itself: a
//! cache that takes the place of a Service on its node, as `NodeLocal` DNSCache does. Sockets are left
//! alone there, so that they reach it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use litemap::LiteMap;
use tokio::time::Instant;
use tracing::{info, warn};
use tunnel_common::service::FrontKey;

use super::Reconciler;
use crate::{
    model::ObjectName,
    plan::{FrontKind, FrontPlan, ServicePlan},
};

/// Says at which of some fronts something of this node listens.
pub type Found =
    Box<dyn FnMut(&BTreeSet<FrontKey>) -> Result<BTreeSet<FrontKey>, LookError> + Send>;

/// It can't be looked whether something listens.
#[derive(Debug, thiserror::Error)]
#[error("cannot look for listeners")]
pub struct LookError {
    /// Whether the same may succeed a moment later.
    pub is_retryable: bool,
    /// Why it can't.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The fronts of this node's own addresses.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    /// The addresses of this node's links.
    addresses: BTreeSet<IpAddr>,
    /// The fronts there, of each Service that has some.
    local: BTreeMap<ObjectName, BTreeSet<FrontKey>>,
    /// Whether they are others than at the last look.
    is_new: bool,
    /// Those where something listens.
    found: BTreeSet<FrontKey>,
}

impl Listeners {
    /// Takes the plan of a Service as it is now. Only cluster IPs give way to a listener: node ports
    /// are this node's addresses by their nature, and kube-proxy serves the others wherever they are.
    pub(super) fn put(&mut self, name: &ObjectName, plan: Option<&ServicePlan>) {
        let ports = plan.into_iter().flat_map(LiteMap::values);
        let fronts = ports.flat_map(|port| &port.fronts);
        let is_local = |(key, front): &(&FrontKey, &FrontPlan)| {
            front.kind == FrontKind::ClusterIp && self.addresses.contains(&key.address.to_ip())
        };
        let new: BTreeSet<_> = fronts.filter(is_local).map(|(key, _)| *key).collect();
        let old = if new.is_empty() {
            self.local.remove(name)
        } else {
            self.local.insert(name.clone(), new.clone())
        };
        self.is_new |= old.unwrap_or_default() != new;
    }

    /// Takes the addresses of the links as they are now; whether that is new.
    pub(super) fn set_addresses(&mut self, addresses: &BTreeSet<IpAddr>) -> bool {
        let is_new = self.addresses != *addresses;
        if is_new {
            self.addresses.clone_from(addresses);
        }
        is_new
    }

    /// A front with what is known of listeners there.
    pub(super) fn noted(&self, key: &FrontKey, front: FrontPlan) -> FrontPlan {
        FrontPlan {
            has_listener: self.has(key),
            ..front
        }
    }

    /// Whether something listens at a front.
    pub(super) fn has(&self, key: &FrontKey) -> bool {
        self.found.contains(key)
    }

    /// Every front of this node's own addresses.
    fn local(&self) -> BTreeSet<FrontKey> {
        self.local.values().flatten().copied().collect()
    }
}

impl<M> Reconciler<M> {
    /// Takes at which fronts of this node's own addresses something listens now; others are none.
    /// Nothing is written.
    pub fn set_listeners(&mut self, found: BTreeSet<FrontKey>) {
        let local = self.listeners.local();
        let found: BTreeSet<_> = found.intersection(&local).copied().collect();
        for front in found.symmetric_difference(&self.listeners.found) {
            let owner = self.claims.owner(front);
            let service = owner.map(ToString::to_string).unwrap_or_default();
            if found.contains(front) {
                info!(%front, service, "this node listens there itself: sockets are left alone");
            } else {
                info!(%front, service, "this node listens there no more: sockets are led to backends");
            }
            self.dirty.extend(owner.map(|owner| owner.service.clone()));
        }
        self.listeners.found = found;
    }
}

/// When and how it is looked for listeners.
pub(super) struct Looks {
    find: Found,
    every: Duration,
    /// When the next look is due; never where this node has no address of a Service.
    at: Option<Instant>,
    is_failing: bool,
}

impl fmt::Debug for Looks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Looks")
            .field("every", &self.every)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl Looks {
    pub(super) const fn new(find: Found, every: Duration) -> Self {
        Self {
            find,
            every,
            at: None,
            is_failing: false,
        }
    }

    /// When the next look is due, if one is.
    pub(super) const fn at(&self) -> Option<Instant> {
        self.at
    }

    /// Looks if the fronts of this node's own addresses are others than at the last look, or if the
    /// time has come.
    pub(super) fn look<M>(&mut self, reconciler: &mut Reconciler<M>) {
        let is_new = std::mem::take(&mut reconciler.listeners.is_new);
        let is_due = self.at.is_some_and(|at| at <= Instant::now());
        if !is_new && !is_due {
            return;
        }
        let local = reconciler.listeners.local();
        let next = Some(Instant::now() + self.every);
        self.at = next.filter(|_| !local.is_empty());
        if local.is_empty() {
            reconciler.set_listeners(BTreeSet::new());
            return;
        }
        match (self.find)(&local) {
            Ok(found) => {
                self.is_failing = false;
                reconciler.set_listeners(found);
            }
            Err(error) => {
                // Without a chance it is tried again when something is new.
                self.at = self.at.filter(|_| error.is_retryable);
                if !std::mem::replace(&mut self.is_failing, true) {
                    let error = &error as &dyn std::error::Error;
                    warn!(
                        error,
                        "what is known of listeners on addresses of Services stays"
                    );
                }
                reconciler.set_listeners(reconciler.listeners.found.clone());
            }
        }
    }
}
