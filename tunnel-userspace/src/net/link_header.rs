//! The link-layer headers of packets.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "most of the kernel's types of links have a header of their own"
)]

use rtnetlink::packet_route::link::LinkLayerType;

/// The link-layer header of the packets of a link, as tc programs see it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LinkHeader {
    /// An Ethernet header.
    Ethernet,
    /// No header, as on links of WireGuard and PPP.
    Absent,
    /// Another header.
    Other,
}

impl LinkHeader {
    /// Returns the header on links of a type (`dev_is_mac_header_xmit` in the kernel's include/linux/if_arp.h).
    pub(super) const fn of(link: LinkLayerType) -> Self {
        match link {
            LinkLayerType::Ether => Self::Ethernet,
            LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit
            | LinkLayerType::Ipgre
            | LinkLayerType::Ip6gre
            | LinkLayerType::Void
            | LinkLayerType::None
            | LinkLayerType::Rawip
            | LinkLayerType::Ppp => Self::Absent,
            _ => Self::Other,
        }
    }
}
