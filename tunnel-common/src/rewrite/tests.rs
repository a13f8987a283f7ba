use core::net::IpAddr;

use proptest::prelude::*;
use zerocopy::IntoBytes as _;

use super::*;
use crate::{
    addr::Port,
    crc32c,
    packet::{
        self,
        icmp::tests::ErrorContent,
        tests::{ALL, Content, any_content, any_content_of, complete, content, folded, sum_of},
    },
};

/// A packet in memory, which changes as the kernel's helpers change it (`bpf_l4_csum_replace` and `bpf_skb_store_bytes` in
/// net/core/filter.c, with a checksum that is complete).
struct Memory<'a>(&'a mut [u8]);

impl Memory<'_> {
    fn store(&mut self, offset: u32, bytes: &[u8]) {
        let start = usize::try_from(offset).expect("small");
        self.0[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn update(&mut self, offset: u32, by: Difference, zero_means_none: bool) {
        let old = self.half(offset).expect("in the packet");
        if zero_means_none && old == 0 {
            return;
        }
        // csum_replace_by_diff, include/net/checksum.h.
        let sum = u64::from(!old) + u64::from(by.word());
        let new = match !folded(sum) {
            0 if zero_means_none => 0xffff,
            new => new,
        };
        self.store(offset, &new.to_ne_bytes());
    }
}

impl PacketEdits for Memory<'_> {
    type Error = ();

    fn update_for_addresses(&mut self, sum: TransportChecksum, by: Difference) -> Result<(), ()> {
        self.update(sum.offset, by, sum.zero_means_none);
        Ok(())
    }

    fn update_for_ports(&mut self, sum: TransportChecksum, by: Difference) -> Result<(), ()> {
        self.update(sum.offset, by, sum.zero_means_none);
        Ok(())
    }

    fn update_sctp(&mut self, offset: u32, change: u32) -> Result<(), ()> {
        let at = usize::try_from(offset).expect("small") + 8;
        let old: [u8; 4] = self.0[at..at + 4].try_into().map_err(drop)?;
        let length = u32::try_from(self.0.len()).expect("small") - offset;
        let by = crc32c::difference(change, length, crc32c::multiply);
        self.store(offset + 8, &(u32::from_le_bytes(old) ^ by).to_le_bytes());
        Ok(())
    }

    fn half(&self, offset: u32) -> Result<u16, ()> {
        let start = usize::try_from(offset).expect("small");
        let half = self.0.get(start..start + 2).ok_or(())?;
        Ok(u16::from_ne_bytes([half[0], half[1]]))
    }

    fn write<const HALVES: usize>(&mut self, offset: u32, halves: [u16; HALVES]) -> Result<(), ()> {
        self.store(offset, halves.as_bytes());
        Ok(())
    }

    fn write_address_v6(&mut self, offset: u32, address: Address) -> Result<(), ()> {
        self.store(offset, &address.octets());
        Ok(())
    }
}

fn finished(content: &Content, has_udp_checksum: bool) -> Vec<u8> {
    let mut bytes = content.bytes();
    complete(content, &mut bytes, has_udp_checksum);
    bytes
}

/// Replaces the ends of a packet, and compares the result with a packet that is built with those ends.
fn expect_replaced(content: &Content, to: &Content, has_udp_checksum: bool) {
    let mut bytes = finished(content, has_udp_checksum);
    let wanted = finished(to, has_udp_checksum);
    replace_ends(&mut bytes, content, to);

    // 0 and 0xffff are the same number in ones' complement arithmetic. Only one of them comes out of a sum over a
    // packet, but an update by differences may give the other one in a TCP checksum.
    let at = content.transport_offset() + 16;
    if content.protocol == Protocol::TCP && bytes[at..at + 2] != wanted[at..at + 2] {
        let both = [&bytes, &wanted].map(|it| u16::from_be_bytes([it[at], it[at + 1]]));
        assert!(matches!(both, [0xffff, 0] | [0, 0xffff]), "{both:?}");
        bytes[at..at + 2].copy_from_slice(&wanted[at..at + 2]);
    }
    assert_eq!(bytes, wanted, "{content:?} {to:?}");
}

