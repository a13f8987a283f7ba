//! The links, addresses and routes of this node at one point in time, parsed from netlink messages. This
//! module does no I/O.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "few of the kernel's attributes matter here"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use rtnetlink::packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};
use tunnel_common::{addr::Address, steering::Prefix};

use super::{
    link_header::LinkHeader,
    packets::AddressPair,
    steering_route::{Route, TABLE_LOCAL},
    uplinks::{Link, LinkKind, Subnet},
};
use crate::model::{LinkNetwork, LinkNetworks};

/// The links, addresses and routes of this node at one point in time.
pub(super) struct Snapshot {
    /// All of this node's addresses, except link-local IPv6 addresses.
    pub(super) own_addresses: Arc<BTreeSet<IpAddr>>,
    pub(super) links: Vec<Link>,
    /// The indices of the links that are ports of a bridge or bond, or in a VRF.
    ports: BTreeSet<u32>,
    /// The indices of the links that are used by routes via a gateway.
    pub(super) gateways: BTreeSet<u32>,
    /// The headers of the packets of links, by their indices, where they are not Ethernet headers.
    link_headers: BTreeMap<u32, LinkHeader>,
    loopback: u32,
    /// The possible source addresses of packets.
    source_addresses: Vec<SourceAddress>,
    routes: Vec<RouteMessage>,
}

/// An address of this node that can be the source of packets.
#[derive(Clone, Copy)]
struct SourceAddress {
    ip: IpAddr,
    /// The index of its link.
    link: u32,
    /// True if the kernel prefers all other addresses.
    is_last_resort: bool,
}

impl SourceAddress {
    /// Returns the address unless the kernel uses it as no source: its scope is limited, or IPv6 has not found out yet that no
    /// other host has it, or that another has (`__ipv6_dev_get_saddr` in the kernel's net/ipv6/addrconf.c).
    fn of(message: &AddressMessage) -> Option<Self> {
        let ip = address_of(message)?;
        let header = &message.header;
        let has = |flag| header.flags.contains(flag);
        let is_optimistic = has(AddressHeaderFlags::Optimistic);
        let is_unusable = header.scope != AddressScope::Universe
            || ip.is_loopback()
            || has(AddressHeaderFlags::Tentative) && !is_optimistic
            || has(AddressHeaderFlags::Dadfailed);
        (!is_unusable).then_some(Self {
            ip,
            link: header.index,
            is_last_resort: has(AddressHeaderFlags::Deprecated) || is_optimistic,
        })
    }
}

impl Snapshot {
    pub(super) fn of(
        links: &[LinkMessage],
        addresses: &[AddressMessage],
        routes: Vec<RouteMessage>,
    ) -> Self {
        let links_of_node = links_of(links, addresses, &routes);
        let ports = links_of_node.iter().filter(|link| link.bridge.is_some());
        let is_loopback = |link: &&LinkMessage| link.header.flags.contains(LinkFlags::Loopback);
        let loopback = links.iter().find(is_loopback);
        let link_headers = links.iter().map(|link| {
            let header = LinkHeader::of(link.header.link_layer_type);
            (link.header.index, header)
        });
        let is_link_local =
            |ip: &IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let own = addresses.iter().filter_map(address_of);
        Self {
            own_addresses: Arc::new(own.filter(|ip| !is_link_local(ip)).collect()),
            ports: ports.map(|link| link.index).collect(),
            links: links_of_node,
            gateways: routes.iter().flat_map(gateway_links).collect(),
            link_headers: link_headers
                .filter(|(_, header)| *header != LinkHeader::Ethernet)
                .collect(),
            loopback: loopback.map_or(1, |link| link.header.index),
            source_addresses: addresses.iter().filter_map(SourceAddress::of).collect(),
            routes,
        }
    }

    /// Returns the route that makes a prefix local. Its source address is one of this node's addresses,
    /// preferably one on the default route's link. Returns `None` if the node has no address in the prefix's
    /// family, since no connections can then arrive. For IPv6, `::1` is enough.
    pub(super) fn route_for(&self, prefix: Prefix, protocol: u8) -> Option<Route> {
        let default = default_link(&self.routes, prefix.is_v4());
        let has_v6 = self.own_addresses.contains(&Ipv6Addr::LOCALHOST.into());
        let mut candidates = self
            .source_addresses
            .iter()
            .filter(|source| source.ip.is_ipv4() == prefix.is_v4());
        let on_default = candidates.clone().find(|it| Some(it.link) == default);
        let source = on_default
            .or_else(|| candidates.next())
            .map(|source| source.ip);
        let is_possible = source.is_some() || !prefix.is_v4() && has_v6;
        is_possible.then_some(Route {
            prefix,
            source,
            protocol,
            loopback: self.loopback,
        })
    }

