//! The owners of external IPs. With `service.externalIPs: owned`, an external IP is served only if a Node or
//! a load balancer owns it, so that a Service can't take over another host's address (CVE-2020-8554).

use std::{borrow::Cow, collections::BTreeSet, net::IpAddr, sync::Arc};

use super::address_index::AddressIndex;
use crate::model::{ExternalIps, Kind, Node, ObjectId, ObjectName, Service, ServiceState};

/// The owners of addresses, and the Services that have them as external IPs. Empty if the config permits any
/// external IP.
#[derive(Debug, Default)]
pub struct ExternalIpOwners {
    rule: ExternalIps,
    /// The addresses of Nodes and of Services' load balancers.
    owned: AddressIndex,
    /// The external IPs of Services.
    external_ips: AddressIndex,
    /// Addresses that have gained their first owner or lost their last one since the last call to
    /// [`Self::take_changed_services`].
    changed: BTreeSet<IpAddr>,
}

impl ExternalIpOwners {
    /// Creates an instance with no Nodes or Services.
    #[must_use]
    pub fn new(rule: ExternalIps) -> Self {
        Self {
            rule,
            ..Self::default()
        }
    }

    /// Applies the new state of a Node, which owns all its addresses.
    pub fn set_node(&mut self, name: &ObjectName, node: Option<&Node>) {
        if !self.is_enabled() {
            return;
        }
        let addresses = node.into_iter();
        let addresses = addresses.flat_map(|node| node.internal_ips.iter().chain(&node.other_ips));
        let id = ObjectId::new(Kind::Node, name.clone());
        self.set_owned(&id, addresses.copied().collect());
    }

    /// Applies the new state of a Service, which owns its load balancer's addresses, including those that
    /// nodes don't translate.
    pub fn set_service(&mut self, name: &ObjectName, service: Option<&Service>) {
        if !self.is_enabled() {
            return;
        }
        let addresses = service.into_iter();
        let addresses = addresses.flat_map(Service::ingress_ips);
        let id = ObjectId::new(Kind::Service, name.clone());
        self.set_owned(&id, addresses.collect());
        let wanted = service.into_iter();
        let wanted = wanted.flat_map(|service| service.external_ips.iter().copied());
        self.external_ips.set(&id, wanted.collect());
    }

    /// Returns the Services with an external IP that has started or stopped being served since the last call.
    pub fn take_changed_services(&mut self) -> BTreeSet<ObjectName> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        let affected = changed.filter_map(|address| self.external_ips.objects(&address));
        affected.flatten().map(|id| id.name.clone()).collect()
    }

    /// Returns a Service's external IPs that are not served because they have no owner.
    pub fn unowned_ips<'a>(&'a self, service: &'a Service) -> impl Iterator<Item = IpAddr> + 'a {
        let addresses = service.external_ips.iter().copied();
        addresses.filter(|address| !self.is_served(address))
    }

    /// Returns a Service without those external IPs that have no owner.
    #[must_use]
    pub fn without_unowned_ips<'a>(&self, state: &'a ServiceState) -> Cow<'a, ServiceState> {
        if self.unowned_ips(&state.service).next().is_none() {
            return Cow::Borrowed(state);
        }
        let mut service = Service::clone(&state.service);
        service
            .external_ips
            .retain(|address| self.is_served(address));
        Cow::Owned(ServiceState {
            service: Arc::new(service),
            slices: state.slices.clone(),
        })
    }

    fn is_served(&self, external_ip: &IpAddr) -> bool {
        !self.is_enabled() || self.owned.objects(external_ip).is_some()
    }

    /// Returns true if the config requires external IPs to have an owner.
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        matches!(self.rule, ExternalIps::Owned)
    }

    fn set_owned(&mut self, owner: &ObjectId, addresses: BTreeSet<IpAddr>) {
        for address in self.owned.set(owner, addresses) {
            // If the address had changed before, it has now changed back.
            if !self.changed.remove(&address) {
                self.changed.insert(address);
            }
        }
    }
}

#[cfg(test)]
mod tests;
