//! Tracks the cluster IPs that are also assigned to one of this node's network interfaces, and the local
//! listeners on them. This is how a cache such as `NodeLocal` DNSCache takes the place of a Service on its
//! node: sockets that connect to such an address are not translated, so that they reach the listener. Only the
//! listeners of trusted users take the place of a Service, since any user on the host may listen on the
//! node's addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use litemap::LiteMap;
use tunnel_common::service::FrontendKey;

use crate::{
    model::ObjectName,
    plan::{FrontendKind, FrontendPlan, ServicePlan},
    reconcile::listener_poll::ListeningUsers,
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
    /// The frontends that have a local listener, of any user.
    pub(in crate::reconcile) found: ListeningUsers,
    /// The frontends that have local listeners of trusted users only, to which they yield.
    pub(in crate::reconcile) with_listener: BTreeSet<FrontendKey>,
    /// The frontends that have a listener of another user, each with the lowest id of such a user. These
    /// listeners are ignored.
    pub(in crate::reconcile) ignored: BTreeMap<FrontendKey, u32>,
    /// The ids of the trusted users.
    trusted_users: BTreeSet<u32>,
}

/// A change to the listeners on a frontend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ListenerChange {
    /// The frontend now yields to the listener of a trusted user.
    Found,
    /// The frontend no longer yields to a listener.
    Gone,
    /// The frontend has a listener of this user, who is not trusted.
    Ignored(u32),
    /// The frontend no longer has a listener of a user who is not trusted.
    IgnoredGone,
}

impl LocalListeners {
    /// Creates an instance with no frontends, in which the listeners of the given users are trusted.
    pub(super) fn new(trusted_users: BTreeSet<u32>) -> Self {
        Self {
            trusted_users,
            ..Self::default()
        }
    }

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

    /// Replaces the frontends that have a local listener. Ignores frontends whose address is not one of this
    /// node's. Returns the changes.
    pub(super) fn set_listeners(
        &mut self,
        mut found: ListeningUsers,
    ) -> Vec<(FrontendKey, ListenerChange)> {
        let local = self.frontends();
        found.retain(|frontend, _| local.contains(frontend));
        let is_trusted = |user: &u32| self.trusted_users.contains(user);
        // Beside the UDP socket of a trusted user that permits it (SO_REUSEADDR), another user's socket can bind the
        // same address, and then gets the datagrams. So one socket of another user is enough to ignore all.
        let trusted = found
            .iter()
            .filter(|(_, users)| users.iter().all(is_trusted));
        let trusted: BTreeSet<_> = trusted.map(|(frontend, _)| *frontend).collect();
        let ignored = found.iter().filter_map(|(frontend, users)| {
            let user = users.iter().find(|user| !is_trusted(user))?;
            Some((*frontend, *user))
        });
        let ignored: BTreeMap<_, _> = ignored.collect();
        let mut changes = Vec::new();
        for frontend in trusted.symmetric_difference(&self.with_listener) {
            let change = if trusted.contains(frontend) {
                ListenerChange::Found
            } else {
                ListenerChange::Gone
            };
            changes.push((*frontend, change));
        }
        let gone = self.ignored.keys().filter(|it| !ignored.contains_key(*it));
        changes.extend(gone.map(|frontend| (*frontend, ListenerChange::IgnoredGone)));
        let is_new =
            |(frontend, user): &(&FrontendKey, &u32)| self.ignored.get(*frontend) != Some(*user);
        let new = ignored.iter().filter(is_new);
        changes.extend(new.map(|(frontend, user)| (*frontend, ListenerChange::Ignored(*user))));
        self.found = found;
        self.with_listener = trusted;
        self.ignored = ignored;
        changes
    }
}