    /// Returns true if a link is a port of a bridge or bond, or in a VRF.
    pub(super) fn has_master(&self, index: u32) -> bool {
        self.ports.contains(&index)
    }

    /// Returns the header of the packets of a link.
    pub(super) fn link_header(&self, index: u32) -> LinkHeader {
        let header = self.link_headers.get(&index);
        header.copied().unwrap_or(LinkHeader::Ethernet)
    }

    /// Returns the index of the default route's link, in the table `main`.
    pub(super) fn default_link(&self, is_v4: bool) -> Option<u32> {
        default_link(&self.routes, is_v4)
    }

    /// Returns the addresses that stand for clients on each of the given links: the preferred ones, else those of the link,
    /// else those of the default route's link, else any of this node. As in the kernel, a deprecated address comes after all
    /// others.
    pub(super) fn client_addresses(
        &self,
        links: impl Iterator<Item = u32>,
        preferred: &[IpAddr],
    ) -> BTreeMap<u32, AddressPair> {
        let of_links = by_link(&self.source_addresses, |source| Some(source.link));
        // The address of each family for links that have no better one.
        let of_node = [true, false].map(|is_v4| {
            let default = self.default_link(is_v4);
            let sources = self.source_addresses.iter();
            sources
                .filter(|source| source.ip.is_ipv4() == is_v4)
                .min_by_key(|source| (source.is_last_resort, Some(source.link) != default))
        });
        let pair_of = |link: u32| {
            let own = of_links.get(&link).into_iter().flatten().copied();
            let mut candidates = Vec::from_iter(own.chain(of_node.into_iter().flatten()));
            // The sort is stable, so addresses of the link stay before those of the node.
            candidates.sort_by_key(|source| source.is_last_resort);
            let mut pair = AddressPair::default();
            preferred.iter().for_each(|ip| pair.add(*ip));
            candidates.iter().for_each(|source| pair.add(source.ip));
            (link, pair)
        };
        links.map(pair_of).collect()
    }

    /// Returns the networks that this node has unicast routes to, except default routes. `pod_links` contains the
    /// indices of the links that lead to this node's pods.
    pub(super) fn networks(&self, pod_links: &BTreeSet<u32>) -> LinkNetworks {
        let names = self.links.iter().map(|link| (link.index, &*link.name));
        let names: BTreeMap<u32, &str> = names.collect();
        let mut networks = LinkNetworks::default();
        for route in &self.routes {
            let length = route.header.destination_prefix_length;
            let links = output_link(route).filter(|_| route.header.kind == RouteType::Unicast);
            let (Some(address), Some(index)) = (destination_of(route), links) else {
                continue;
            };
            networks.insert(LinkNetwork {
                address: address.to_ip(),
                length,
                link: names.get(&index).copied().unwrap_or_default().to_owned(),
                leads_to_pods: pod_links.contains(&index),
            });
        }
        networks
    }

    /// Returns true if this route already exists, with the same source address.
    pub(super) fn contains(&self, route: &Route) -> bool {
        let mut routes = self.local_routes(route.prefix, route.protocol);
        routes.any(|found| route.has_source_of(found))
    }

    /// Returns a description of the conflict with a route, if there is one: one of this node's addresses is
    /// in the prefix, or another program has a route to the prefix or to part of it, in any table.
    pub(super) fn conflict(&self, route: &Route) -> Option<String> {
        let prefix = route.prefix;
        let own = self.own_addresses.iter();
        let mut own = own.map(|ip| Address::from_ip(*ip));
        if let Some(address) = own.find(|address| prefix.contains(address)) {
            return Some(format!("{address} is an address of this node"));
        }
        self.routes.iter().find_map(|found| {
            let (to, length) = (
                destination_of(found)?,
                found.header.destination_prefix_length,
            );
            let protocol = u8::from(found.header.protocol);
            let is_inside = length >= prefix.length() && prefix.contains(&to);
            (is_inside && protocol != route.protocol).then(|| {
                format!("{to}/{length} is already routed by another program (protocol {protocol})")
            })
        })
    }

