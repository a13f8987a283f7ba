//! Reads ICMP errors (RFC 792, RFC 4443), which quote the beginning of the packet that they are about.
//!
//! A router need quote no more than 8 bytes behind the network header (RFC 792), which contain the ports of TCP and UDP.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    Family, ICMP, ICMP_V6, NetworkHeader, Packet, PacketBytes, SCTP, TCP, TcpFlags, UDP, Unread,
    extensions::Walk, ports_from, read_network,
};
use crate::addr::{Address, Protocol};

/// The size of the header of an ICMP error, in bytes.
pub(crate) const HEADER: u32 = 8;
/// The offset of the checksum in that header.
pub(crate) const CHECKSUM: u32 = 2;

/// The types of ICMP messages that quote a packet (RFC 792, RFC 6633).
mod v4 {
    pub(super) const DESTINATION_UNREACHABLE: u32 = 3;
    pub(super) const SOURCE_QUENCH: u32 = 4;
    pub(super) const REDIRECT: u32 = 5;
    pub(super) const TIME_EXCEEDED: u32 = 11;
    pub(super) const PARAMETER_PROBLEM: u32 = 12;
}

/// The types of ICMPv6 messages that quote a packet (RFC 4443 section 3).
mod v6 {
    pub(super) const DESTINATION_UNREACHABLE: u32 = 1;
    pub(super) const PACKET_TOO_BIG: u32 = 2;
    pub(super) const TIME_EXCEEDED: u32 = 3;
    pub(super) const PARAMETER_PROBLEM: u32 = 4;
}

/// The headers of an ICMP error. Part of a [`Run`](crate::forward::Run).
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct ErrorHeader {
    /// The address that the error comes from: a router or the receiver of the quoted packet.
    pub source: Address,
    /// The address that the error goes to: the sender of the quoted packet.
    pub destination: Address,
    /// The offset of the ICMP header from the network header. The quoted packet follows the ICMP header.
    pub offset: u32,
    /// 1 if the error asks the receiver to send packets by another router, otherwise 0.
    pub is_redirect: u32,
}

impl ErrorHeader {
    /// Returns the offset of the quoted network header from that of the error.
    #[inline(always)]
    #[must_use]
    pub const fn quoted_offset(&self) -> u32 {
        self.offset + HEADER
    }
}

/// The bytes of a packet from an offset on.
struct Tail<'a, T> {
    bytes: &'a T,
    start: u32,
}

impl<T: PacketBytes> PacketBytes for Tail<'_, T> {
    #[inline(always)]
    fn words<const WORDS: usize>(&self, offset: u32) -> Option<[u32; WORDS]> {
        self.bytes.words(self.start + offset)
    }

    #[inline(always)]
    fn skip_header(&self, walk: Walk) -> Walk {
        let walk = self.bytes.skip_header(walk.moved_by(self.start));
        walk.moved_by(self.start.wrapping_neg())
    }
}

/// Reads the headers of an ICMP error. `family` is the version that the link layer names.
///
/// # Errors
///
/// Returns the reason if the packet is no ICMP error.
#[inline(always)]
pub fn read_header(bytes: &impl PacketBytes, family: Family) -> Result<ErrorHeader, Unread> {
    let network = read_network(bytes, family)?;
    if network.fragment.is_some() {
        return Err(Unread::Fragment);
    }
    Ok(ErrorHeader {
        source: network.source,
        destination: network.destination,
        offset: network.transport_offset,
        is_redirect: u32::from(read_type(bytes, &network, family)?),
    })
}

/// Returns true if the message is a redirect.
#[inline(always)]
fn read_type(
    bytes: &impl PacketBytes,
    network: &NetworkHeader,
    family: Family,
) -> Result<bool, Unread> {
    let expected = match family {
        Family::V4 => ICMP,
        Family::V6 => ICMP_V6,
    };
    if network.protocol != expected {
        return Err(Unread::OtherProtocol);
    }
    let [word] = bytes
        .words::<1>(network.transport_offset)
        .ok_or(Unread::Malformed)?;
    match (family, u32::from_be(word) >> 24) {
        (Family::V4, v4::REDIRECT) => Ok(true),
        (
            Family::V4,
            v4::DESTINATION_UNREACHABLE
            | v4::SOURCE_QUENCH
            | v4::TIME_EXCEEDED
            | v4::PARAMETER_PROBLEM,
        )
        | (
            Family::V6,
            v6::DESTINATION_UNREACHABLE
            | v6::PACKET_TOO_BIG
            | v6::TIME_EXCEEDED
            | v6::PARAMETER_PROBLEM,
        ) => Ok(false),
        (Family::V4 | Family::V6, _) => Err(Unread::OtherProtocol),
    }
}

/// Reads the packet that an ICMP error quotes, from an offset on. Only the ports need be there. The offset of the packet's
/// transport header counts from the network header of the error. The packet has no TCP flags, because the error need not
/// contain them.
///
/// # Errors
///
/// Returns the reason if the error quotes no TCP, UDP or SCTP packet.
#[inline(always)]
pub fn read_quoted(
    bytes: &impl PacketBytes,
    family: Family,
    quoted_offset: u32,
) -> Result<Packet, Unread> {
    let tail = Tail {
        bytes,
        start: quoted_offset,
    };
    let network = read_network(&tail, family)?;
    if network.fragment.is_some_and(|fragment| !fragment.is_first) {
        return Err(Unread::Fragment);
    }
    let protocol = match network.protocol {
        TCP => Protocol::TCP,
        UDP => Protocol::UDP,
        SCTP => Protocol::SCTP,
        _ => return Err(Unread::OtherProtocol),
    };
    let [ports] = tail
        .words::<1>(network.transport_offset)
        .ok_or(Unread::Malformed)?;
    let (source_port, destination_port) = ports_from(ports);
    Ok(Packet {
        family,
        source: network.source,
        destination: network.destination,
        source_port,
        destination_port,
        protocol,
        flags: TcpFlags::default(),
        transport_offset: tail.start + network.transport_offset,
        is_fragment: network.fragment.is_some(),
    })
}

#[cfg(test)]
pub(crate) mod tests;
