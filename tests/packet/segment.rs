//! Builders for frames with correct checksums, and the check of such frames.

use std::{net::IpAddr, ops::Range};

use anyhow::{Result, ensure};
use tunnel_common::{
    addr::Protocol,
    flow::Endpoint,
    packet::{self, Family, Packet},
};
use tunnel_tests::checksum::sum_of;

/// The length of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The length of the network header, and the place of the addresses in it.
fn network(is_v4: bool) -> (usize, Range<usize>) {
    if is_v4 { (20, 12..20) } else { (40, 8..40) }
}

/// Builds a frame for this host: a loopback device has no link-layer address.
pub(crate) fn frame(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Result<Vec<u8>> {
    let is_v4 = from.is_ipv4();
    let mut frame = vec![0; 12];
    frame.extend(if is_v4 { [0x08, 0x00] } else { [0x86, 0xdd] });
    let length = u16::try_from(payload.len())?;
    let mut header = if is_v4 {
        let [a, b] = (20 + length).to_be_bytes();
        vec![0x45, 0, a, b, 0, 7, 0, 0, 64, protocol, 0, 0]
    } else {
        let [a, b] = length.to_be_bytes();
        vec![0x60, 0, 0, 0, a, b, protocol, 64]
    };
    header.extend(octets(from));
    header.extend(octets(to));
    if is_v4 {
        let sum = !sum_of(&[&header]);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    frame.extend(header);
    frame.extend(payload);
    Ok(frame)
}

/// Writes the checksum of a transport header or ICMP message.
fn complete(from: IpAddr, to: IpAddr, protocol: u8, message: &mut [u8], at: usize) -> Result<()> {
    let length = u16::try_from(message.len())?.to_be_bytes();
    let pseudo = [octets(from), octets(to), vec![0, protocol], length.to_vec()].concat();
    // ICMPv4 has no pseudo-header.
    let pseudo = if protocol == ICMP { &[] } else { &*pseudo };
    let sum = !sum_of(&[pseudo, message]);
    message[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    Ok(())
}

/// Returns the checksum of an SCTP packet whose checksum is 0 (RFC 9260 appendix A), bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = crc & 1;
            crc = (crc >> 1) ^ (0x82f6_3b78 & carry.wrapping_neg());
        }
    }
    !crc
}

/// The place of the checksum in an SCTP packet.
const SCTP_CHECKSUM: Range<usize> = 8..12;

