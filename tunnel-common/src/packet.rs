//! Reads the headers of a packet: the addresses, the ports and the protocol, through any implementation of
//! [`PacketBytes`].
//!
//! [`read`] finds the transport header behind IPv4 options (RFC 791) and IPv6 extension headers (RFC 8200). It doesn't
//! verify checksums, because the network stack does.

pub mod extensions;
pub mod fragment;
pub mod icmp;

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use self::extensions::Walk;
use crate::addr::{Address, Port, Protocol};

/// The bytes of a packet.
pub trait PacketBytes {
    /// Reads words at an offset from the network header, in network byte order. Returns `None` if the packet is too
    /// short.
    fn words<const WORDS: usize>(&self, offset: u32) -> Option<[u32; WORDS]>;

    /// Keeps the numbers of a TCP packet. They would not fit into the stack frame of a kernel program beside the [`Packet`].
    #[inline(always)]
    fn keep_numbers(&self, _numbers: TcpNumbers) {}

    /// Calls [`Walk::skip_header`]. In a kernel program, this is a function that the verifier checks only once.
    #[inline(always)]
    fn skip_header(&self, walk: Walk) -> Walk
    where
        Self: Sized,
    {
        walk.skip_header(self)
    }
}

/// A packet in memory, which begins with its network header.
impl PacketBytes for &[u8] {
    fn words<const WORDS: usize>(&self, offset: u32) -> Option<[u32; WORDS]> {
        let bytes = self.get(usize::try_from(offset).ok()?..)?;
        let (words, _) = <[u32; WORDS]>::read_from_prefix(bytes).ok()?;
        Some(words)
    }
}

/// The IP version of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The headers of a TCP, UDP or SCTP packet, or of its first fragment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet {
    /// The IP version.
    pub family: Family,
    /// The source address.
    pub source: Address,
    /// The destination address.
    pub destination: Address,
    /// The source port.
    pub source_port: Port,
    /// The destination port.
    pub destination_port: Port,
    /// [`Protocol::TCP`], [`Protocol::UDP`] or [`Protocol::SCTP`].
    pub protocol: Protocol,
    /// The flags of a TCP packet, or those that correspond to the first chunk of an SCTP packet. No flag is set for UDP.
    pub flags: TcpFlags,
    /// The offset of the transport header from the network header.
    pub transport_offset: u32,
    /// True if more fragments follow.
    pub is_fragment: bool,
}

/// The upper halves of the numbers in a TCP header (RFC 9293 section 3.1), which only somebody knows who sees packets of the
/// connection. They are 0 in packets of other protocols.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(C)]
pub struct TcpNumbers {
    /// The sequence number of the first byte of data; that of SYN precedes it.
    pub sequence: u16,
    /// The acknowledgment number.
    pub acknowledged: u16,
}

impl TcpNumbers {
    /// Returns the numbers in a header, given both words in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn read(sequence: u32, acknowledged: u32, flags: TcpFlags) -> Self {
        #[expect(clippy::as_conversions, reason = "`From` is not const")]
        let syn = flags.has_syn() as u32;
        Self {
            sequence: upper_half(u32::from_be(sequence).wrapping_add(syn)),
            acknowledged: upper_half(u32::from_be(acknowledged)),
        }
    }

    /// Returns true if the packet acknowledges the expected number, or one up to 64 KiB later.
    #[inline(always)]
    #[must_use]
    pub const fn acknowledges(self, expected: u16) -> bool {
        self.acknowledged.wrapping_sub(expected) <= 1
    }

    /// Returns true if the packet has the expected sequence number, or one up to 1 MiB later: what precedes it may be on its way.
    #[inline(always)]
    #[must_use]
    pub const fn continues_at(self, expected: u16) -> bool {
        self.sequence.wrapping_sub(expected) <= 16
    }
}

#[inline(always)]
const fn upper_half(number: u32) -> u16 {
    let [a, b, _, _] = number.to_be_bytes();
    u16::from_be_bytes([a, b])
}

/// The flags in a TCP header (RFC 9293 section 3.1).
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct TcpFlags(u8);

impl TcpFlags {
    const FIN: u8 = 0x01;
    const SYN: u8 = 0x02;
    const RST: u8 = 0x04;
    const ACK: u8 = 0x10;

