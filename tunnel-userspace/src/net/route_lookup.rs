//! Asks the kernel which way a packet would take.

use std::net::IpAddr;

use futures_util::TryStreamExt as _;
use rtnetlink::packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};

use super::{NetError, netlink::RouteSocket};

/// The way of a packet.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Way {
    /// The packet is for this host.
    Local,
    /// The packet leaves by the link with this index and name, to a router if there is one.
    Link {
        /// The index of the link.
        index: u32,
        /// The name of the link.
        name: String,
        /// The router.
        via: Option<IpAddr>,
    },
    /// The kernel sends the packet nowhere, for this reason.
    None(String),
}

/// The origin of a packet.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// The source of the packet.
    pub source: IpAddr,
    /// The index of the link by which it has arrived, or `None` if this host sends it.
    pub link: Option<u32>,
}

/// Returns the way of a packet to an address. Without an origin, this host would choose the source.
///
/// # Errors
///
/// Returns an error if the kernel can't be asked.
pub async fn way_to(to: IpAddr, origin: Option<Origin>) -> Result<Way, NetError> {
    let socket = RouteSocket::open()?;
    let mut request = RouteMessage::default();
    let (family, length) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    request.header.address_family = family;
    request.header.destination_prefix_length = length;
    request
        .attributes
        .push(RouteAttribute::Destination(to_address(to)));
    if let Some(Origin { source, link }) = origin {
        request.header.source_prefix_length = length;
        request
            .attributes
            .push(RouteAttribute::Source(to_address(source)));
        request.attributes.extend(link.map(RouteAttribute::Iif));
    }
    let found: Result<Vec<RouteMessage>, _> = socket.routes(request).try_collect().await;
    let route = match found {
        Ok(routes) => routes.into_iter().next(),
        Err(rtnetlink::Error::NetlinkError(message)) => {
            return Ok(Way::None(message.to_io().to_string()));
        }
        Err(source) => {
            return Err(NetError::Step {
                step: "ask for a route".to_owned(),
                source,
            });
        }
    };
    let Some(route) = route else {
        return Ok(Way::None("there is no route".to_owned()));
    };
    if route.header.kind == RouteType::Local {
        return Ok(Way::Local);
    }
    if route.header.kind != RouteType::Unicast {
        return Ok(Way::None(format!(
            "the route has the type {:?}",
            route.header.kind
        )));
    }
    let (mut index, mut via) = (None, None);
    for attribute in &route.attributes {
        if let RouteAttribute::Oif(link) = attribute {
            index = Some(*link);
        } else if let RouteAttribute::Gateway(gateway) = attribute {
            via = super::snapshot::ip_of(gateway);
        }
    }
    let Some(index) = index else {
        return Ok(Way::None("the route has no link".to_owned()));
    };
    Ok(Way::Link {
        index,
        name: link_name(index),
        via,
    })
}

/// Returns the index of the link with this name.
#[must_use]
pub fn index_of_link(name: &str) -> Option<u32> {
    nix::net::if_::if_nametoindex(name).ok()
}

/// Returns the name of a link, or its index if it is gone.
fn link_name(index: u32) -> String {
    let name = nix::net::if_::if_indextoname(index);
    name.map_or_else(
        |_| index.to_string(),
        |name| name.to_string_lossy().into_owned(),
    )
}

const fn to_address(ip: IpAddr) -> RouteAddress {
    match ip {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    }
}
