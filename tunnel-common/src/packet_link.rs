//! The links on which packets are translated.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::addr::Address;

/// Value of the map `packet_links`: a link on which packets are translated.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct PacketLink {
    /// The IPv4 address of this node that stands for clients on the link, or the unspecified address.
    pub v4: Address,
    /// The IPv6 address of this node that stands for clients on the link, or the unspecified address.
    pub v6: Address,
    /// A combination of [`Self::LEADS_TO_PODS`], [`Self::LOCAL_SENDERS`], [`Self::PRESUMED_LOCAL`],
    /// [`Self::KNOWN_FLOWS_ONLY`], [`Self::REDIRECTS`] and
    /// [`Self::WITHOUT_ETHERNET`].
    pub flags: u32,
}

impl PacketLink {
    /// The index that stands for this host itself, whose own packets arrive on no link.
    pub const HOST: u32 = 0;
    /// Flag: the link leads to pods. Without the flag, it leads outside.
    pub const LEADS_TO_PODS: u32 = 1;
    /// Flag: the link leads to pods of this node, and all of them are local senders, whatever their addresses are.
    pub const LOCAL_SENDERS: u32 = 2;
    /// Flag: the link leads to pods of this node, and they are local senders if their family has no ranges of local senders.
    pub const PRESUMED_LOCAL: u32 = 4;
    /// Flag: no flow begins on the link, and no client is masqueraded on it that isn't yet.
    pub const KNOWN_FLOWS_ONLY: u32 = 8;
    /// Flag: packets that arrive on the link, and whose destination is replaced, are sent to the link of their receiver past the
    /// network stack, if that link has the flag, too: replies then go past it as well.
    pub const REDIRECTS: u32 = 16;
    /// Flag: packets on the link have no Ethernet header.
    pub const WITHOUT_ETHERNET: u32 = 32;
    /// The flags of links that lead to pods of this node. Others lead to pods, but perhaps to those of other nodes.
    pub const OF_PODS_HERE: u32 = Self::LOCAL_SENDERS | Self::PRESUMED_LOCAL;

    /// Returns the address of this node that stands for clients in a family, if there is one.
    #[inline(always)]
    #[must_use]
    pub fn address(&self, is_v4: bool) -> Option<Address> {
        let address = if is_v4 { self.v4 } else { self.v6 };
        (address != Address::UNSPECIFIED).then_some(address)
    }
}
