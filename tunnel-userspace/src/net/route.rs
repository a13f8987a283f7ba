//! A route that makes a steering prefix local.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use rtnetlink::{
    RouteMessageBuilder,
    packet_route::route::{RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use tunnel_common::steering::Prefix;

use super::scene::ip_of;

/// The table that the kernel keeps addresses of its own in (`RT_TABLE_LOCAL`): here alone can a
/// route to a range make the kernel answer with a reset, in IPv4.
pub(super) const TABLE_LOCAL: u8 = 255;

/// A route of ours: makes a prefix local.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) prefix: Prefix,
    pub(super) source: Option<IpAddr>,
    pub(super) protocol: u8,
    pub(super) loopback: u32,
}

impl Route {
    pub(super) fn is_from(&self, route: &RouteMessage) -> bool {
        let source = route.attributes.iter().find_map(|attribute| {
            if let RouteAttribute::PrefSource(source) = attribute {
                ip_of(source)
            } else {
                None
            }
        });
        source == self.source
    }

    pub(super) fn message(&self) -> RouteMessage {
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
