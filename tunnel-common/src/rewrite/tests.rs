use core::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::packet::{
    self,
    tests::{Content, any_content, complete, content, folded, sum_of},
};

/// A packet in memory, which changes as the kernel's helpers change it (`bpf_l3_csum_replace`, `bpf_l4_csum_replace` and
/// `bpf_skb_store_bytes` in net/core/filter.c, with a checksum that is complete).
struct Memory<'a>(&'a mut [u8]);

impl Memory<'_> {
    fn store(&mut self, offset: u32, bytes: &[u8]) {
        let start = usize::try_from(offset).expect("small");
        self.0[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn update(&mut self, offset: u32, by: Difference, zero_means_none: bool) {
        let start = usize::try_from(offset).expect("small");
        let old = u16::from_ne_bytes([self.0[start], self.0[start + 1]]);
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

    fn update_header_checksum(&mut self, offset: u32, by: Difference) -> Result<(), ()> {
        self.update(offset, by, false);
        Ok(())
    }

    fn update_for_address(&mut self, sum: TransportChecksum, by: Difference) -> Result<(), ()> {
        self.update(sum.offset, by, sum.zero_means_none);
        Ok(())
    }

    fn update_for_port(&mut self, sum: TransportChecksum, by: Difference) -> Result<(), ()> {
        self.update(sum.offset, by, sum.zero_means_none);
        Ok(())
    }

    fn write_address_v4(&mut self, offset: u32, address: Address) -> Result<(), ()> {
        self.store(offset, &address.v4_word().to_ne_bytes());
        Ok(())
    }

    fn write_address_v6(&mut self, offset: u32, address: Address) -> Result<(), ()> {
        self.store(offset, &address.octets());
        Ok(())
    }

    fn write_port(&mut self, offset: u32, port: Port) -> Result<(), ()> {
        self.store(offset, &port.to_network().to_ne_bytes());
        Ok(())
    }
}

fn finished(content: &Content, has_udp_checksum: bool) -> Vec<u8> {
    let mut bytes = content.bytes();
    complete(content, &mut bytes, has_udp_checksum);
    bytes
}

/// Replaces one end of a packet, and compares the result with a packet that is built with that end.
fn expect_replaced(content: &Content, end: End, to: (IpAddr, u16), has_udp_checksum: bool) {
    let mut bytes = finished(content, has_udp_checksum);
    let packet = packet::read(&bytes.as_slice(), content.family()).expect("a packet");
    let address = Address::from_ip(to.0);
    let port = Port::from_host(to.1);

    replace(&mut Memory(&mut bytes), &packet, end, (address, port)).expect("replaced");

    let mut wanted = content.clone();
    match end {
        End::Source => wanted.source = to,
        End::Destination => wanted.destination = to,
    }
    let wanted = finished(&wanted, has_udp_checksum);
    // 0 and 0xffff are the same number in ones' complement arithmetic. Only one of them comes out of a sum over a
    // packet, but an update by differences may give the other one in a TCP checksum.
    let at = content.transport_offset() + 16;
    if content.protocol == Protocol::TCP && bytes[at..at + 2] != wanted[at..at + 2] {
        let both = [&bytes, &wanted].map(|it| u16::from_be_bytes([it[at], it[at + 1]]));
        assert!(matches!(both, [0xffff, 0] | [0, 0xffff]), "{both:?}");
        bytes[at..at + 2].copy_from_slice(&wanted[at..at + 2]);
    }
    assert_eq!(bytes, wanted, "{content:?} {end:?} {to:?}");
}

fn any_end() -> impl Strategy<Value = End> {
    prop_oneof![Just(End::Source), Just(End::Destination)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_replaced_end_has_the_checksums_of_a_packet_that_is_built_with_it(
        content in any_content(),
        other in any_content(),
        end in any_end(),
        has_udp_checksum: bool,
    ) {
        let has_same_family = other.source.0.is_ipv4() == content.source.0.is_ipv4();
        let address = if has_same_family { other.source.0 } else { content.destination.0 };
        expect_replaced(&content, end, (address, other.source.1), has_udp_checksum);
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
                let packet = packet::read(&bytes.as_slice(), current.family()).expect("a packet");
                let to = (numbers.address(is_v4), numbers.port());
                let end = if number % 2 == 0 {
                    End::Source
                } else {
                    End::Destination
                };
                let new = (Address::from_ip(to.0), Port::from_host(to.1));
                replace(&mut Memory(&mut bytes), &packet, end, new).expect("replaced");
                match end {
                    End::Source => current.source = to,
                    End::Destination => current.destination = to,
                }
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
        expect_replaced(&udp, End::Source, (other, 9), false);

        // Search for a port with which the checksum would be 0.
        let found = (0..=u16::MAX).find(|port| {
            let to = Content {
                source: (other, *port),
                ..udp.clone()
            };
            let bytes = finished(&to, true);
            let at = to.transport_offset() + 6;
            bytes[at..at + 2] == [0xff, 0xff]
        });
        let port = found.expect("one of all ports");
        expect_replaced(&udp, End::Source, (other, port), true);
    }
}
