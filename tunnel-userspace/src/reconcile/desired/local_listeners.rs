//! Cluster IPs that are also addresses of this node's links, and local listeners on them. A cache such as
//! `NodeLocal` DNSCache replaces a Service on its node in this way: sockets are not translated there, so
//! that they reach the listener.

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

/// The frontends on addresses of this node, and those with a local listener.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct LocalListeners {
    /// The addresses of this node's links.
    addresses: BTreeSet<IpAddr>,
    /// The frontends on these addresses, by Service.
    own_fronts: BTreeMap<ObjectName, BTreeSet<FrontKey>>,
    /// True if these frontends changed since the last poll was started.
    pub(in crate::reconcile) is_new: bool,
    /// The frontends that the last completed poll covered.
    pub(in crate::reconcile) looked: BTreeSet<FrontKey>,
    /// The frontends with a listener.
    pub(in crate::reconcile) found: BTreeSet<FrontKey>,
}

impl LocalListeners {
    /// Applies the new plan of a Service. Only cluster IPs yield to a listener: node ports always use
    /// addresses of this node, and kube-proxy serves the other kinds on any node.
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

    /// Replaces the addresses of the links; returns true if they changed.
    pub(super) fn set_addresses(&mut self, addresses: &BTreeSet<IpAddr>) -> bool {
        let old = std::mem::replace(&mut self.addresses, addresses.clone());
        old != *addresses
    }

    /// Returns all frontends on addresses of this node.
    pub(in crate::reconcile) fn local(&self) -> BTreeSet<FrontKey> {
        self.own_fronts.values().flatten().copied().collect()
    }

    /// Returns true if a Service has frontends that no poll has covered yet.
    pub(in crate::reconcile) fn has_unknown(&self, service: &ObjectName) -> bool {
        let local = self.own_fronts.get(service);
        local.is_some_and(|local| !local.is_subset(&self.looked))
    }

    /// Replaces the frontends with a listener; those on addresses of other nodes are ignored. Returns the
    /// frontends that changed, each with true if it has a listener now.
    pub(super) fn set_found(&mut self, found: &BTreeSet<FrontKey>) -> Vec<(FrontKey, bool)> {
        let found: BTreeSet<_> = found.intersection(&self.local()).copied().collect();
        let moved = found.symmetric_difference(&self.found);
        let moved = moved.map(|front| (*front, found.contains(front))).collect();
        self.found = found;
        moved
    }
}
