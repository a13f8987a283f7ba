//! A route that makes a steering prefix local.

use std::{fmt, net::IpAddr};

use rtnetlink::packet_route::{
    AddressFamily,
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use tunnel_common::steering::Prefix;

use super::snapshot::ip_of;

/// The routing table for local addresses (`RT_TABLE_LOCAL`). For IPv4, only a route in this table makes the
/// kernel answer connection attempts to the prefix with a reset.
pub(super) const TABLE_LOCAL: u8 = 255;

/// A route that makes a steering prefix local.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) prefix: Prefix,
    pub(super) source: Option<IpAddr>,
    pub(super) protocol: u8,
    pub(super) loopback: u32,
}

impl Route {
    pub(super) fn has_source_of(&self, route: &RouteMessage) -> bool {
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
        let network = self.prefix.network().to_ip();
        let mut message = RouteMessage::default();
        (message.header.address_family, message.header.scope) = match network {
            IpAddr::V4(_) => (AddressFamily::Inet, RouteScope::Host),
            IpAddr::V6(_) => (AddressFamily::Inet6, RouteScope::Universe),
        };
        message.header.destination_prefix_length = self.prefix.length();
        message.header.table = TABLE_LOCAL;
        message.header.kind = RouteType::Local;
        message.header.protocol = RouteProtocol::from(self.protocol);
        message.attributes = vec![
            RouteAttribute::Destination(network.into()),
            RouteAttribute::Oif(self.loopback),
        ];
        let source = self
            .source
            .map(|source| RouteAttribute::PrefSource(source.into()));
        message.attributes.extend(source);
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