    /// Returns the routes to a prefix in the local table that have the given routing protocol number.
    pub(super) fn local_routes(
        &self,
        prefix: Prefix,
        protocol: u8,
    ) -> impl Iterator<Item = &RouteMessage> {
        self.routes.iter().filter(move |found| {
            table_of(found) == u32::from(TABLE_LOCAL)
                && u8::from(found.header.protocol) == protocol
                && found.header.destination_prefix_length == prefix.length()
                && destination_of(found) == Some(prefix.network())
        })
    }
}

/// Groups items by the indices of their links.
fn by_link<T>(items: &[T], link_of: impl Fn(&T) -> Option<u32>) -> BTreeMap<u32, Vec<&T>> {
    let mut groups = BTreeMap::<u32, Vec<&T>>::new();
    for item in items {
        if let Some(link) = link_of(item) {
            groups.entry(link).or_default().push(item);
        }
    }
    groups
}

fn links_of(
    links: &[LinkMessage],
    addresses: &[AddressMessage],
    routes: &[RouteMessage],
) -> Vec<Link> {
    let addresses = by_link(addresses, |address| Some(address.header.index));
    let routes = by_link(routes, output_link);
    let links = links.iter().map(|link| {
        let index = &link.header.index;
        let addresses = addresses.get(index).map(Vec::as_slice);
        let routes = routes.get(index).map(Vec::as_slice);
        link_of(
            link,
            addresses.unwrap_or_default(),
            routes.unwrap_or_default(),
        )
    });
    links.collect()
}

/// Parses a link. `addresses` and `routes` contain only those of the link.
fn link_of(message: &LinkMessage, addresses: &[&AddressMessage], routes: &[&RouteMessage]) -> Link {
    let index = message.header.index;
    let own = addresses.iter().copied();
    let mut link = Link {
        index,
        name: String::new(),
        kind: LinkKind::Other,
        bridge: None,
        subnets: own.clone().filter_map(subnet_of).collect(),
        reached: Vec::new(),
    };
    let (mut is_elsewhere, mut kind) = (false, None);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Controller(index) => link.bridge = Some(*index),
            LinkAttribute::LinkNetNsId(_) => is_elsewhere = true,
            LinkAttribute::LinkInfo(infos) => {
                kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    link.kind = match kind {
        _ if message.header.flags.contains(LinkFlags::Loopback) => LinkKind::Loopback,
        Some(InfoKind::Bridge) => LinkKind::Bridge,
        Some(InfoKind::Vrf) => LinkKind::Vrf,
        Some(InfoKind::Other(kind)) if kind == "openvswitch" => LinkKind::OpenVSwitch,
        Some(InfoKind::Veth | InfoKind::Netkit) if is_elsewhere => LinkKind::Pair,
        _ => LinkKind::Other,
    };
    if matches!(link.kind, LinkKind::Pair | LinkKind::Bridge) {
        // The kernel itself has routes to the node's own addresses, and to the peers of point-to-point addresses.
        let not_pods: BTreeSet<IpAddr> = own.flat_map(addresses_in).collect();
        let reached = routes
            .iter()
            .filter_map(|route| host_route(route, index))
            .filter(|address| !not_pods.contains(address));
        link.reached = reached.collect();
    }
    link
}

/// Returns the subnet of an address, unless it is a single address or a link-local IPv6 subnet, which every link has.
fn subnet_of(message: &AddressMessage) -> Option<Subnet> {
    let address = address_of(message)?;
    let length = message.header.prefix_len;
    let (is_on_every_link, longest) = match address {
        IpAddr::V4(_) => (false, 32),
        IpAddr::V6(v6) => (v6.is_unicast_link_local(), 128),
    };
    if is_on_every_link || length == longest {
        return None;
    }
    Some(Subnet {
        prefix: Prefix::containing(Address::from_ip(address), length)?,
        is_permanent: message.header.flags.contains(AddressHeaderFlags::Permanent),
    })
}

/// Returns this node's address, and the peer's if the address is point-to-point.
fn addresses_in(message: &AddressMessage) -> Vec<IpAddr> {
    let addresses = message
        .attributes
        .iter()
        .filter_map(|attribute| match attribute {
            AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
            _ => None,
        });
    addresses.collect()
}

/// The metric of the IPv6 routes that the kernel adds itself, some of them because a router on the link advertises
/// their prefix (`IP6_RT_PRIO_ADDRCONF` in the kernel's `include/net/ip6_route.h`).
const ADDRCONF_METRIC: u32 = 256;

/// Returns the destination of a host route over a link, without a gateway, that a program on this node has added.
/// Returns `None` for other routes, and for those that a router or a DHCP server on the link can add.
fn host_route(route: &RouteMessage, link: u32) -> Option<IpAddr> {
    let address = destination_of(route)?.to_ip();
    let (longest, is_link_local) = match address {
        IpAddr::V4(v4) => (32, v4.is_link_local()),
        IpAddr::V6(v6) => (128, v6.is_unicast_link_local()),
    };
    let header = &route.header;
    let has = |wanted: RouteAttribute| route.attributes.contains(&wanted);
    let is_by_program = match header.protocol {
        RouteProtocol::IcmpRedirect | RouteProtocol::Ra | RouteProtocol::Dhcp => false,
        RouteProtocol::Kernel => {
            address.is_ipv4() || !has(RouteAttribute::Priority(ADDRCONF_METRIC))
        }
        _ => true,
    };
    let is_host_route = header.kind == RouteType::Unicast
        && header.destination_prefix_length == longest
        && has(RouteAttribute::Oif(link))
        && gateway_links(route).is_empty();
    let is_special = is_link_local || address.is_multicast() || address.is_loopback();
    (is_host_route && is_by_program && !is_special).then_some(address)
}

fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point link, the `Address` attribute is the peer's address.
            AddressAttribute::Local(address) => return Some(*address),
            AddressAttribute::Address(address) => found = Some(*address),
            _ => {}
        }
    }
    found
}