    /// Creates flags from the byte in the header.
    #[inline(always)]
    #[must_use]
    pub const fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    /// Returns the flags that correspond to the type of the first chunk of an SCTP packet (RFC 9260 section 3.2). An INIT is alone
    /// in its packet. An ABORT behind another chunk isn't noticed; the association then ends by its timeout.
    #[inline(always)]
    #[must_use]
    pub const fn of_chunk(kind: u32) -> Self {
        const INIT: u32 = 1;
        const INIT_ACK: u32 = 2;
        const ABORT: u32 = 6;
        const SHUTDOWN: u32 = 7;
        const SHUTDOWN_ACK: u32 = 8;
        const SHUTDOWN_COMPLETE: u32 = 14;
        Self(match kind {
            INIT => Self::SYN,
            INIT_ACK => Self::SYN | Self::ACK,
            ABORT => Self::RST,
            SHUTDOWN | SHUTDOWN_ACK | SHUTDOWN_COMPLETE => Self::FIN | Self::ACK,
            _ => Self::ACK,
        })
    }

    /// Returns true if the packet opens a connection: it has SYN, and neither ACK nor RST.
    #[inline(always)]
    #[must_use]
    pub const fn opens(self) -> bool {
        self.0 & (Self::SYN | Self::ACK | Self::RST) == Self::SYN
    }

    /// Returns true if the packet opens a connection, or answers such a packet.
    #[inline(always)]
    #[must_use]
    pub const fn has_syn(self) -> bool {
        self.0 & Self::SYN != 0
    }

    /// Returns true if the sender sends no more data after this packet.
    #[inline(always)]
    #[must_use]
    pub const fn has_fin(self) -> bool {
        self.0 & Self::FIN != 0
    }

    /// Returns true if the packet resets the connection.
    #[inline(always)]
    #[must_use]
    pub const fn has_rst(self) -> bool {
        self.0 & Self::RST != 0
    }

    /// Returns true if the packet acknowledges data.
    #[inline(always)]
    #[must_use]
    pub const fn has_ack(self) -> bool {
        self.0 & Self::ACK != 0
    }
}

/// The reason why a packet has no ports to look up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unread {
    /// The packet is truncated, or its headers contradict each other.
    Malformed,
    /// An address is never translated, because packets from or to it are not forwarded: loopback (also against
    /// CVE-2020-8558), multicast, broadcast, link-local and unspecified addresses.
    NotForwarded,
    /// The packet is a fragment, which [`fragment::read`] reads.
    Fragment,
    /// The packet is a first fragment that is too short for the header of its protocol.
    ShortFragment,
    /// The packet is an ICMP or ICMPv6 message, which [`icmp::read_header`] reads if it is an error.
    Icmp,
    /// The packet is of another protocol, or its destination is only a stop on a route (IPv6 routing
    /// header), or its addresses are authenticated (AH).
    OtherProtocol,
}

/// The bits of the fragment field: an offset other than 0, and "more fragments" (RFC 791 section 3.1), without "don't fragment".
const FRAGMENT_V4: u32 = 0x3fff;
/// The bits of the offset in the fragment field.
const FRAGMENT_OFFSET_V4: u32 = 0x1fff;

const ICMP: u32 = 1;
const TCP: u32 = 6;
const UDP: u32 = 17;
const SCTP: u32 = 132;
const ICMP_V6: u32 = 58;

/// The lengths of the headers without options, in bytes.
pub(crate) const HEADER_V4: u32 = 20;
pub(crate) const HEADER_V6: u32 = 40;
pub(crate) const HEADER_TCP: u32 = 20;
pub(crate) const HEADER_UDP: u32 = 8;
/// The offset of the first chunk in an SCTP packet, and the type of chunks that carry data (RFC 9260 sections 3.1 and 3.3.1).
const CHUNK_SCTP: u32 = 12;
const CHUNK_OF_DATA: u32 = 0;
/// The common header and the header of the first chunk (RFC 9260 sections 3.1 and 3.2).
pub(crate) const HEADER_SCTP: u32 = 16;

/// Reads the headers of a packet. `family` is the version that the link layer names.
///
/// # Errors
///
/// Returns the reason if the packet has no ports to look up.
#[inline(always)]
pub fn read(bytes: &impl PacketBytes, family: Family) -> Result<Packet, Unread> {
    let network = read_network(bytes, family)?;
    if network.fragment.is_some() {
        return Err(Unread::Fragment);
    }
    read_packet(bytes, family, &network)
}