/// Builds an SCTP packet with one chunk: INIT instead of SYN, and data otherwise.
fn sctp(mut bytes: Vec<u8>, (flags, payload): (u8, &[u8])) -> Result<Vec<u8>> {
    bytes.extend([1, 2, 3, 4, 0, 0, 0, 0, u8::from(flags == SYN), 3]);
    bytes.extend(u16::try_from(4 + payload.len())?.to_be_bytes());
    bytes.extend(payload);
    let sum = crc32c(&bytes);
    bytes[SCTP_CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    Ok(bytes)
}

/// Builds a TCP segment, UDP datagram or SCTP packet.
pub(crate) fn transport(
    from: Endpoint,
    to: Endpoint,
    protocol: Protocol,
    (flags, payload): (u8, &[u8]),
) -> Result<Vec<u8>> {
    let mut bytes = from.port.to_host().to_be_bytes().to_vec();
    bytes.extend(to.port.to_host().to_be_bytes());
    if protocol == Protocol::SCTP {
        return sctp(bytes, (flags, payload));
    }
    let at = if protocol == Protocol::TCP {
        bytes.extend([1, 2, 3, 4, 5, 6, 7, 8, 0x50, flags, 1, 0, 0, 0, 0, 0]);
        16
    } else {
        bytes.extend(u16::try_from(8 + payload.len())?.to_be_bytes());
        bytes.extend([0, 0]);
        6
    };
    bytes.extend(payload);
    let (from, to) = (from.address.to_ip(), to.address.to_ip());
    complete(from, to, protocol.number(), &mut bytes, at)?;
    Ok(bytes)
}

/// Builds a frame with a TCP segment, UDP datagram or SCTP packet.
pub(crate) fn segment(
    from: Endpoint,
    to: Endpoint,
    protocol: Protocol,
    content: (u8, &[u8]),
) -> Result<Vec<u8>> {
    let bytes = transport(from, to, protocol, content)?;
    let (from, to) = (from.address.to_ip(), to.address.to_ip());
    frame(from, to, protocol.number(), &bytes)
}

/// Builds a frame with an ICMP error about the packet in another frame, of which it quotes some bytes behind the network
/// header.
pub(crate) fn error_about(
    quoted: &[u8],
    from: IpAddr,
    kind: [u8; 2],
    length: usize,
) -> Result<Vec<u8>> {
    let (header, _) = network(from.is_ipv4());
    let quoted = &quoted[ETHERNET..];
    let [kind, code] = kind;
    let mut message = vec![kind, code, 0, 0, 0, 0, 5, 0];
    message.extend(&quoted[..quoted.len().min(header + length)]);
    let to = ends_of_packet(quoted)?.0.address.to_ip();
    let protocol = if from.is_ipv4() { ICMP } else { ICMP_V6 };
    complete(from, to, protocol, &mut message, 2)?;
    frame(from, to, protocol, &message)
}

/// Asserts that the checksums of a frame are correct, as its receiver checks them. Those of a packet that it quotes are
/// checked, too, if the packet is whole.
pub(crate) fn expect_correct(frame: &[u8]) -> Result<()> {
    expect_correct_packet(&frame[ETHERNET..], false)
}

fn expect_correct_packet(bytes: &[u8], is_quoted: bool) -> Result<()> {
    let is_v4 = bytes[0] >> 4 == 4;
    let (header, addresses) = network(is_v4);
    let protocol = bytes[if is_v4 { 9 } else { 6 }];
    let length = if is_v4 {
        usize::from(u16::from_be_bytes([bytes[2], bytes[3]]))
    } else {
        header + usize::from(u16::from_be_bytes([bytes[4], bytes[5]]))
    };
    ensure!(
        !is_v4 || sum_of(&[&bytes[..20]]) == 0xffff,
        "the sum of the header: {bytes:x?}"
    );
    if length > bytes.len() {
        return Ok(());
    }
    let message = &bytes[header..length];
    if protocol == Protocol::SCTP.number() {
        // Nobody verifies the checksum of a quoted packet, and the programs leave it.
        if is_quoted {
            return Ok(());
        }
        let mut unsummed = message.to_vec();
        unsummed[SCTP_CHECKSUM].fill(0);
        let sum = crc32c(&unsummed).to_le_bytes();
        ensure!(message[SCTP_CHECKSUM] == sum, "the sum: {bytes:x?}");
        return Ok(());
    }
    let size = u16::try_from(message.len())?.to_be_bytes();
    let pseudo = [&bytes[addresses], &[0, protocol], &size].concat();
    let pseudo = if protocol == ICMP { &[] } else { &*pseudo };
    ensure!(sum_of(&[pseudo, message]) == 0xffff, "the sum: {bytes:x?}");
    if matches!(protocol, ICMP | ICMP_V6) {
        expect_correct_packet(&message[8..], true)?;
    }
    Ok(())
}

/// Returns the ends of the packet in a frame.
pub(crate) fn ends(frame: &[u8]) -> Result<(Endpoint, Endpoint)> {
    ends_of_packet(&frame[ETHERNET..])
}

/// Returns the source and the destination of the ICMP error in a frame, and the ends of the packet that it quotes.
pub(crate) fn error_ends(frame: &[u8]) -> Result<([IpAddr; 2], (Endpoint, Endpoint))> {
    let bytes = &frame[ETHERNET..];
    let family = family_of(bytes);
    let read = packet::icmp::read_header(&bytes, family)
        .and_then(|header| {
            let quoted = packet::icmp::read_quoted(&bytes, family, header.quoted_offset())?;
            Ok((header, quoted))
        })
        .map_err(|unread| anyhow::anyhow!("no error: {unread:?}"))?;
    let (header, quoted) = read;
    let addresses = [header.source, header.destination].map(|address| address.to_ip());
    Ok((
        addresses,
        (quoted.source_endpoint(), quoted.destination_endpoint()),
    ))
}

fn family_of(bytes: &[u8]) -> Family {
    if bytes[0] >> 4 == 4 {
        Family::V4
    } else {
        Family::V6
    }
}

fn ends_of_packet(bytes: &[u8]) -> Result<(Endpoint, Endpoint)> {
    let read: Result<Packet, _> = packet::read(&bytes, family_of(bytes));
    let packet = read.map_err(|unread| anyhow::anyhow!("not read: {unread:?}"))?;
    Ok((packet.source_endpoint(), packet.destination_endpoint()))
}
