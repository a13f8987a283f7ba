//! Cluster IPs that this node has on a link, and at which of their fronts something listens itself: a
//! cache that takes the place of a Service on its node, as `NodeLocal` DNSCache does. Sockets are left
//! alone there, so that they reach it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use litemap::LiteMap;
use tunnel_common::service::FrontKey;

use crate::{
    model::ObjectName,
    plan::{FrontKind, FrontPlan, ServicePlan},
};

/// The fronts of this node's own addresses.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct LocalListeners {
    /// The addresses of this node's links.
    addresses: BTreeSet<IpAddr>,
    /// The fronts there, of each Service that has some.
    own_fronts: BTreeMap<ObjectName, BTreeSet<FrontKey>>,
    /// Whether they are others than at the last look.
    pub(in crate::reconcile) is_new: bool,
    /// Those of the last look that has ended.
    pub(in crate::reconcile) looked: BTreeSet<FrontKey>,
    /// Those where something listens.
    pub(in crate::reconcile) found: BTreeSet<FrontKey>,
}

impl LocalListeners {
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
            self.own_fronts.remove(name)
        } else {
            self.own_fronts.insert(name.clone(), new.clone())
        };
        self.is_new |= old.unwrap_or_default() != new;
    }

    /// Takes the addresses of the links as they are now; whether that is new.
    pub(super) fn set_addresses(&mut self, addresses: &BTreeSet<IpAddr>) -> bool {
        let old = std::mem::replace(&mut self.addresses, addresses.clone());
        old != *addresses
    }

    /// Every front of this node's own addresses.
    pub(in crate::reconcile) fn local(&self) -> BTreeSet<FrontKey> {
        self.own_fronts.values().flatten().copied().collect()
    }

    /// Whether a Service has fronts that no look was at yet.
    pub(in crate::reconcile) fn has_unknown(&self, service: &ObjectName) -> bool {
        let local = self.own_fronts.get(service);
        local.is_some_and(|local| !local.is_subset(&self.looked))
    }

    /// Takes where something listens; other addresses than this node's don't count. Gives the fronts of
    /// which that is new.
    pub(super) fn set_found(&mut self, found: &BTreeSet<FrontKey>) -> Vec<(FrontKey, bool)> {
        let found: BTreeSet<_> = found.intersection(&self.local()).copied().collect();
        let moved = found.symmetric_difference(&self.found);
        let moved = moved.map(|front| (*front, found.contains(front))).collect();
        self.found = found;
        moved
    }
}
