//! Replaces the source and the destination of a packet, and updates its checksums, through any implementation of
//! [`PacketEdits`].
//!
//! Checksums are updated by differences (RFC 1624): the new checksum depends only on the old one and on what changes.
//! The network stack needs this, because the checksum of a packet on its way out may be incomplete until the network
//! card completes it, and because the packet's data need not be read.

use crate::{
    addr::{Address, Protocol},
    packet::{
        Family, HEADER_V4, Packet,
        icmp::{self, ErrorHeader},
    },
};

/// A change of a checksum: the ones' complement sum of the new words minus that of the old ones.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Difference(u32);

impl Difference {
    /// Returns the difference, as the kernel's helpers take it (`bpf_csum_diff` returns the same).
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// Returns the difference between words, which are in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn of_words<const WORDS: usize>(from: [u32; WORDS], to: [u32; WORDS]) -> Self {
        let mut sum = 0;
        let mut word = 0;
        while word < WORDS {
            sum += widen(!from[word]) + widen(to[word]);
            word += 1;
        }
        Self(fold(sum))
    }

    /// Returns both differences together.
    #[inline(always)]
    const fn plus(self, other: Self) -> Self {
        Self(fold(widen(self.0) + widen(other.0)))
    }

    /// Returns a checksum with this difference (RFC 1624, equation 3).
    #[inline(always)]
    #[must_use]
    const fn applied_to(self, checksum: u16) -> u16 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::as_conversions,
            reason = "the carries have been added"
        )]
        let checksum = !fold_half(widen_half(!checksum) + widen(self.0)) as u16;
        checksum
    }
}

/// Adds the carries of a sum in ones' complement arithmetic, so that 32 bits are left.
#[inline(always)]
const fn fold(sum: u64) -> u32 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::as_conversions,
        reason = "the carries have been added"
    )]
    let folded = sum as u32;
    folded
}

/// Adds the carries of a sum in ones' complement arithmetic, so that 16 bits are left.
#[inline(always)]
const fn fold_half(sum: u64) -> u64 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum & 0xffff) + (sum >> 16)
}

#[expect(clippy::as_conversions, reason = "u64::from is not const")]
const fn widen(word: u32) -> u64 {
    word as u64
}

#[expect(clippy::as_conversions, reason = "u64::from is not const")]
const fn widen_half(half: u16) -> u64 {
    half as u64
}

/// The checksum in a transport header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TransportChecksum {
    /// Its offset from the network header.
    pub offset: u32,
    /// True if the value 0 means that there is no checksum, as in UDP (RFC 768). Such a value stays, and a checksum that
    /// becomes 0 is written as 0xffff (`BPF_F_MARK_MANGLED_0`).
    pub zero_means_none: bool,
}

/// The changes of a packet that [`replace`] makes. Offsets are relative to the network header.
pub trait PacketEdits {
    /// The error if the packet can't be changed.
    type Error;

    /// Updates a transport checksum because addresses have changed, which the checksum covers as part of the
    /// pseudo-header (`BPF_F_PSEUDO_HDR`).
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_for_addresses(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), Self::Error>;

    /// Updates a transport checksum because ports have changed.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_for_ports(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), Self::Error>;

    /// Updates the checksum of the SCTP packet whose header is at an offset, because its ports have changed. `change` is the
    /// difference of the word of ports (XOR), in network byte order. The network card computes a checksum of 0, so that stays.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_sctp(&mut self, offset: u32, change: u32) -> Result<(), Self::Error>;

    /// Reads 16 bits in network byte order.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet is shorter.
    fn half(&self, offset: u32) -> Result<u16, Self::Error>;

    /// Writes 16-bit words in network byte order, together with which a checksum changes, so that the sum over the whole
    /// packet stays.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn write<const HALVES: usize>(
        &mut self,
        offset: u32,
        halves: [u16; HALVES],
    ) -> Result<(), Self::Error>;

    /// Writes an IPv6 address. IPv6 headers have no checksum, so the sum over the whole packet changes, which the
    /// kernel may hold beside the packet (`CHECKSUM_COMPLETE`, `BPF_F_RECOMPUTE_CSUM`).
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn write_address_v6(&mut self, offset: u32, address: Address) -> Result<(), Self::Error>;
}

/// The offsets of fields in an IPv4 header (RFC 791 section 3.1). The addresses follow the checksum.
const CHECKSUM_V4: u32 = 10;
/// The offsets of fields in an IPv6 header (RFC 8200 section 3).
const SOURCE_V6: u32 = 8;
const DESTINATION_V6: u32 = 24;

