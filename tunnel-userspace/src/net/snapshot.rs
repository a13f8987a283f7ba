//! The links, addresses and routes of this node at one point in time, parsed from netlink messages. This
//! module does no I/O.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "few of the kernel's attributes matter here"
)]

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use rtnetlink::packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressMessage, AddressScope},
    link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};
use tunnel_common::{addr::Address, steering::Prefix};

use super::{
    steering_route::{Route, TABLE_LOCAL},
    uplinks::{Link, LinkKind},
};
use crate::model::{LinkNetwork, LinkNetworks};

/// The links, addresses and routes of this node at one point in time.
pub(super) struct Snapshot {
    /// All of this node's addresses, except link-local IPv6 addresses.
    pub(super) own_addresses: Arc<BTreeSet<IpAddr>>,
    pub(super) links: Vec<Link>,
    /// The indices of the links that are used by routes via a gateway.
    pub(super) gateways: BTreeSet<u32>,
    loopback: u32,
    /// The possible source addresses for replies, each with the index of its link.
    source_addresses: Vec<(u32, IpAddr)>,
    routes: Vec<RouteMessage>,
}

impl Snapshot {
    pub(super) fn of(
        links: &[LinkMessage],
        addresses: &[AddressMessage],
        routes: Vec<RouteMessage>,
    ) -> Self {
        let is_loopback = |link: &&LinkMessage| link.header.flags.contains(LinkFlags::Loopback);
        let loopback = links.iter().find(is_loopback);
        let addresses = addresses.iter();
        let addresses =
            addresses.filter_map(|message| Some((&message.header, address_of(message)?)));
        let is_link_local =
            |ip: &IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let own = addresses.clone().map(|(_, ip)| ip);
        let sources = addresses
            .filter(|(header, ip)| header.scope == AddressScope::Universe && !ip.is_loopback());
        Self {
            own_addresses: Arc::new(own.filter(|ip| !is_link_local(ip)).collect()),
            links: links.iter().map(link_of).collect(),
            gateways: routes.iter().flat_map(gateway_links).collect(),
            loopback: loopback.map_or(1, |link| link.header.index),
            source_addresses: sources.map(|(header, ip)| (header.index, ip)).collect(),
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
            .filter(|(_, address)| address.is_ipv4() == prefix.is_v4());
        let on_default = candidates.clone().find(|(link, _)| Some(*link) == default);
        let source = on_default
            .or_else(|| candidates.next())
            .map(|(_, address)| *address);
        let is_possible = source.is_some() || !prefix.is_v4() && has_v6;
        is_possible.then_some(Route {
            prefix,
            source,
            protocol,
            loopback: self.loopback,
        })
    }

    /// Returns the networks that this node has unicast routes to, except default routes. `inside_links` contains the
    /// indices of the links that don't lead outside the node.
    pub(super) fn networks(&self, inside_links: &BTreeSet<u32>) -> LinkNetworks {
        let mut networks = LinkNetworks::default();
        for route in &self.routes {
            let length = route.header.destination_prefix_length;
            let links = output_link(route).filter(|_| route.header.kind == RouteType::Unicast);
            let (Some(address), Some(index)) = (destination_of(route), links) else {
                continue;
            };
            let link = self.links.iter().find(|link| link.index == index);
            networks.insert(LinkNetwork {
                address: address.to_ip(),
                length,
                link: link.map_or_else(String::new, |link| link.name.clone()),
                leads_to_pods: inside_links.contains(&index),
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
        let mut own = self
            .source_addresses
            .iter()
            .map(|(_, ip)| Address::from_ip(*ip));
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

fn link_of(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        kind: LinkKind::Other,
        bridge: None,
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
        Some(InfoKind::Veth | InfoKind::Netkit) if is_elsewhere => LinkKind::Pair,
        _ => LinkKind::Other,
    };
    link
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

fn default_link(routes: &[RouteMessage], is_v4: bool) -> Option<u32> {
    let family = if is_v4 {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let mut defaults = routes.iter().filter(|route| {
        route.header.address_family == family
            && route.header.destination_prefix_length == 0
            && route.header.kind == RouteType::Unicast
    });
    defaults.find_map(|route| gateway_links(route).first().copied())
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
