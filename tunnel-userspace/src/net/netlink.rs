//! What the kernel has of links, addresses and routes, and the routes we write (rtnetlink(7)).

use std::{
    collections::BTreeSet,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, RouteMessageBuilder, new_multicast_connection,
    packet_core::NetlinkMessage,
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage, AddressScope},
        link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage},
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
    },
};
use tokio::task::JoinSet;
use tracing::warn;
use tunnel_common::{addr::Address, steering::Prefix};

use super::uplinks::{Kind, Link};

/// The table that the kernel keeps addresses of its own in (`RT_TABLE_LOCAL`): here alone can a
/// route to a range make the kernel answer with a reset, in IPv4.
const TABLE_LOCAL: u8 = 255;

/// The network could not be asked or changed.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// No netlink socket.
    #[error("cannot open a netlink socket")]
    Open(#[source] io::Error),
    /// The file that says which routes are ours can't be used.
    #[error("cannot use {path}")]
    Record {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A guard can't be ended.
    #[error("cannot end a guard")]
    Guard(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The kernel refused a step.
    #[error("cannot {step}")]
    Step {
        /// What was tried.
        step: String,
        /// What the kernel said.
        #[source]
        source: rtnetlink::Error,
    },
}

fn failed(step: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetError {
    let step = step.into();
    move |source| NetError::Step { step, source }
}

type Messages = Box<dyn Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Send + Unpin>;

/// A netlink socket that is told of every change.
pub(super) struct Netlink {
    pub(super) kernel: Kernel,
    groups: &'static [MulticastGroup],
    messages: Messages,
    /// Moves the messages for as long as this lives.
    _connection: JoinSet<()>,
}

/// What is asked of the kernel.
pub(super) struct Kernel(Handle);

impl Netlink {
    /// Told of links, addresses and routes.
    pub(super) fn open() -> Result<Self, NetError> {
        Self::of(&[
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
        ])
    }

    /// Told of addresses only.
    pub(super) fn of_addresses() -> Result<Self, NetError> {
        Self::of(&[MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr])
    }

    fn of(groups: &'static [MulticastGroup]) -> Result<Self, NetError> {
        let (connection, handle, messages) =
            new_multicast_connection(groups).map_err(NetError::Open)?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(Self {
            kernel: Kernel(handle),
            groups,
            messages: Box::new(messages.map(|(message, _)| message)),
            _connection: task,
        })
    }

    /// Opens it anew, where it tells no more. If that fails it stays as it is.
    pub(super) fn reopen(&mut self) {
        match Self::of(self.groups) {
            Ok(netlink) => *self = netlink,
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "cannot follow the network"
            ),
        }
    }

    /// Waits for a change; false if there will be no more.
    pub(super) async fn changed(&mut self) -> bool {
        self.messages.next().await.is_some()
    }
}

impl Kernel {
    /// Everything, as it is now.
    pub(super) async fn scene(&self) -> Result<Scene, NetError> {
        let links: Vec<LinkMessage> = self
            .0
            .link()
            .get()
            .execute()
            .try_collect()
            .await
            .map_err(failed("list the links"))?;
        let addresses = self.address_messages().await?;
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut asked = RouteMessage::default();
            asked.header.address_family = family;
            let found = self.0.route().get(asked).execute();
            let found: Vec<RouteMessage> = found
                .try_collect()
                .await
                .map_err(failed("list the routes"))?;
            routes.extend(found);
        }
        Ok(Scene::of(&links, &addresses, routes))
    }

    /// Every address of the links, with which one can be dialled without naming the link.
    pub(super) async fn addresses(&self) -> Result<BTreeSet<IpAddr>, NetError> {
        let messages = self.address_messages().await?;
        let is_link_local = |ip: &IpAddr| match ip {
            IpAddr::V4(_) => false,
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        let addresses = messages.iter().filter_map(address_of);
        Ok(addresses.filter(|ip| !is_link_local(ip)).collect())
    }

    async fn address_messages(&self) -> Result<Vec<AddressMessage>, NetError> {
        let asked = self.0.address().get().execute();
        let found = asked.try_collect().await;
        found.map_err(failed("list the addresses"))
    }

    /// Adds a route, or puts it in the place of ours to the same destination.
    pub(super) async fn add(&self, route: &Route) -> Result<(), NetError> {
        let step = format!("add the route {route}");
        let request = self.0.route().add(route.message());
        request.replace().execute().await.map_err(failed(step))
    }

    pub(super) async fn remove(&self, route: &RouteMessage) -> Result<(), NetError> {
        let request = self.0.route().del(route.clone());
        request
            .execute()
            .await
            .map_err(failed("remove an old route of ours"))
    }
}

/// The network at one moment.
pub(super) struct Scene {
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
    fn of(links: &[LinkMessage], addresses: &[AddressMessage], routes: Vec<RouteMessage>) -> Self {
        let is_loopback = |link: &&LinkMessage| link.header.flags.contains(LinkFlags::Loopback);
        let loopback = links.iter().find(is_loopback);
        let addresses_of = addresses.iter().flat_map(|message| {
            let index = message.header.index;
            let is_global = message.header.scope == AddressScope::Universe;
            address_of(message).map(|address| (index, address, is_global))
        });
        let addresses: Vec<_> = addresses_of.collect();
        let default = [true, false].map(|is_v4| default_link(&routes, is_v4));
        Self {
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
        self.local().filter(move |found| {
            u8::from(found.header.protocol) == protocol && is_to(found, prefix)
        })
    }

    fn local(&self) -> impl Iterator<Item = &RouteMessage> {
        let is_local = |route: &&RouteMessage| table_of(route) == u32::from(TABLE_LOCAL);
        self.routes.iter().filter(is_local)
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

/// A route of ours: makes a prefix local.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) prefix: Prefix,
    source: Option<IpAddr>,
    protocol: u8,
    loopback: u32,
}

impl Route {
    fn is_from(&self, route: &RouteMessage) -> bool {
        let source = route.attributes.iter().find_map(|attribute| {
            if let RouteAttribute::PrefSource(source) = attribute {
                ip_of(source)
            } else {
                None
            }
        });
        source == self.source
    }

    fn message(&self) -> RouteMessage {
        let length = self.prefix.length();
        let mut message = match self.prefix.network().to_ip() {
            IpAddr::V4(network) => {
                let route = RouteMessageBuilder::<Ipv4Addr>::new();
                let route = route.destination_prefix(network, length);
                match self.source {
                    Some(IpAddr::V4(source)) => route.pref_source(source).build(),
                    Some(IpAddr::V6(_)) | None => route.build(),
                }
            }
            IpAddr::V6(network) => {
                let route = RouteMessageBuilder::<Ipv6Addr>::new();
                let route = route.destination_prefix(network, length);
                match self.source {
                    Some(IpAddr::V6(source)) => route.pref_source(source).build(),
                    Some(IpAddr::V4(_)) | None => route.build(),
                }
            }
        };
        message.header.table = TABLE_LOCAL;
        message.header.kind = RouteType::Local;
        message.header.scope = if self.prefix.is_v4() {
            RouteScope::Host
        } else {
            RouteScope::Universe
        };
        message.header.protocol = RouteProtocol::from(self.protocol);
        message.attributes.push(RouteAttribute::Oif(self.loopback));
        message
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local {}", self.prefix)?;
        match self.source {
            Some(source) => write!(f, " src {source}"),
            None => Ok(()),
        }
    }
}

fn is_to(route: &RouteMessage, prefix: Prefix) -> bool {
    route.header.destination_prefix_length == prefix.length()
        && destination_of(route) == Some(prefix.network())
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

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
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