/// Replaces addresses and ports of a packet. Both packets have the same family, protocol and transport offset.
///
/// # Errors
///
/// Returns the error of the first change that fails. The packet is then damaged and must be dropped.
#[inline(always)]
pub fn replace<T: PacketEdits>(edits: &mut T, from: &Packet, to: &Packet) -> Result<(), T::Error> {
    let checksum = TransportChecksum {
        offset: from.transport_offset + checksum_offset(from.protocol),
        zero_means_none: from.protocol == Protocol::UDP,
    };
    let covers_addresses = from.protocol != Protocol::SCTP;
    let (old_ports, ports) = (ports_of(from), ports_of(to));
    let has_new_port = old_ports != ports;
    if has_new_port {
        if covers_addresses {
            edits.update_for_ports(checksum, Difference::of_words([old_ports], [ports]))?;
        } else {
            edits.update_sctp(from.transport_offset, old_ports ^ ports)?;
        }
    }
    match from.family {
        Family::V4 => {
            let old = [from.source.v4_word(), from.destination.v4_word()];
            let new = [to.source.v4_word(), to.destination.v4_word()];
            let by = Difference::of_words(old, new);
            if covers_addresses {
                edits.update_for_addresses(checksum, by)?;
            }
            if from.transport_offset == HEADER_V4 {
                // The ports follow the addresses.
                let header_checksum = by.applied_to(edits.half(CHECKSUM_V4)?);
                let [[a, b], [c, d], [e, f]] = [halves(new[0]), halves(new[1]), halves(ports)];
                return edits.write(CHECKSUM_V4, [header_checksum, a, b, c, d, e, f]);
            }
            write_addresses_v4(edits, 0, by, new)?;
        }
        Family::V6 => {
            let (old, new) = ([from.source, from.destination], [to.source, to.destination]);
            replace_addresses_v6(edits, covers_addresses.then_some(checksum), old, new)?;
        }
    }
    if has_new_port {
        edits.write(from.transport_offset, halves(ports))?;
    }
    Ok(())
}

/// Writes both addresses of the IPv4 header at an offset, and its checksum, which changes by a difference.
#[inline(always)]
fn write_addresses_v4<T: PacketEdits>(
    edits: &mut T,
    header: u32,
    by: Difference,
    [source, destination]: [u32; 2],
) -> Result<(), T::Error> {
    let checksum = by.applied_to(edits.half(header + CHECKSUM_V4)?);
    let [[a, b], [c, d]] = [halves(source), halves(destination)];
    edits.write(header + CHECKSUM_V4, [checksum, a, b, c, d])
}

/// Replaces both addresses of the IPv4 header at an offset. Returns the difference.
#[inline(always)]
fn replace_addresses_v4<T: PacketEdits>(
    edits: &mut T,
    header: u32,
    [old_source, old_destination]: [Address; 2],
    [source, destination]: [Address; 2],
) -> Result<Difference, T::Error> {
    let old = [old_source.v4_word(), old_destination.v4_word()];
    let new = [source.v4_word(), destination.v4_word()];
    let by = Difference::of_words(old, new);
    write_addresses_v4(edits, header, by, new)?;
    Ok(by)
}

/// Replaces the addresses of an IPv6 header, which a checksum may cover as part of the pseudo-header.
#[inline(always)]
fn replace_addresses_v6<T: PacketEdits>(
    edits: &mut T,
    checksum: Option<TransportChecksum>,
    [old_source, old_destination]: [Address; 2],
    [source, destination]: [Address; 2],
) -> Result<(), T::Error> {
    for (offset, old, new) in [
        (SOURCE_V6, old_source, source),
        (DESTINATION_V6, old_destination, destination),
    ] {
        if old != new {
            if let Some(checksum) = checksum {
                let by = Difference::of_words(old.words(), new.words());
                edits.update_for_addresses(checksum, by)?;
            }
            edits.write_address_v6(offset, new)?;
        }
    }
    Ok(())
}

/// Replaces the addresses of a fragment other than the first, which contains no checksum of the transport protocol.
///
/// # Errors
///
/// Returns the error of the first change that fails. The packet is then damaged and must be dropped.
#[inline(always)]
pub fn replace_in_fragment<T: PacketEdits>(
    edits: &mut T,
    old: [Address; 2],
    new: [Address; 2],
) -> Result<(), T::Error> {
    if old[0].is_v4() {
        return replace_addresses_v4(edits, 0, old, new).map(drop);
    }
    let ([old_source, old_destination], [source, destination]) = (old, new);
    if old_source != source {
        edits.write_address_v6(SOURCE_V6, source)?;
    }
    if old_destination != destination {
        edits.write_address_v6(DESTINATION_V6, destination)?;
    }
    Ok(())
}

