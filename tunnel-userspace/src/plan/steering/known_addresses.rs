//! The addresses that are known to belong to something other than an edge node.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use super::SteeringRules;
use crate::{
    model::{Kind, LinkNetwork, LinkNetworks, ObjectId, ObjectName, ServiceState},
    plan::address_index::AddressIndex,
};

/// The addresses of Services, of API servers and of this node, and the networks that this node's links lead to.
#[derive(Debug, Default)]
pub struct KnownAddresses {
    cluster_ips: AddressIndex,
    /// The Services' external IPs and load balancer addresses.
    published_ips: AddressIndex,
    /// The endpoints of the Service `default/kubernetes`.
    api_servers: BTreeSet<IpAddr>,
    own: Arc<BTreeSet<IpAddr>>,
    networks: Arc<LinkNetworks>,
}

impl KnownAddresses {
    /// Applies the new state of a Service. Returns the addresses that may have changed their owner.
    pub fn set_service(&mut self, name: &ObjectName, state: Option<&ServiceState>) -> Vec<IpAddr> {
        let id = ObjectId::new(Kind::Service, name.clone());
        let services = || state.iter().map(|state| &state.service);
        let cluster_ips = services().flat_map(|service| service.cluster_ips.iter());
        let mut changed = self
            .cluster_ips
            .set(&id, cluster_ips.map(IpAddr::to_canonical).collect());
        let external = services().flat_map(|service| service.external_ips.iter().copied());
        let ingress = services().flat_map(|service| service.ingress_ips());
        let published = external.chain(ingress).map(|ip| ip.to_canonical());
        changed.extend(self.published_ips.set(&id, published.collect()));
        if (&*name.namespace, &*name.name) == ("default", "kubernetes") {
            let slices = state.iter().flat_map(|state| &state.slices);
            let endpoints = slices.flat_map(|slice| &slice.endpoints);
            let new = endpoints.map(|endpoint| endpoint.address.to_canonical());
            let new: BTreeSet<_> = new.collect();
            changed.extend(self.api_servers.symmetric_difference(&new));
            self.api_servers = new;
        }
        changed
    }

    /// Replaces the addresses of this node. Returns the addresses that have changed.
    pub fn set_own(&mut self, own: Arc<BTreeSet<IpAddr>>) -> Vec<IpAddr> {
        let changed = self.own.symmetric_difference(&own).copied().collect();
        self.own = own;
        changed
    }

    /// Replaces the networks that this node has routes to. Returns the previous ones.
    pub fn set_networks(&mut self, networks: Arc<LinkNetworks>) -> Arc<LinkNetworks> {
        std::mem::replace(&mut self.networks, networks)
    }

    /// Describes to what an address belongs, if no edge node may have it.
    pub(super) fn owner_of(&self, address: IpAddr, rules: &SteeringRules) -> Option<String> {
        if self.own.contains(&address) {
            return Some("an address of this node".to_owned());
        }
        if let Some(service) = first_object(&self.cluster_ips, address) {
            return Some(format!("the cluster IP of Service {service}"));
        }
        if self.api_servers.contains(&address) || rules.api_servers.contains(&address) {
            return Some("the address of an API server".to_owned());
        }
        let network = self.pod_network(address, rules);
        network.filter(|it| it.is_single_address()).map(describe)
    }

    /// Describes the network of this node's pods that an address is in, if it is in one. An edge node that already holds
    /// the address keeps it, unless the network is this address alone: while routes appear one by one, a link may seem
    /// to lead to pods for a moment.
    pub(super) fn pod_network_of(&self, address: IpAddr, rules: &SteeringRules) -> Option<String> {
        self.pod_network(address, rules).map(describe)
    }

    fn pod_network(&self, address: IpAddr, rules: &SteeringRules) -> Option<&LinkNetwork> {
        // If the config lists the ranges of the nodes, these ranges decide.
        let network = self.networks.find(address);
        network.filter(|it| it.leads_to_pods && rules.node_ranges.is_none())
    }

    /// Describes why an address is unlikely to be an edge node's, if it is: a Service has it as an external IP or a
    /// load balancer address, it is a public address, or this node has a route to it. None of these refuses it: for
    /// example, k3s' ServiceLB writes the nodes' own addresses into `status.loadBalancer`.
    pub(super) fn doubt(&self, address: IpAddr) -> Option<String> {
        if let Some(service) = first_object(&self.published_ips, address) {
            return Some(format!(
                "an external IP or load balancer address of Service {service}"
            ));
        }
        if let Some(network) = self.networks.find(address) {
            let (range, length, link) = (network.address, network.length, &network.link);
            return Some(format!(
                "in {range}/{length}, which this node reaches over link {link}"
            ));
        }
        is_public(address).then(|| "a public address".to_owned())
    }
}

fn describe(network: &LinkNetwork) -> String {
    let (range, length, link) = (network.address, network.length, &network.link);
    format!("in {range}/{length}, a network of this node's pods (link {link})")
}

fn first_object(index: &AddressIndex, address: IpAddr) -> Option<&ObjectName> {
    index.objects(&address)?.first().map(|id| &id.name)
}

/// Returns true if an address is not reserved for private networks, carriers' networks, documentation or tests.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let is_in = |[a, b]: [u8; 2], length: u32| {
                let network = Ipv4Addr::new(a, b, 0, 0);
                v4.to_bits() >> (32 - length) == network.to_bits() >> (32 - length)
            };
            // RFC 6598 and RFC 2544.
            let is_shared = is_in([100, 64], 10) || is_in([198, 18], 15);
            !(v4.is_private() || v4.is_documentation() || is_shared)
        }
        IpAddr::V6(v6) => {
            let is_documentation = v6.segments()[..2]
                == Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0).segments()[..2];
            !(v6.is_unique_local() || is_documentation)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture::ip;

    #[test]
    fn private_shared_and_documentation_addresses_are_not_public() {
        for address in [
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.17",
            "100.127.0.1",
            "198.19.0.1",
            "203.0.113.7",
            "fd00::7",
            "2001:db8::7",
        ] {
            assert!(!is_public(ip(address)), "{address}");
        }
        for address in ["1.2.3.4", "100.128.0.1", "172.32.0.1", "2001:db9::7"] {
            assert!(is_public(ip(address)), "{address}");
        }
    }
}