fn table_of(route: &RouteMessage) -> u32 {
    let mut attributes = route.attributes.iter();
    let table = attributes.find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    table.unwrap_or_else(|| route.header.table.into())
}

/// Returns the metric of a route. The kernel leaves out the metric 0.
fn metric_of(route: &RouteMessage) -> u32 {
    let mut attributes = route.attributes.iter();
    let metric = attributes.find_map(|attribute| match attribute {
        RouteAttribute::Priority(metric) => Some(*metric),
        _ => None,
    });
    metric.unwrap_or_default()
}

/// Returns the indices of the links that a route uses if it is a route via a gateway; empty for any other
/// route.
fn gateway_links(route: &RouteMessage) -> Vec<u32> {
    let mut links = Vec::new();
    let mut link = None;
    let mut has_gateway = false;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => has_gateway = true,
            RouteAttribute::MultiPath(hops) => {
                links.extend(hops.iter().map(|hop| hop.interface_index));
            }
            _ => {}
        }
    }
    links.extend(link.filter(|_| has_gateway));
    links
}

/// Returns the index of the link that a route uses. Returns `None` for a route with several next hops.
fn output_link(route: &RouteMessage) -> Option<u32> {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Oif(index) => Some(*index),
            _ => None,
        })
}

/// Returns the index of the link of the default route via a gateway that has the lowest metric; of several such routes, that of
/// the first. Only the table `main` counts, since rules restrict the other tables to some packets.
fn default_link(routes: &[RouteMessage], is_v4: bool) -> Option<u32> {
    let family = if is_v4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let defaults = routes.iter().filter(|route| {
        route.header.address_family == family
            && route.header.destination_prefix_length == 0
            && route.header.kind == RouteType::Unicast
            && table_of(route) == u32::from(RouteHeader::RT_TABLE_MAIN)
    });
    let links = defaults.filter_map(|route| {
        let link = gateway_links(route).first().copied()?;
        Some((metric_of(route), link))
    });
    let best = links.min_by_key(|(metric, _)| *metric);
    best.map(|(_, link)| link)
}

fn destination_of(route: &RouteMessage) -> Option<Address> {
    let mut attributes = route.attributes.iter();
    attributes.find_map(|attribute| match attribute {
        RouteAttribute::Destination(address) => ip_of(address).map(Address::from_ip),
        _ => None,
    })
}

pub(super) fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