/// Returns the length of the transport header at an offset and of what follows it, which the network header states. Returns
/// `None` if the header can't be read, or doesn't state it (more than 64 KiB).
#[inline(always)]
pub fn transport_length(
    bytes: &impl PacketBytes,
    family: Family,
    transport_offset: u32,
) -> Option<u32> {
    let [first, second] = bytes.words::<2>(0)?;
    let length = match family {
        Family::V4 => u32::from_be(first) & 0xffff,
        Family::V6 => match u32::from_be(second) >> 16 {
            0 => 0,
            payload => HEADER_V6 + payload,
        },
    };
    length.checked_sub(transport_offset)
}

/// Reads the transport header behind a network header.
#[inline(always)]
fn read_packet(
    bytes: &impl PacketBytes,
    family: Family,
    network: &NetworkHeader,
) -> Result<Packet, Unread> {
    let transport = read_transport(bytes, network.protocol, network.transport_offset)?;
    // Bytes behind the packet's end are padding of the link layer.
    let least = network.transport_offset + transport.length;
    if network.length.is_some_and(|length| length < least) {
        return Err(Unread::Malformed);
    }
    Ok(Packet {
        family,
        source: network.source,
        destination: network.destination,
        source_port: transport.source_port,
        destination_port: transport.destination_port,
        protocol: transport.protocol,
        flags: transport.flags,
        transport_offset: network.transport_offset,
        is_fragment: network.fragment.is_some(),
    })
}

/// The fields of the network header.
struct NetworkHeader {
    source: Address,
    destination: Address,
    /// The number of the transport protocol.
    protocol: u32,
    transport_offset: u32,
    /// The length of the packet, which is unknown if it is more than 64 KiB.
    length: Option<u32>,
    /// The position in the whole packet, if this is a fragment.
    fragment: Option<Fragment>,
}

/// A fragment's position in the whole packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Fragment {
    /// The number that all fragments of the packet have.
    id: u32,
    /// True if the fragment begins with the transport header.
    is_first: bool,
}

/// The fields of the transport header.
struct TransportHeader {
    source_port: Port,
    destination_port: Port,
    protocol: Protocol,
    flags: TcpFlags,
    /// The length of the header without options.
    length: u32,
}

/// Reads the network header. The offset of the transport header means nothing if the packet is a fragment other than the
/// first.
#[inline(always)]
fn read_network(bytes: &impl PacketBytes, family: Family) -> Result<NetworkHeader, Unread> {
    match family {
        Family::V4 => read_v4(bytes),
        Family::V6 => read_v6(bytes),
    }
}

#[inline(always)]
fn read_v4(bytes: &impl PacketBytes) -> Result<NetworkHeader, Unread> {
    let header = bytes.words::<5>(0).ok_or(Unread::Malformed)?;
    let [first, second, protocol, source, destination] = header;
    let [first, second] = [u32::from_be(first), u32::from_be(second)];
    let transport_offset = ((first >> 24) & 0xf) * 4;
    if first >> 28 != 4 || transport_offset < HEADER_V4 {
        return Err(Unread::Malformed);
    }
    let (source, destination) = (
        Address::from_v4_word(source),
        Address::from_v4_word(destination),
    );
    check_addresses(source, destination)?;
    let fragment = (second & FRAGMENT_V4 != 0).then_some(Fragment {
        id: second >> 16,
        is_first: second & FRAGMENT_OFFSET_V4 == 0,
    });
    // Packets that the kernel has joined can be longer than 64 KiB; their length field is 0 (`iph_totlen` in
    // include/linux/ip.h).
    let length = first & 0xffff;
    Ok(NetworkHeader {
        source,
        destination,
        protocol: (u32::from_be(protocol) >> 16) & 0xff,
        transport_offset,
        length: (length != 0).then_some(length),
        fragment,
    })
}

#[inline(always)]
fn read_v6(bytes: &impl PacketBytes) -> Result<NetworkHeader, Unread> {
    let header = bytes.words::<10>(0).ok_or(Unread::Malformed)?;
    let [first, second, a, b, c, d, e, f, g, h] = header;
    if u32::from_be(first) >> 28 != 6 {
        return Err(Unread::Malformed);
    }
    let (source, destination) = (
        Address::from_words([a, b, c, d]),
        Address::from_words([e, f, g, h]),
    );
    // A v4-mapped address in an IPv6 packet (RFC 4038 section 4.2) would be mistaken for an IPv4 address.
    if source.is_v4() || destination.is_v4() {
        return Err(Unread::NotForwarded);
    }
    check_addresses(source, destination)?;
    let second = u32::from_be(second);
    let (protocol, transport_offset, fragment) = extensions::skip(bytes, (second >> 8) & 0xff)?;
    // As in IPv4, packets longer than 64 KiB have length 0.
    let payload = second >> 16;
    Ok(NetworkHeader {
        source,
        destination,
        protocol,
        transport_offset,
        length: (payload != 0).then_some(HEADER_V6 + payload),
        fragment,
    })
}