/// Replaces the ends of the packet `bytes`, which has this content, by those of another one.
fn replace_ends(bytes: &mut [u8], content: &Content, to: &Content) {
    let from = packet::read(&&*bytes, content.family()).expect("a packet");
    let to = Packet {
        source: Address::from_ip(to.source.0),
        source_port: Port::from_host(to.source.1),
        destination: Address::from_ip(to.destination.0),
        destination_port: Port::from_host(to.destination.1),
        ..from
    };
    replace(&mut Memory(bytes), &from, &to).expect("replaced");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_replaced_end_has_the_checksums_of_a_packet_that_is_built_with_it(
        content in any_content_of(&ALL),
        other in any_content(),
        replaces: [bool; 4],
        has_udp_checksum: bool,
    ) {
        let has_same_family = other.source.0.is_ipv4() == content.source.0.is_ipv4();
        let other = if has_same_family {
            other
        } else {
            Content { source: content.destination, destination: content.source, ..other }
        };
        let mut to = content.clone();
        for (replaces, to, from) in [
            (replaces[0], &mut to.source.0, other.source.0),
            (replaces[1], &mut to.destination.0, other.destination.0),
        ] {
            if replaces {
                *to = from;
            }
        }
        for (replaces, to, from) in [
            (replaces[2], &mut to.source.1, other.source.1),
            (replaces[3], &mut to.destination.1, other.destination.1),
        ] {
            if replaces {
                *to = from;
            }
        }
        expect_replaced(&content, &to, has_udp_checksum);
    }
}

/// Replaces the ends of an error.
fn replace_error_ends(bytes: &mut [u8], to: &ErrorContent) {
    let family = to.quoted.family();
    let (header, from) = icmp::tests::read(bytes, family).expect("an error");
    let (new, to) = icmp::tests::read(&to.bytes(), family).expect("an error");
    let addresses = [new.source, new.destination];
    replace_error(&mut Memory(bytes), &header, addresses, (&from, &to)).expect("replaced");
}

/// Replaces the ends of an error, and compares the result with an error that is built with them.
fn expect_error_replaced(content: &ErrorContent, to: &ErrorContent) {
    let mut bytes = content.bytes();
    expect_correct_error(&bytes, content.quoted.family() == Family::V4);
    replace_error_ends(&mut bytes, to);
    expect_correct_error(&bytes, content.quoted.family() == Family::V4);
    let wanted = to.bytes();

    // In ones' complement arithmetic, 0 and 0xffff are the same number. An update by differences may give the other one.
    let icmp = content.quoted_offset() - 8;
    let quoted_tcp = content.quoted_offset() + content.quoted.transport_offset() + 16;
    let is_tcp = content.quoted.protocol == Protocol::TCP;
    for at in [icmp + 2].into_iter().chain(is_tcp.then_some(quoted_tcp)) {
        let both = [&bytes, &wanted].map(|it| it.get(at..at + 2).map(<[u8]>::to_vec));
        if let [Some(found), Some(wanted)] = &both
            && found != wanted
        {
            let zeros: [&[u8]; 2] = [&[0, 0], &[0xff, 0xff]];
            let is_error = at == icmp + 2;
            assert!(is_error || zeros.contains(&found.as_slice()), "{both:?}");
            bytes[at..at + 2].copy_from_slice(wanted);
        }
    }
    assert_eq!(bytes, wanted, "{content:?} {to:?}");
}

