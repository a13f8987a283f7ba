//! Whose an address is, and so which external IPs are served (CVE-2020-8554).

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use crate::model::{ExternalIps, Node, ObjectName, Service, ServiceState};

/// Who has addresses, and which Services want them as external IPs. What a change costs is what it
/// changes. Nothing is kept where every external IP is served.
#[derive(Debug, Default)]
pub struct Owners {
    rule: ExternalIps,
    /// The addresses of each owner that has any.
    owned: HashMap<Owner, BTreeSet<IpAddr>>,
    /// How many owners an address has; never 0.
    counts: HashMap<IpAddr, usize>,
    /// The external IPs of each Service that has any.
    wanted: HashMap<ObjectName, BTreeSet<IpAddr>>,
    /// The Services that have an address as external IP; never empty.
    wanting: HashMap<IpAddr, BTreeSet<ObjectName>>,
    /// Addresses that got their first owner or lost their last one since the last look.
    moved: BTreeSet<IpAddr>,
}

/// Who has an address.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Owner {
    /// A Service, by its load balancer.
    Service(ObjectName),
    /// A Node.
    Node(ObjectName),
}

impl Owners {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(rule: ExternalIps) -> Self {
        Self {
            rule,
            ..Self::default()
        }
    }

    /// Takes a Node as it is now: all its addresses are owned.
    pub fn set_node(&mut self, name: &ObjectName, node: Option<&Node>) {
        if !self.is_asked() {
            return;
        }
        let addresses = node.into_iter();
        let addresses = addresses.flat_map(|node| node.internal_ips.iter().chain(&node.other_ips));
        self.set_owned(Owner::Node(name.clone()), addresses.copied().collect());
    }

    /// Takes a Service as it is now: the addresses of its load balancer are owned, also those that
    /// nodes leave alone, and its external IPs are what is asked about.
    pub fn set_service(&mut self, name: &ObjectName, service: Option<&Service>) {
        if !self.is_asked() {
            return;
        }
        let addresses = service.into_iter();
        let addresses = addresses.flat_map(Service::ingress_ips);
        self.set_owned(Owner::Service(name.clone()), addresses.collect());
        let wanted = service.into_iter();
        let wanted = wanted.flat_map(|service| service.external_ips.iter().copied());
        self.set_wanted(name, wanted.collect());
    }

    /// The Services whose external IPs are served since the last look, or no longer.
    pub fn take_moved(&mut self) -> BTreeSet<ObjectName> {
        let moved = std::mem::take(&mut self.moved).into_iter();
        let wanting = moved.filter_map(|address| self.wanting.get(&address));
        wanting.flatten().cloned().collect()
    }

    /// The external IPs of a Service that are not served.
    pub fn left_out<'a>(&'a self, service: &'a Service) -> impl Iterator<Item = IpAddr> + 'a {
        let addresses = service.external_ips.iter().copied();
        addresses.filter(|address| !self.is_served(address))
    }

    /// A Service with those of its external IPs that are served.
    #[must_use]
    pub fn admitted<'a>(&self, state: &'a ServiceState) -> Cow<'a, ServiceState> {
        if self.left_out(&state.service).next().is_none() {
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
        !self.is_asked() || self.counts.contains_key(external_ip)
    }

    /// Whether it matters whose an address is.
    #[must_use]
    pub const fn is_asked(&self) -> bool {
        match self.rule {
            ExternalIps::Any => false,
            ExternalIps::Owned => true,
        }
    }

    fn set_owned(&mut self, owner: Owner, new: BTreeSet<IpAddr>) {
        let old = self.owned.remove(&owner).unwrap_or_default();
        for address in old.difference(&new) {
            if let Entry::Occupied(mut count) = self.counts.entry(*address) {
                if *count.get() > 1 {
                    *count.get_mut() -= 1;
                } else {
                    count.remove();
                    self.note_move(*address);
                }
            }
        }
        for address in new.difference(&old) {
            match self.counts.entry(*address) {
                Entry::Occupied(mut count) => *count.get_mut() += 1,
                Entry::Vacant(none) => {
                    none.insert(1);
                    self.note_move(*address);
                }
            }
        }
        if !new.is_empty() {
            self.owned.insert(owner, new);
        }
    }

    /// An address that moves back is as it was.
    fn note_move(&mut self, address: IpAddr) {
        if !self.moved.remove(&address) {
            self.moved.insert(address);
        }
    }

    fn set_wanted(&mut self, name: &ObjectName, new: BTreeSet<IpAddr>) {
        let old = self.wanted.remove(name).unwrap_or_default();
        for address in old.difference(&new) {
            if let Entry::Occupied(mut wanting) = self.wanting.entry(*address) {
                wanting.get_mut().remove(name);
                if wanting.get().is_empty() {
                    wanting.remove();
                }
            }
        }
        for address in new.difference(&old) {
            let wanting = self.wanting.entry(*address).or_default();
            wanting.insert(name.clone());
        }
        if !new.is_empty() {
            self.wanted.insert(name.clone(), new);
        }
    }
}

#[cfg(test)]
mod tests;
