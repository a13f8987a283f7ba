use core::net::{IpAddr, Ipv6Addr};

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::crc32c::tests::crc32c;

/// The content of a packet to build.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub(crate) source: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
    pub(crate) protocol: Protocol,
    /// IPv4 options, in words, or the IPv6 extension headers: the number of each, and the words after its first two.
    pub(crate) options: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

impl Content {
    pub(crate) fn family(&self) -> Family {
        if self.source.0.is_ipv4() {
            Family::V4
        } else {
            Family::V6
        }
    }

    /// Returns the offset of the transport header.
    pub(crate) fn transport_offset(&self) -> usize {
        match self.family() {
            Family::V4 => 20 + 4 * self.options.len(),
            Family::V6 => 40 + 16 * self.options.len(),
        }
    }

    /// Returns the packet's bytes, with checksums of 0.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut bytes = match (self.source.0, self.destination.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let words = 5 + self.options.len();
                let length = u16::try_from(words * 4 + transport.len()).expect("short");
                let mut bytes = vec![0x40 | u8::try_from(words).expect("at most 15"), 0];
                bytes.extend(length.to_be_bytes());
                bytes.extend([0, 7, 0x40, 0, 64, self.protocol.number(), 0, 0]);
                bytes.extend(source.octets().into_iter().chain(destination.octets()));
                bytes.extend(self.options.iter().flat_map(|option| [*option; 4]));
                bytes
            }
            (source, destination) => {
                let octets = |ip| match ip {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                let length = self.options.len() * 16 + transport.len();
                let next = |at: usize| {
                    let number = self.options.get(at).copied();
                    number.unwrap_or_else(|| self.protocol.number())
                };
                let mut bytes = vec![0x60, 0, 0, 0];
                bytes.extend(u16::try_from(length).expect("short").to_be_bytes());
                bytes.extend([next(0), 64]);
                bytes.extend(octets(source).into_iter().chain(octets(destination)));
                for at in 0..self.options.len() {
                    bytes.extend([next(at + 1), 1, 0, 0]);
                    bytes.extend([0; 12]);
                }
                bytes
            }
        };
        bytes.extend(transport);
        bytes
    }

    fn transport(&self) -> Vec<u8> {
        let ports = [self.source.1, self.destination.1];
        let mut bytes: Vec<u8> = ports.iter().flat_map(|port| port.to_be_bytes()).collect();
        if self.protocol == Protocol::TCP {
            bytes.extend([1, 2, 3, 4, 5, 6, 7, 8, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        } else if self.protocol == Protocol::SCTP {
            // The tag, the checksum, and the header of a chunk of data.
            let length = u16::try_from(4 + self.payload.len()).expect("short");
            bytes.extend([1, 2, 3, 4, 0, 0, 0, 0, 0, 3]);
            bytes.extend(length.to_be_bytes());
        } else {
            let length = u16::try_from(8 + self.payload.len()).expect("short");
            bytes.extend(length.to_be_bytes());
            bytes.extend([0, 0]);
        }
        bytes.extend(&self.payload);
        bytes
    }
}

pub(crate) fn folded(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("folded")
}

/// Returns the ones' complement sum of bytes, two at a time (RFC 1071).
pub(crate) fn sum_of(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks(2);
    pairs
        .map(|pair| {
            u64::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum()
}

/// Computes the checksums of a packet from all of its bytes, and writes them.
pub(crate) fn complete(content: &Content, bytes: &mut [u8], has_udp_checksum: bool) {
    let at = content.transport_offset();
    let (address, is_v4) = match content.family() {
        Family::V4 => (12..20, true),
        Family::V6 => (8..40, false),
    };
    if is_v4 {
        let sum = !folded(sum_of(&bytes[..at]));
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    if content.protocol == Protocol::SCTP {
        let sum = crc32c(&bytes[at..]);
        bytes[at + 8..at + 12].copy_from_slice(&sum.to_le_bytes());
        return;
    }
    let is_udp = content.protocol == Protocol::UDP;
    if is_udp && !has_udp_checksum {
        return;
    }
    let offset = at + if is_udp { 6 } else { 16 };
    let length = u64::try_from(bytes.len() - at).expect("short");
    let pseudo = sum_of(&bytes[address]) + u64::from(content.protocol.number()) + length;
    let sum = match !folded(pseudo + sum_of(&bytes[at..])) {
        0 if is_udp => 0xffff,
        sum => sum,
    };
    bytes[offset..offset + 2].copy_from_slice(&sum.to_be_bytes());
}

/// All protocols that are translated.
pub(crate) const ALL: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn content(is_v4: bool, protocol: Protocol) -> Content {
    let (source, destination) = if is_v4 {
        ("203.0.113.9", "192.0.2.1")
    } else {
        ("2001:db8::9", "fd00::1")
    };
    Content {
        source: (ip(source), 40_000),
        destination: (ip(destination), 443),
        protocol,
        options: Vec::new(),
        payload: b"hello".to_vec(),
    }
}

/// Returns addresses of one family, ports, TCP or UDP, options and a payload.
pub(crate) fn any_content() -> impl Strategy<Value = Content> {
    any_content_of(&[Protocol::TCP, Protocol::UDP])
}

/// Returns addresses of one family, ports, one of the protocols, options and a payload.
pub(crate) fn any_content_of(protocols: &'static [Protocol]) -> impl Strategy<Value = Content> {
    let v4 = || any::<[u8; 3]>().prop_map(|[a, b, c]| IpAddr::from([10, a, b, c]));
    let v6 = || {
        let address =
            any::<u64>().prop_map(|low| Ipv6Addr::from(0xfd00_u128 << 112 | u128::from(low)));
        address.prop_map(IpAddr::V6)
    };
    // No operation; hop-by-hop options, destination options.
    let v4_options = vec(Just(1_u8), 0..=10);
    let v6_options = vec(prop_oneof![Just(0_u8), Just(60)], 0..7);
    let pair = prop_oneof![
        (v4(), v4(), v4_options).prop_map(|(a, b, options)| (a, b, options)),
        (v6(), v6(), v6_options).prop_map(|(a, b, options)| (a, b, options)),
    ];
    let protocol = proptest::sample::select(protocols);
    let payload = vec(any::<u8>(), 0..64);
    (pair, any::<[u16; 2]>(), protocol, payload).prop_map(
        |((source, destination, options), [from, to], protocol, payload)| Content {
            source: (source, from),
            destination: (destination, to),
            protocol,
            options,
            payload,
        },
    )
}

fn read_bytes(bytes: &[u8], family: Family) -> Result<Packet, Unread> {
    read(&bytes, family)
}

proptest! {
    #[test]
    fn a_packet_is_read_as_it_was_built_and_not_at_all_if_a_header_is_cut(
        content in any_content_of(&ALL),
    ) {
        let bytes = content.bytes();
        let packet = read_bytes(&bytes, content.family()).expect("a packet");

        prop_assert_eq!(packet.source.to_ip(), content.source.0);
        prop_assert_eq!(packet.destination.to_ip(), content.destination.0);
        prop_assert_eq!(packet.source_port.to_host(), content.source.1);
        prop_assert_eq!(packet.destination_port.to_host(), content.destination.1);
        prop_assert_eq!(packet.protocol, content.protocol);
        prop_assert_eq!(packet.transport_offset as usize, content.transport_offset());

        let header = match content.protocol {
            Protocol::TCP => 20,
            // The chunks may be elsewhere.
            Protocol::SCTP => 12,
            _ => 8,
        };
        for length in 0..bytes.len() {
            let is_whole = length >= content.transport_offset() + header;
            let expected = if is_whole { Ok(packet) } else { Err(Unread::Malformed) };
            prop_assert_eq!(read_bytes(&bytes[..length], content.family()), expected);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..400), is_v4: bool) {
        let family = if is_v4 { Family::V4 } else { Family::V6 };
        if let Ok(packet) = read_bytes(&bytes, family) {
            prop_assert!(is_forwarded(packet.source) && is_forwarded(packet.destination));
            prop_assert_eq!(packet.source.is_v4(), is_v4);
            prop_assert!((packet.transport_offset as usize) < bytes.len());
        }
    }
}

/// Builds a packet, changes its bytes, and returns why it is not read.
fn changed(content: &Content, change: impl FnOnce(&mut Vec<u8>)) -> Result<Packet, Unread> {
    let mut bytes = content.bytes();
    change(&mut bytes);
    read_bytes(&bytes, content.family())
}

#[test]
fn fragments_and_other_protocols_are_distinguished_from_malformed_packets() {
    let v4 = content(true, Protocol::TCP);
    assert_eq!(
        changed(&v4, |it| it[6] = 0x20),
        Err(Unread::Fragment),
        "more fragments"
    );
    assert_eq!(
        changed(&v4, |it| it[7] = 1),
        Err(Unread::Fragment),
        "an offset"
    );
    assert_eq!(changed(&v4, |it| it[9] = 1), Err(Unread::Icmp), "ICMP");
    assert_eq!(
        changed(&v4, |it| it[0] = 0x44),
        Err(Unread::Malformed),
        "a short header"
    );
    assert_eq!(
        changed(&v4, |it| it[0] = 0x65),
        Err(Unread::Malformed),
        "another version"
    );
    assert_eq!(
        changed(&v4, |it| it[3] = 39),
        Err(Unread::Malformed),
        "a short length"
    );
    assert_eq!(
        changed(&v4, |it| it[32] = 0x40),
        Err(Unread::Malformed),
        "a short TCP header"
    );
    changed(&v4, |it| it[2..4].fill(0)).expect("more than 64 KiB");

    let mut v6 = content(false, Protocol::UDP);
    assert_eq!(changed(&v6, |it| it[6] = 58), Err(Unread::Icmp), "ICMPv6");
    assert_eq!(
        changed(&v6, |it| it[6] = 51),
        Err(Unread::OtherProtocol),
        "AH"
    );
    v6.options = vec![43];
    changed(&v6, |_| {}).expect("no segment is left");
    assert_eq!(
        changed(&v6, |it| it[43] = 1),
        Err(Unread::OtherProtocol),
        "a stop"
    );
    v6.options = vec![60; 9];
    assert_eq!(
        changed(&v6, |_| {}),
        Err(Unread::Malformed),
        "too many headers"
    );

    // A fragment header has 8 bytes, whatever its length field contains.
    let fragment = |field: [u8; 2]| {
        let mut bytes = content(false, Protocol::UDP).bytes();
        bytes[5] += 8;
        bytes[6] = 44;
        bytes.splice(40..40, [17, 9, field[0], field[1], 0, 0, 0, 1]);
        read_bytes(&bytes, Family::V6)
    };
    assert_eq!(fragment([0, 1]), Err(Unread::Fragment), "more fragments");
    assert_eq!(fragment([0, 8]), Err(Unread::Fragment), "an offset");
    let whole = fragment([0, 0]).expect("the only fragment");
    assert_eq!(whole.transport_offset, 48);
}

#[test]
fn lengths_that_end_before_the_headers_are_malformed_except_for_zero() {
    let v6 = content(false, Protocol::UDP);
    assert_eq!(
        changed(&v6, |it| it[5] = 7),
        Err(Unread::Malformed),
        "a short payload length"
    );
    changed(&v6, |it| it[4..6].fill(0)).expect("more than 64 KiB");
    assert_eq!(
        changed(&v6, |it| it[45] = 7),
        Err(Unread::Malformed),
        "a short UDP length"
    );
    changed(&v6, |it| it[44..46].fill(0)).expect("more than 64 KiB of UDP");
}

#[test]
fn addresses_that_no_router_forwards_are_left_alone_at_either_end() {
    for (address, is_read) in [
        ("127.0.0.1", false),
        ("0.0.0.0", false),
        ("169.254.1.1", false),
        ("224.0.0.251", false),
        ("255.255.255.255", false),
        ("100.64.0.1", true),
        ("255.255.255.254", true),
        ("::1", false),
        ("::", false),
        ("fe80::1", false),
        ("ff02::1", false),
        ("::ffff:10.0.0.1", false),
        ("fec0::1", true),
        ("2001:db8::1", true),
    ] {
        let address = ip(address);
        let plain = content(address.is_ipv4(), Protocol::UDP);
        let from = Content {
            source: (address, 1),
            ..plain.clone()
        };
        let to = Content {
            destination: (address, 1),
            ..plain
        };
        for content in [from, to] {
            let read = read_bytes(&content.bytes(), content.family());
            assert_eq!(read.is_ok(), is_read, "{address}");
            assert!(is_read || read == Err(Unread::NotForwarded), "{address}");
        }
    }
}

#[test]
fn only_a_syn_opens_a_connection() {
    for (flags, opens) in [
        (0x02, true),
        (0xc2, true),
        (0x12, false),
        (0x10, false),
        (0x06, false),
    ] {
        let packet = changed(&content(true, Protocol::TCP), |it| it[33] = flags);
        assert_eq!(packet.map(|it| it.flags.opens()), Ok(opens), "{flags:#x}");
    }
}
