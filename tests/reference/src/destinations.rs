//! The addresses and ports at which a Service port is served (contract §2, §5 and §6a).

use std::{collections::BTreeSet, net::IpAddr};

use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service, ServicePort};

use super::{
    AddressKind, Cluster, ExternalIps, LocalNode, NodePortEntry, OwnAddresses,
    address::{Cidr, Family, is_servable, parse},
    node, objects,
};

/// An address and port at which a Service port is served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Destination {
    pub(super) kind: AddressKind,
    pub(super) address: IpAddr,
    pub(super) port: u16,
}

/// Returns all addresses and ports in one address family at which a Service port is served.
pub(super) fn destinations(
    cluster: &Cluster,
    here: &LocalNode,
    (service, port): (&Service, &ServicePort),
    family: Family,
) -> Vec<Destination> {
    let mut found = Vec::new();
    let mut add = |kind, addresses: BTreeSet<IpAddr>, number: i32| {
        if let Some(port) = objects::port_number(number) {
            found.extend(addresses.into_iter().map(|address| Destination {
                kind,
                address,
                port,
            }));
        }
    };
    let cluster_ip = objects::cluster_ip(service, family).into_iter().collect();
    add(AddressKind::ClusterIp, cluster_ip, port.port);
    let is_taken =
        |ip: &IpAddr| here.own_addresses == OwnAddresses::Refuse && here.addresses.contains(ip);
    // Only privileged users can write a Service's status, and load balancers may assign an address to the node.
    let in_node = node::own(cluster, here).map(|own| {
        let addresses = node::addresses(own);
        addresses
            .filter_map(|address| parse(&address.address))
            .collect::<BTreeSet<_>>()
    });
    let in_node = in_node.unwrap_or_default();
    let mut load_balancer = load_balancer_ips(service, family);
    load_balancer.retain(|ip| !is_taken(ip) || !in_node.is_empty() && !in_node.contains(ip));
    add(AddressKind::LoadBalancerIp, load_balancer, port.port);
    let mut external = external_ips(cluster, here, service, family);
    external.retain(|ip| !is_taken(ip));
    add(AddressKind::ExternalIp, external, port.port);
    // Contract §2, "NodePort": a nonzero node port is served whatever the Service's type.
    let node_ports = node_port_ips(cluster, here, family);
    add(
        AddressKind::NodePort,
        node_ports,
        port.node_port.unwrap_or(0),
    );
    found
}

/// Returns the external IPs that the node's settings permit (contract §2, "externalIPs").
fn external_ips(
    cluster: &Cluster,
    here: &LocalNode,
    service: &Service,
    family: Family,
) -> BTreeSet<IpAddr> {
    let spec = service.spec.as_ref();
    let texts = spec.and_then(|spec| spec.external_ips.as_deref());
    let parsed = texts.unwrap_or_default().iter().filter_map(|t| parse(t));
    let servable = parsed.filter(|address| is_servable(*address));
    let mut addresses: BTreeSet<IpAddr> = of_family(servable, family);
    if here.external_ips == ExternalIps::Owned {
        let owned = owned_addresses(cluster);
        addresses.retain(|address| owned.contains(address));
    }
    addresses
}

/// Returns the addresses that the cluster owns (see [`ExternalIps::Owned`]).
fn owned_addresses(cluster: &Cluster) -> BTreeSet<IpAddr> {
    let ingress = cluster.services.iter().flat_map(ingress);
    let of_services = ingress.filter_map(|ingress| parse(ingress.ip.as_deref()?));
    let addresses = cluster.nodes.iter().flat_map(node::addresses);
    let of_nodes = addresses.filter_map(|address| parse(&address.address));
    of_services.chain(of_nodes).collect()
}