/// Replaces addresses of an ICMP error with this header, and the ends of the packet that it quotes. Both packets have the same
/// family, protocol and transport offset.
///
/// The checksum of the quoted transport header is kept up with, as far as the header is quoted. Nobody verifies it, and it
/// may be incomplete; the checksum of the error covers it.
///
/// # Errors
///
/// Returns the error of the first change that fails. The packet is then damaged and must be dropped.
#[inline(always)]
pub fn replace_error<T: PacketEdits>(
    edits: &mut T,
    header: &ErrorHeader,
    addresses: [Address; 2],
    (from, to): (&Packet, &Packet),
) -> Result<(), T::Error> {
    let checksum = TransportChecksum {
        offset: header.offset + icmp::CHECKSUM,
        zero_means_none: false,
    };
    let quoted = header.quoted_offset();
    let old_addresses = [header.source, header.destination];
    let (old, new) = ([from.source, from.destination], [to.source, to.destination]);
    let by = match from.family {
        Family::V4 => {
            replace_addresses_v4(edits, 0, old_addresses, addresses)?;
            // The sum over the quoted header stays, because it contains a checksum of its own.
            replace_addresses_v4(edits, quoted, old, new)?
        }
        Family::V6 => {
            replace_addresses_v6(edits, Some(checksum), old_addresses, addresses)?;
            replace_quoted_addresses_v6(edits, checksum, quoted, (old, new))?
        }
    };
    replace_quoted_transport(edits, checksum, by, (from, to))
}

/// Replaces the addresses of the IPv6 header that an ICMP error with this checksum quotes at an offset. Returns the difference.
#[inline(always)]
fn replace_quoted_addresses_v6<T: PacketEdits>(
    edits: &mut T,
    error_checksum: TransportChecksum,
    header: u32,
    ([old_source, old_destination], [source, destination]): ([Address; 2], [Address; 2]),
) -> Result<Difference, T::Error> {
    let mut sum = Difference::default();
    for (offset, old, new) in [
        (SOURCE_V6, old_source, source),
        (DESTINATION_V6, old_destination, destination),
    ] {
        if old != new {
            let by = Difference::of_words(old.words(), new.words());
            edits.update_for_ports(error_checksum, by)?;
            edits.write(header + offset, address_halves(new))?;
            sum = sum.plus(by);
        }
    }
    Ok(sum)
}

/// Replaces the ports in the transport header that an ICMP error with this checksum quotes. `by` is the difference of the
/// addresses.
#[inline(always)]
fn replace_quoted_transport<T: PacketEdits>(
    edits: &mut T,
    error_checksum: TransportChecksum,
    by: Difference,
    (from, to): (&Packet, &Packet),
) -> Result<(), T::Error> {
    let (old_ports, ports) = (ports_of(from), ports_of(to));
    let by_ports = Difference::of_words([old_ports], [ports]);
    edits.update_for_ports(error_checksum, by_ports)?;
    edits.write(from.transport_offset, halves(ports))?;
    // Nobody verifies the quoted checksum of SCTP.
    if from.protocol == Protocol::SCTP {
        return Ok(());
    }
    let offset = from.transport_offset + checksum_offset(from.protocol);
    // The quotation may end before the checksum.
    let Ok(old) = edits.half(offset) else {
        return Ok(());
    };
    let is_udp = from.protocol == Protocol::UDP;
    if is_udp && old == 0 {
        return Ok(());
    }
    let new = match by.plus(by_ports).applied_to(old) {
        0 if is_udp => u16::MAX,
        new => new,
    };
    let by_checksum = Difference::of_words([u32::from(old)], [u32::from(new)]);
    edits.update_for_ports(error_checksum, by_checksum)?;
    edits.write(offset, [new])
}

/// Returns the ports as in a transport header, in network byte order.
#[inline(always)]
const fn ports_of(packet: &Packet) -> u32 {
    let [a, b] = packet.source_port.to_network().to_ne_bytes();
    let [c, d] = packet.destination_port.to_network().to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

/// Returns a word's halves, in the order of memory.
#[inline(always)]
const fn halves(word: u32) -> [u16; 2] {
    let [a, b, c, d] = word.to_ne_bytes();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
}

/// Returns the halves of an IPv6 address's words, in the order of memory.
#[inline(always)]
const fn address_halves(address: Address) -> [u16; 8] {
    let [w, x, y, z] = address.words();
    let [[a, b], [c, d], [e, f], [g, h]] = [halves(w), halves(x), halves(y), halves(z)];
    [a, b, c, d, e, f, g, h]
}

/// Returns the offset of the checksum in a transport header (RFC 9293 section 3.1, RFC 768).
#[inline(always)]
const fn checksum_offset(protocol: Protocol) -> u32 {
    if protocol.is_tcp() { 16 } else { 6 }
}

#[cfg(test)]
mod tests;
