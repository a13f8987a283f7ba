//! The links, addresses and routes of this node at one moment. Pure.

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
    route::{Route, TABLE_LOCAL},
    uplinks::{Kind, Link},
};

/// The network at one moment.
pub(super) struct Scene {
    /// Every address that can be dialled without naming a link.
    pub(super) own: Arc<BTreeSet<IpAddr>>,
    pub(super) links: Vec<Link>,
    /// The links that routes by a gateway lead over.
    pub(super) gateways: BTreeSet<u32>,
    loopback: u32,
    /// Addresses that packets may come from, with their link.
    addresses: Vec<(u32, IpAddr)>,
    has_v6: bool,
    routes: Vec<RouteMessage>,
    /// The links of the default routes: IPv4, IPv6.
    default: [Option<u32>; 2],
}

impl Scene {
    pub(super) fn of(
        links: &[LinkMessage],
        addresses: &[AddressMessage],
        routes: Vec<RouteMessage>,
    ) -> Self {
        let is_loopback = |link: &&LinkMessage| link.header.flags.contains(LinkFlags::Loopback);
        let loopback = links.iter().find(is_loopback);
        let addresses_of = addresses.iter().flat_map(|message| {
            let index = message.header.index;
            let is_global = message.header.scope == AddressScope::Universe;
            address_of(message).map(|address| (index, address, is_global))
        });
        let addresses: Vec<_> = addresses_of.collect();
        let default = [true, false].map(|is_v4| default_link(&routes, is_v4));
        let is_link_local = |ip: &IpAddr| match ip {
            IpAddr::V4(_) => false,
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let own = addresses.iter().map(|(_, address, _)| *address);
        Self {
            own: Arc::new(own.filter(|ip| !is_link_local(ip)).collect()),
            links: links.iter().map(link_of).collect(),
            gateways: routes.iter().flat_map(gateway_links).collect(),
            loopback: loopback.map_or(1, |link| link.header.index),
            has_v6: addresses
                .iter()
                .any(|(_, address, _)| *address == IpAddr::V6(Ipv6Addr::LOCALHOST)),
            addresses: addresses
                .into_iter()
                .filter(|(_, address, is_global)| *is_global && !address.is_loopback())
                .map(|(index, address, _)| (index, address))
                .collect(),
            default,
            routes,
        }
    }

    /// The route that makes a prefix local: its packets answer from an address of the node, that of
    /// the default route's link if it has one. Without an address of the family nobody could come
    /// from; IPv6 works without, where there is IPv6 at all.
    pub(super) fn route_for(&self, prefix: Prefix, protocol: u8) -> Option<Route> {
        let [default4, default6] = self.default;
        let default = if prefix.is_v4() { default4 } else { default6 };
        let mut fitting = self
            .addresses
            .iter()
            .filter(|(_, address)| address.is_ipv4() == prefix.is_v4());
        let on_default = fitting.clone().find(|(link, _)| Some(*link) == default);
        let source = on_default
            .or_else(|| fitting.next())
            .map(|(_, address)| *address);
        let is_possible = source.is_some() || !prefix.is_v4() && self.has_v6;
        is_possible.then_some(Route {
            prefix,
            source,
            protocol,
            loopback: self.loopback,
        })
    }

    /// Whether a route is there as it should be.
    pub(super) fn has(&self, route: &Route) -> bool {
        let mut ours = self.local_to(route.prefix, route.protocol);
        ours.any(|found| route.is_from(found))
    }

    /// What stands in the way of a route: another's to the same range or a part of it, in any table,
    /// or an address of this node that lies in it.
    pub(super) fn conflict(&self, route: &Route) -> Option<String> {
        let prefix = route.prefix;
        let own = self
            .addresses
            .iter()
            .map(|(_, address)| Address::from_ip(*address));
        if let Some(address) = own.into_iter().find(|address| prefix.contains(address)) {
            return Some(format!("{} is an address of this node", address.to_ip()));
        }
        let is_inside = |found: &&RouteMessage| {
            let is_ours = u8::from(found.header.protocol) == route.protocol;
            let to = destination_of(found);
            !is_ours
                && found.header.destination_prefix_length >= prefix.length()
                && to.is_some_and(|to| to.is_v4() == prefix.is_v4() && prefix.contains(&to))
        };
        let other = self.routes.iter().find(is_inside)?;
        let to = destination_of(other)?;
        Some(format!(
            "{}/{} is already routed by another (protocol {})",
            to.to_ip(),
            other.header.destination_prefix_length,
            u8::from(other.header.protocol)
        ))
    }

    /// Routes of table local to a range, of a protocol.
    pub(super) fn local_to(
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
        kind: Kind::Other,
        bridge: None,
    };
    let mut is_elsewhere = false;
    let mut kind = None;
    for attribute in &message.attributes {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the rest does not matter here"
        )]
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Controller(index) => link.bridge = Some(*index),
            LinkAttribute::LinkNetNsId(_) => is_elsewhere = true,
            LinkAttribute::LinkInfo(infos) => {
                kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.clone()),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    if message.header.flags.contains(LinkFlags::Loopback) {
        link.kind = Kind::Loopback;
    } else if kind == Some(InfoKind::Bridge) {
        link.kind = Kind::Bridge;
    } else if matches!(kind, Some(InfoKind::Veth | InfoKind::Netkit)) && is_elsewhere {
        link.kind = Kind::Pair;
    }
    link
}

fn address_of(message: &AddressMessage) -> Option<IpAddr> {
    let mut found = None;
    for attribute in &message.attributes {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the rest does not matter here"
        )]
        match attribute {
            // On a point-to-point link the other one is the peer's.
            AddressAttribute::Local(address) => return Some(*address),
            AddressAttribute::Address(address) => found = Some(*address),
            _ => {}
        }
    }
    found
}

fn table_of(route: &RouteMessage) -> u32 {
    let table = route.attributes.iter().find_map(|attribute| {
        if let RouteAttribute::Table(table) = attribute {
            Some(*table)
        } else {
            None
        }
    });
    table.unwrap_or_else(|| route.header.table.into())
}

/// The links that a route by a gateway leads over.
fn gateway_links(route: &RouteMessage) -> Vec<u32> {
    let mut links = Vec::new();
    let mut link = None;
    let mut has_gateway = false;
    for attribute in &route.attributes {
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the rest does not matter here"
        )]
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
    route.attributes.iter().find_map(|attribute| {
        if let RouteAttribute::Destination(address) = attribute {
            ip_of(address).map(Address::from_ip)
        } else {
            None
        }
    })
}

pub(super) fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "no other kind is an IP address"
    )]
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}