/// Reads the transport header.
#[inline(always)]
fn read_transport(
    bytes: &impl PacketBytes,
    protocol: u32,
    offset: u32,
) -> Result<TransportHeader, Unread> {
    let (ports, protocol, flags, length) = match protocol {
        TCP => {
            let header = bytes.words::<5>(offset).ok_or(Unread::Malformed)?;
            let [ports, sequence, acknowledged, flags, _] = header;
            let flags = u32::from_be(flags);
            if (flags >> 28) * 4 < HEADER_TCP {
                return Err(Unread::Malformed);
            }
            let [_, flags, _, _] = flags.to_be_bytes();
            let flags = TcpFlags::from_byte(flags);
            bytes.keep_numbers(TcpNumbers::read(sequence, acknowledged, flags));
            (ports, Protocol::TCP, flags, HEADER_TCP)
        }
        UDP => {
            let [ports, length] = bytes.words::<2>(offset).ok_or(Unread::Malformed)?;
            // 0 is the length of a datagram of more than 64 KiB (RFC 2675 section 4).
            let length = u32::from_be(length) >> 16;
            if length != 0 && length < HEADER_UDP {
                return Err(Unread::Malformed);
            }
            (ports, Protocol::UDP, TcpFlags::default(), HEADER_UDP)
        }
        SCTP => {
            let [ports, _, _] = bytes.words::<3>(offset).ok_or(Unread::Malformed)?;
            // If the kernel has yet to cut a packet into several ones, their chunks, which carry data, are not behind the header
            // in memory (`sctp_packet_pack` in net/sctp/output.c).
            let chunk = bytes.words::<1>(offset + CHUNK_SCTP);
            let kind = chunk.map_or(CHUNK_OF_DATA, |[word]| u32::from_be(word) >> 24);
            let flags = TcpFlags::of_chunk(kind);
            (ports, Protocol::SCTP, flags, HEADER_SCTP)
        }
        ICMP | ICMP_V6 => return Err(Unread::Icmp),
        _ => return Err(Unread::OtherProtocol),
    };
    let (source_port, destination_port) = ports_from(ports);
    Ok(TransportHeader {
        source_port,
        destination_port,
        protocol,
        flags,
        length,
    })
}

/// Returns the source and destination ports in the first word of a transport header, which is in network byte order.
#[inline(always)]
const fn ports_from(word: u32) -> (Port, Port) {
    let [a, b, c, d] = word.to_ne_bytes();
    (
        Port::from_network(u16::from_ne_bytes([a, b])),
        Port::from_network(u16::from_ne_bytes([c, d])),
    )
}

#[inline(always)]
fn check_addresses(source: Address, destination: Address) -> Result<(), Unread> {
    if is_forwarded(source) && is_forwarded(destination) {
        Ok(())
    } else {
        Err(Unread::NotForwarded)
    }
}

/// Returns true if routers forward packets from and to an address (RFC 6890): it is no loopback, multicast, broadcast,
/// link-local or unspecified address.
#[inline(always)]
#[must_use]
pub const fn is_forwarded(address: Address) -> bool {
    let [a, b, c, _] = address.words();
    if address.is_v4() {
        let word = u32::from_be(address.v4_word());
        let is_this_network_or_loopback = matches!(word >> 24, 0 | 127);
        let is_link_local = word >> 16 == 0xa9fe;
        // 224.0.0.0/4 is multicast, and 240.0.0.0/4 is reserved, except for the broadcast address.
        let is_multicast = word >> 28 == 0xe;
        !(is_this_network_or_loopback || is_link_local || is_multicast || word == u32::MAX)
    } else {
        let is_multicast = u32::from_be(a) >> 24 == 0xff;
        // `::`, `::1`, and all other addresses that begin with 96 zero bits.
        let is_special = (a | b | c) == 0;
        !(address.is_link_local() || is_multicast || is_special)
    }
}

const _: () = assert!(size_of::<TcpFlags>() == 1);

#[cfg(test)]
pub(crate) mod tests;
