//! Replaces the source or the destination of a packet, and updates its checksums, through any implementation of
//! [`PacketEdits`].
//!
//! Checksums are updated by differences (RFC 1624): the new checksum depends only on the old one and on what changes.
//! The network stack needs this, because the checksum of a packet on its way out may be incomplete until the network
//! card completes it, and because the packet's data need not be read.

use crate::{
    addr::{Address, Port, Protocol},
    packet::{Family, Packet},
};

/// One end of a packet's connection or flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// The sender.
    Source,
    /// The receiver.
    Destination,
}

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

    /// Returns the difference between two addresses. The leading words of IPv4 addresses are equal and cancel out.
    #[inline(always)]
    #[must_use]
    pub const fn of_addresses(from: Address, to: Address) -> Self {
        let [a, b, c, d] = from.words();
        let [e, f, g, h] = to.words();
        Self(fold([!a, !b, !c, !d, e, f, g, h]))
    }

    /// Returns the difference between two ports.
    #[inline(always)]
    #[must_use]
    pub const fn of_ports(from: Port, to: Port) -> Self {
        let [a, b] = from.to_network().to_ne_bytes();
        let [c, d] = to.to_network().to_ne_bytes();
        let from = u32::from_ne_bytes([a, b, 0, 0]);
        let to = u32::from_ne_bytes([c, d, 0, 0]);
        Self(fold([!from, to, 0, 0, 0, 0, 0, 0]))
    }
}

/// Adds words in ones' complement arithmetic. The result has 32 bits.
#[inline(always)]
const fn fold([a, b, c, d, e, f, g, h]: [u32; 8]) -> u32 {
    // A wrapping sum with the carries added at the end.
    let sum = widen(a) + widen(b) + widen(c) + widen(d) + widen(e) + widen(f) + widen(g) + widen(h);
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

#[expect(clippy::as_conversions, reason = "u64::from is not const")]
const fn widen(word: u32) -> u64 {
    word as u64
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

    /// Updates the checksum of an IPv4 header.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_header_checksum(&mut self, offset: u32, by: Difference) -> Result<(), Self::Error>;

    /// Updates a transport checksum because an address has changed, which the checksum covers as part of the
    /// pseudo-header (`BPF_F_PSEUDO_HDR`).
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_for_address(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), Self::Error>;

    /// Updates a transport checksum because a port has changed.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn update_for_port(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), Self::Error>;

    /// Writes an IPv4 address.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn write_address_v4(&mut self, offset: u32, address: Address) -> Result<(), Self::Error>;

    /// Writes an IPv6 address. IPv6 headers have no checksum, so the sum over the whole packet changes, which the
    /// kernel may hold beside the packet (`CHECKSUM_COMPLETE`, `BPF_F_RECOMPUTE_CSUM`).
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn write_address_v6(&mut self, offset: u32, address: Address) -> Result<(), Self::Error>;

    /// Writes a port.
    ///
    /// # Errors
    ///
    /// Returns an error if the packet can't be changed.
    fn write_port(&mut self, offset: u32, port: Port) -> Result<(), Self::Error>;
}

/// The offset of the checksum in an IPv4 header (RFC 791 section 3.1).
const HEADER_CHECKSUM: u32 = 10;

/// Replaces the address and the port of one end of a packet. `packet` contains the values before the change, and the new
/// address is of the same family.
///
/// # Errors
///
/// Returns the error of the first change that fails. The packet is then damaged and must be dropped.
#[inline(always)]
pub fn replace<T: PacketEdits>(
    edits: &mut T,
    packet: &Packet,
    end: End,
    (address, port): (Address, Port),
) -> Result<(), T::Error> {
    let (old_address, old_port, port_offset) = match end {
        End::Source => (packet.source, packet.source_port, 0),
        End::Destination => (packet.destination, packet.destination_port, 2),
    };
    let checksum = TransportChecksum {
        offset: packet.transport_offset + checksum_offset(packet.protocol),
        zero_means_none: packet.protocol == Protocol::UDP,
    };
    if old_address != address {
        let by = Difference::of_addresses(old_address, address);
        edits.update_for_address(checksum, by)?;
        match packet.family {
            Family::V4 => {
                edits.update_header_checksum(HEADER_CHECKSUM, by)?;
                edits.write_address_v4(address_offset(packet.family, end), address)?;
            }
            Family::V6 => edits.write_address_v6(address_offset(packet.family, end), address)?,
        }
    }
    if old_port != port {
        edits.update_for_port(checksum, Difference::of_ports(old_port, port))?;
        edits.write_port(packet.transport_offset + port_offset, port)?;
    }
    Ok(())
}

/// Returns the offset of the checksum in a transport header (RFC 9293 section 3.1, RFC 768).
#[inline(always)]
const fn checksum_offset(protocol: Protocol) -> u32 {
    if protocol.is_tcp() { 16 } else { 6 }
}

/// Returns the offset of an address in the network header (RFC 791 section 3.1, RFC 8200 section 3).
#[inline(always)]
const fn address_offset(family: Family, end: End) -> u32 {
    match (family, end) {
        (Family::V4, End::Source) => 12,
        (Family::V4, End::Destination) => 16,
        (Family::V6, End::Source) => 8,
        (Family::V6, End::Destination) => 24,
    }
}

#[cfg(test)]
mod tests;
