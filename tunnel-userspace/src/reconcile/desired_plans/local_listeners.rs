//! Tracks the cluster IPs that are also assigned to one of this node's network interfaces, and the local
//! listeners on them. This is how a cache such as `NodeLocal` DNSCache takes the place of a Service on its
//! node: sockets that connect to such an address are not translated, so that they reach the listener.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use litemap::LiteMap;
use tunnel_common::service::FrontendKey;

use crate::{
    model::ObjectName,
    plan::{FrontendKind, FrontendPlan, ServicePlan},
};

/// The frontends on this node's addresses, and those among them that have a local listener.
#[derive(Debug, Default)]
pub(in crate::reconcile) struct LocalListeners {
    /// The addresses of this node's network interfaces.
    addresses: BTreeSet<IpAddr>,
    /// The frontends on these addresses, by Service.
    local_frontends: BTreeMap<ObjectName, BTreeSet<FrontendKey>>,
    /// True if the frontends on this node's addresses have changed since the last poll was started.
    pub(in crate::reconcile) has_changed: bool,
    /// The frontends that the last completed poll covered.
    pub(in crate::reconcile) polled: BTreeSet<FrontendKey>,
    /// The frontends that have a local listener.
    pub(in crate::reconcile) with_listener: BTreeSet<FrontendKey>,
}

impl LocalListeners {
    /// Applies a Service's new plan. Only cluster IPs yield to a listener: node ports always use this node's
    /// addresses, and kube-proxy serves the other kinds of address on every node.
    pub(super) fn update(&mut self, name: &ObjectName, plan: Option<&ServicePlan>) {
        let ports = plan.into_iter().flat_map(LiteMap::values);
        let frontends = ports.flat_map(|port| &port.frontends);
        let is_local = |(key, frontend): &(&FrontendKey, &FrontendPlan)| {
            frontend.kind == FrontendKind::ClusterIp
                && self.addresses.contains(&key.address.to_ip())
        };
        let new: BTreeSet<_> = frontends.filter(is_local).map(|(key, _)| *key).collect();
        let old = if new.is_empty() {
            self.local_frontends.remove(name)
        } else {
            self.local_frontends.insert(name.clone(), new.clone())
        };
        self.has_changed |= old.unwrap_or_default() != new;
    }

    /// Replaces the network interfaces' addresses. Returns true if they have changed.
    pub(super) fn set_addresses(&mut self, addresses: &BTreeSet<IpAddr>) -> bool {
        let old = std::mem::replace(&mut self.addresses, addresses.clone());
        old != *addresses
    }

    /// Returns all frontends on this node's addresses.
    pub(in crate::reconcile) fn frontends(&self) -> BTreeSet<FrontendKey> {
        self.local_frontends.values().flatten().copied().collect()
    }

    /// Returns true if a Service has frontends that no poll has covered yet.
    pub(in crate::reconcile) fn has_unpolled(&self, service: &ObjectName) -> bool {
        let local = self.local_frontends.get(service);
        local.is_some_and(|local| !local.is_subset(&self.polled))
    }

    /// Replaces the set of frontends that have a local listener. Ignores frontends whose address is not one
    /// of this node's. Returns the frontends that have gained a listener (true) or lost one (false).
    pub(super) fn set_listeners(
        &mut self,
        found: &BTreeSet<FrontendKey>,
    ) -> Vec<(FrontendKey, bool)> {
        let found: BTreeSet<_> = found.intersection(&self.frontends()).copied().collect();
        let changed = found.symmetric_difference(&self.with_listener);
        let changed = changed
            .map(|frontend| (*frontend, found.contains(frontend)))
            .collect();
        self.with_listener = found;
        changed
    }
}
