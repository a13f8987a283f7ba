//! Reads fragments of TCP and UDP packets. Only the first fragment of a packet contains ports; all of them have the same
//! addresses and the same number (RFC 791 section 3.2, RFC 8200 section 4.5).

use super::{
    Family, Packet, PacketBytes, TCP, UDP, Unread, extensions::next_header, read_network,
    read_packet,
};
use crate::addr::{Address, Protocol};

/// The headers of a fragment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FragmentHeader {
    /// The source address.
    pub source: Address,
    /// The destination address.
    pub destination: Address,
    /// The number that all fragments of the packet have.
    pub id: u32,
    /// The transport protocol of an IPv4 packet, which has numbers of its own. 0 in IPv6.
    pub protocol: u8,
    /// The headers of the packet, if this is its first fragment.
    pub first: Option<Packet>,
}

/// Reads a fragment. `family` is the version that the link layer names.
///
/// # Errors
///
/// Returns the reason if the packet is no fragment of a TCP or UDP packet.
#[inline(always)]
pub fn read(bytes: &impl PacketBytes, family: Family) -> Result<FragmentHeader, Unread> {
    let network = read_network(bytes, family)?;
    let fragment = network.fragment.ok_or(Unread::OtherProtocol)?;
    let protocol = match (family, network.protocol) {
        (Family::V4, TCP) => Protocol::TCP.number(),
        (Family::V4, UDP) => Protocol::UDP.number(),
        // The ports of the first fragment may follow behind other headers.
        (Family::V6, TCP | UDP | next_header::DESTINATION_OPTIONS) => 0,
        _ => return Err(Unread::OtherProtocol),
    };
    let first = if fragment.is_first {
        Some(read_packet(bytes, family, &network).map_err(short)?)
    } else {
        None
    };
    Ok(FragmentHeader {
        source: network.source,
        destination: network.destination,
        id: fragment.id,
        protocol,
        first,
    })
}

/// Returns why a first fragment is not read: a whole packet would be malformed.
#[inline(always)]
const fn short(unread: Unread) -> Unread {
    if matches!(unread, Unread::Malformed) {
        Unread::ShortFragment
    } else {
        unread
    }
}

#[cfg(test)]
mod tests;
