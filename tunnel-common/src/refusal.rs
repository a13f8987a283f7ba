//! Builds the packets that refuse a connection or a datagram, in the name of the address that the client has dialled: a
//! TCP reset (RFC 9293 section 3.10.7.1), or the error "port unreachable" of ICMP (RFC 792) or ICMPv6 (RFC 4443 section
//! 3.1).
//!
//! Only packets without IPv4 options and IPv6 extension headers are answered, so that every part of the answer has a
//! fixed place and size. Words of headers are in network byte order.

use crate::packet::{Family, HEADER_TCP, HEADER_UDP, HEADER_V4, HEADER_V6, Packet};

/// The size of a TCP header without options, in bytes.
pub const RESET_SIZE: u32 = HEADER_TCP;
/// The number of bytes of the transport header that an ICMP error contains. They include the ports, by which the sender
/// finds its socket.
pub const QUOTED_SIZE: u32 = HEADER_UDP;
/// The size of the header of an ICMP error, in bytes.
const ICMP_SIZE: u32 = 8;

const TCP: u32 = 6;
const ICMP: u32 = 1;
const ICMP_V6: u32 = 58;

/// The TTL of the answers, as the kernel's own (`net.ipv4.ip_default_ttl`).
const TTL: u32 = 64;

/// The flags RST and ACK in the word of a TCP header that also contains the header's length, which is 5 words.
const RESET: u32 = 5 << 28 | 0x14 << 16;

/// The answers that were sent in a second: the first value of the array `packet_state`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Refusals(u64);

impl Refusals {
    /// Converts a stored word.
    #[inline(always)]
    #[must_use]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Returns the word to store.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Returns the value after one more answer at a time in seconds. Returns `None` if the limit of answers in this second
    /// is reached.
    #[inline(always)]
    #[must_use]
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "two numbers in one word"
    )]
    pub const fn next(self, now: u32, limit: u32) -> Option<Self> {
        let (second, sent) = ((self.0 >> 32) as u32, self.0 as u32);
        let sent = if second == now { sent } else { 0 };
        if sent >= limit {
            return None;
        }
        Some(Self((now as u64) << 32 | (sent + 1) as u64))
    }
}

/// Returns true if a packet's transport header begins right behind the network header, so that it can be answered.
#[inline(always)]
#[must_use]
pub const fn is_answerable(packet: &Packet) -> bool {
    packet.transport_offset == header_size(packet.family)
}

/// Returns the size of a network header without options, in bytes.
#[inline(always)]
#[must_use]
pub const fn header_size(family: Family) -> u32 {
    match family {
        Family::V4 => HEADER_V4,
        Family::V6 => HEADER_V6,
    }
}

/// Returns the number of bytes that an ICMP error has before the packet that it quotes.
#[inline(always)]
#[must_use]
pub const fn error_size(family: Family) -> u32 {
    header_size(family) + ICMP_SIZE
}

/// The state of a packet's transport checksum.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Checksum {
    /// The field contains the checksum, or 0 for none.
    Complete,
    /// The field contains only the sum of the pseudo-header, until the kernel or the network card adds that of the rest
    /// (`CHECKSUM_PARTIAL` in include/linux/skbuff.h).
    Partial,
}

/// A ones' complement sum of 16-bit words (RFC 1071). The byte order makes no difference.
#[derive(Clone, Copy)]
struct Sum(u64);

impl Sum {
    #[inline(always)]
    fn of(words: &[u32]) -> Self {
        Self(words.iter().map(|word| u64::from(*word)).sum())
    }

    #[inline(always)]
    const fn and(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// Returns the sum in 16 bits.
    #[inline(always)]
    const fn fold(self) -> u32 {
        let sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        #[expect(
            clippy::as_conversions,
            clippy::cast_possible_truncation,
            reason = "the carries have been added"
        )]
        let folded = sum as u32;
        folded
    }

    /// Returns the checksum.
    #[inline(always)]
    const fn checksum(self) -> u32 {
        self.fold() ^ 0xffff
    }

    /// Returns the sum of the pseudo-header of an answer with this protocol and length. The leading words of IPv4
    /// addresses add nothing.
    #[inline(always)]
    fn of_pseudo_header(packet: &Packet, protocol: u32, length: u32) -> Self {
        let (from, to) = (packet.destination.words(), packet.source.words());
        let last = Self::of(&[(protocol << 16 | length).to_be()]);
        Self::of(&from).and(Self::of(&to)).and(last)
    }
}

/// Returns a word whose first or last half is a sum, which has the byte order of this machine.
#[inline(always)]
const fn half(sum: u32, is_first: bool) -> u32 {
    if cfg!(target_endian = "little") == is_first {
        sum
    } else {
        sum << 16
    }
}

