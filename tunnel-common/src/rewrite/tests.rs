use core::net::IpAddr;

use proptest::prelude::*;
use zerocopy::IntoBytes as _;

use super::*;
use crate::{
    addr::Port,
    packet::{
        self,
        tests::{Content, any_content, complete, content, folded, sum_of},
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

    fn half(&self, offset: u32) -> Result<u16, ()> {
        let start = usize::try_from(offset).expect("small");
        Ok(u16::from_ne_bytes([self.0[start], self.0[start + 1]]))
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
        content in any_content(),
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