/// Asserts that the checksums of an error are correct, as its receiver checks them (RFC 1071).
fn expect_correct_error(bytes: &[u8], is_v4: bool) {
    let (addresses, at) = if is_v4 { (12..20, 20) } else { (8..40, 40) };
    let length = u64::try_from(bytes.len() - at).expect("short");
    let pseudo = if is_v4 {
        0
    } else {
        sum_of(&bytes[addresses]) + 58 + length
    };
    assert_eq!(folded(pseudo + sum_of(&bytes[at..])), 0xffff, "{bytes:x?}");
    if is_v4 {
        assert_eq!(folded(sum_of(&bytes[..20])), 0xffff, "{bytes:x?}");
        let length = usize::from(bytes[28] & 0xf) * 4;
        let quoted = &bytes[28..28 + length];
        assert_eq!(folded(sum_of(quoted)), 0xffff, "quoted: {bytes:x?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn an_error_has_the_checksums_of_one_that_is_built_with_the_new_ends(
        quoted in any_content(),
        other in any_content(),
        arrives: bool,
        has_udp_checksum: bool,
        quoted_length in prop_oneof![Just(8), (2_usize..15).prop_map(|words| words * 2), Just(1000)],
    ) {
        let is_v4 = quoted.source.0.is_ipv4();
        let other = if other.source.0.is_ipv4() == is_v4 {
            other
        } else {
            Content { source: quoted.destination, destination: quoted.source, ..other }
        };
        let content = ErrorContent { has_udp_checksum, ..ErrorContent::about(&quoted, quoted_length) };
        let mut to = content.clone();
        if arrives {
            to.destination = other.source.0;
            to.quoted.source = other.source;
            to.quoted.destination.1 = other.destination.1;
        } else {
            to.source = other.destination.0;
            to.quoted.destination = other.destination;
            to.quoted.source.1 = other.source.1;
        }
        expect_error_replaced(&content, &to);
    }
}

/// A fast generator of numbers (xorshift64, Marsaglia 2003), so that a million cases take a second.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn address(&mut self, is_v4: bool) -> IpAddr {
        let [_, a, b, c, low @ ..] = self.next().to_be_bytes();
        if is_v4 {
            return IpAddr::from([10, a, b, c]);
        }
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&[0xfd, a, b, c]);
        octets[12..].copy_from_slice(&low);
        IpAddr::from(octets)
    }

    fn port(&mut self) -> u16 {
        let [a, b, ..] = self.next().to_be_bytes();
        u16::from_be_bytes([a, b])
    }
}

#[test]
fn a_million_changes_one_after_the_other_leave_correct_checksums() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for is_v4 in [true, false] {
        for protocol in [Protocol::TCP, Protocol::UDP] {
            let mut current = content(is_v4, protocol);
            let mut bytes = finished(&current, true);
            for number in 0..250_000 {
                let mut next = current.clone();
                let end = if number % 2 == 0 {
                    &mut next.source
                } else {
                    &mut next.destination
                };
                *end = (numbers.address(is_v4), numbers.port());
                replace_ends(&mut bytes, &current, &next);
                current = next;
                // A receiver adds up all words, including the checksum, and must get 0xffff (RFC 1071).
                let at = current.transport_offset();
                let addresses = if is_v4 { 12..20 } else { 8..40 };
                let length = u64::try_from(bytes.len() - at).expect("short");
                let pseudo = sum_of(&bytes[addresses]) + u64::from(protocol.number()) + length;
                assert_eq!(folded(pseudo + sum_of(&bytes[at..])), 0xffff, "{current:?}");
                assert!(
                    !is_v4 || folded(sum_of(&bytes[..at])) == 0xffff,
                    "{current:?}"
                );
            }
        }
    }
}

#[test]
fn a_udp_checksum_of_zero_stays_and_none_becomes_zero() {
    for is_v4 in [true, false] {
        let udp = content(is_v4, Protocol::UDP);
        let other = content(is_v4, Protocol::UDP).destination.0;
        let from = |port| Content {
            source: (other, port),
            ..udp.clone()
        };
        expect_replaced(&udp, &from(9), false);

        // Search for a port with which the checksum would be 0.
        let found = (0..=u16::MAX).find(|port| {
            let to = from(*port);
            let bytes = finished(&to, true);
            let at = to.transport_offset() + 6;
            bytes[at..at + 2] == [0xff, 0xff]
        });
        let port = found.expect("one of all ports");
        expect_replaced(&udp, &from(port), true);
    }
}