/// Returns the load balancer addresses (contract §2, `status.loadBalancer.ingress[].ip`) whose IP mode is VIP
/// or absent. Host names and addresses with mode Proxy have no frontend.
pub(super) fn load_balancer_ips(service: &Service, family: Family) -> BTreeSet<IpAddr> {
    let is_vip = |it: &&LoadBalancerIngress| matches!(it.ip_mode.as_deref(), None | Some("VIP"));
    let vips = ingress(service).filter(is_vip);
    let parsed = vips.filter_map(|ingress| parse(ingress.ip.as_deref()?));
    of_family(parsed.filter(|address| is_servable(*address)), family)
}

fn ingress(service: &Service) -> impl Iterator<Item = &LoadBalancerIngress> {
    let status = service.status.as_ref();
    let load_balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingress = load_balancer.and_then(|it| it.ingress.as_ref());
    ingress.into_iter().flatten()
}

/// Returns the source ranges for a load balancer address (contract §6a, "applies to" and "parsing"). The list
/// is empty, which permits all clients, if no range of the family is valid or if one of them contains all
/// addresses (see `IsZeroCIDR` in kube-proxy's `pkg/proxy/serviceport.go`).
pub(super) fn source_ranges(service: &Service, kind: AddressKind, family: Family) -> Vec<Cidr> {
    if kind != AddressKind::LoadBalancerIp {
        return Vec::new();
    }
    let spec = service.spec.as_ref();
    let texts = spec.and_then(|spec| spec.load_balancer_source_ranges.as_deref());
    let parsed = texts.unwrap_or_default().iter();
    let parsed = parsed.filter_map(|text| Cidr::parse(text));
    let ranges: Vec<Cidr> = parsed.filter(|range| range.family() == family).collect();
    if ranges.iter().any(|range| range.is_all()) {
        return Vec::new();
    }
    ranges
}

/// Returns the node's own addresses that `nodePortAddresses` selects (contract §5).
fn node_port_ips(cluster: &Cluster, here: &LocalNode, family: Family) -> BTreeSet<IpAddr> {
    let ranges = node_port_ranges(cluster, here, family);
    let own = here.addresses.iter().copied();
    let selected = own.filter(|address| ranges.iter().any(|range| range.contains(*address)));
    of_family(selected, family)
}

/// Returns the ranges that `nodePortAddresses` selects in an address family. If the setting is absent, it
/// means `[primary, localhost]`; if it is empty, it means `[all]`.
fn node_port_ranges(cluster: &Cluster, here: &LocalNode, family: Family) -> Vec<Cidr> {
    let entries = match here.node_port_addresses.as_deref() {
        None => &[NodePortEntry::Primary, NodePortEntry::Localhost],
        Some([]) => &[NodePortEntry::All][..],
        Some(entries) => entries,
    };
    let ranges = entries.iter();
    let ranges = ranges.filter_map(|entry| range_of(*entry, cluster, here, family));
    let mut ranges: Vec<_> = ranges.collect();
    // Contract §5, "a family without CIDR": all of that family's local addresses are selected. This includes
    // a family in which no entry selects anything, such as `primary` on a node without an address of that
    // family (see NewNodePortAddresses in kube-proxy's `pkg/proxy/util/nodeport_addresses.go`, which receives
    // the primary addresses as CIDRs).
    if ranges.is_empty() {
        ranges.push(Cidr::all_of(family));
    }
    ranges
}

fn range_of(
    entry: NodePortEntry,
    cluster: &Cluster,
    here: &LocalNode,
    family: Family,
) -> Option<Cidr> {
    match entry {
        NodePortEntry::Cidr(range) => Some(range).filter(|range| range.family() == family),
        NodePortEntry::Primary => node::primary(cluster, here, family).map(Cidr::single),
        NodePortEntry::Localhost => match family {
            Family::Ipv4 => Cidr::parse("127.0.0.0/8"),
            Family::Ipv6 => Cidr::parse("::1/128"),
        },
        NodePortEntry::All => Some(Cidr::all_of(family)),
    }
}

fn of_family(addresses: impl Iterator<Item = IpAddr>, family: Family) -> BTreeSet<IpAddr> {
    addresses
        .filter(|address| Family::of(*address) == family)
        .collect()
}