/// Returns the IPv4 header of an answer to a packet.
#[inline(always)]
#[must_use]
pub fn header_v4(packet: &Packet, answer: Answer) -> [u32; 5] {
    let (protocol, length) = answer.protocol_and_length(Family::V4);
    // "Don't fragment", so no identification is needed (RFC 6864 section 4.1).
    let header = [
        (0x45 << 24 | (HEADER_V4 + length)).to_be(),
        0x4000_u32.to_be(),
        (TTL << 24 | protocol << 16).to_be(),
        packet.destination.v4_word(),
        packet.source.v4_word(),
    ];
    let checksum = half(Sum::of(&header).checksum(), false);
    let [first, second, third, from, to] = header;
    [first, second, third | checksum, from, to]
}

/// Returns the IPv6 header of an answer to a packet.
#[inline(always)]
#[must_use]
pub const fn header_v6(packet: &Packet, answer: Answer) -> [u32; 10] {
    let (protocol, length) = answer.protocol_and_length(Family::V6);
    let ([a, b, c, d], [e, f, g, h]) = (packet.destination.words(), packet.source.words());
    let first = (6_u32 << 28).to_be();
    let second = (length << 16 | protocol << 8 | TTL).to_be();
    [first, second, a, b, c, d, e, f, g, h]
}

/// An answer that refuses a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Answer {
    /// A TCP reset.
    Reset,
    /// An ICMP error.
    Error,
}

impl Answer {
    /// Returns the number of the protocol in the network header, and the number of bytes after that header.
    #[inline(always)]
    const fn protocol_and_length(self, family: Family) -> (u32, u32) {
        match (self, family) {
            (Self::Reset, Family::V4 | Family::V6) => (TCP, RESET_SIZE),
            (Self::Error, Family::V4) => (ICMP, ICMP_SIZE + HEADER_V4 + QUOTED_SIZE),
            (Self::Error, Family::V6) => (ICMP_V6, ICMP_SIZE + HEADER_V6 + QUOTED_SIZE),
        }
    }
}

/// Returns the TCP header of the reset that refuses a connection. `sequence` is the sequence number in the packet that opens
/// it, in network byte order.
#[inline(always)]
#[must_use]
pub fn reset(packet: &Packet, sequence: u32, checksum: Checksum) -> [u32; 5] {
    let (from, to) = (packet.destination_port, packet.source_port);
    let [a, b] = from.to_network().to_ne_bytes();
    let [c, d] = to.to_network().to_ne_bytes();
    let ports = u32::from_ne_bytes([a, b, c, d]);
    let acknowledged = u32::from_be(sequence).wrapping_add(1).to_be();
    let header = [ports, 0, acknowledged, RESET.to_be()];
    let pseudo_header = Sum::of_pseudo_header(packet, TCP, RESET_SIZE);
    let sum = match checksum {
        Checksum::Complete => pseudo_header.and(Sum::of(&header)).checksum(),
        Checksum::Partial => pseudo_header.fold(),
    };
    let [first, second, third, fourth] = header;
    [first, second, third, fourth, half(sum, true)]
}

/// Returns the header of the ICMP error that refuses a datagram. `header` is the datagram's network header, and `quoted` the
/// beginning of its transport header.
#[inline(always)]
#[must_use]
pub fn error<const WORDS: usize>(
    packet: &Packet,
    header: &[u32; WORDS],
    quoted: [u32; 2],
    checksum: Checksum,
) -> [u32; 2] {
    let quoted = match checksum {
        Checksum::Complete => Sum::of(&quoted),
        // The checksum will make the sum of what is quoted the complement of what is in the field now.
        Checksum::Partial => {
            let [_, second] = quoted;
            let [_, _, a, b] = second.to_ne_bytes();
            Sum(u64::from(u16::from_ne_bytes([a, b]) ^ 0xffff))
        }
    };
    let (kind, pseudo_header) = match packet.family {
        Family::V4 => (3 << 24 | 3 << 16, Sum(0)),
        Family::V6 => {
            let (protocol, length) = Answer::Error.protocol_and_length(Family::V6);
            let pseudo_header = Sum::of_pseudo_header(packet, protocol, length);
            (1 << 24 | 4 << 16, pseudo_header)
        }
    };
    let kind = u32::to_be(kind);
    let sum = Sum::of(&[kind]).and(pseudo_header);
    let sum = sum.and(Sum::of(header)).and(quoted);
    [kind | half(sum.checksum(), false), 0]
}

#[cfg(test)]
mod tests;
