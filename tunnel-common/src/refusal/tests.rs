use proptest::prelude::*;

use super::*;
use crate::{
    addr::Protocol,
    packet::{
        self, PacketBytes as _,
        tests::{Content, any_content, complete, folded, sum_of},
    },
};

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn header_of(packet: &Packet, answer: Answer) -> Vec<u8> {
    match packet.family {
        Family::V4 => bytes_of(&header_v4(packet, answer)),
        Family::V6 => bytes_of(&header_v6(packet, answer)),
    }
}

/// Returns the sum of the pseudo-header of a packet, from its addresses and the length after its network header.
fn pseudo_header_of(bytes: &[u8], protocol: u8) -> u64 {
    let (addresses, header) = if bytes[0] >> 4 == 4 {
        (&bytes[12..20], 20)
    } else {
        (&bytes[8..40], 40)
    };
    let length = u64::try_from(bytes.len() - header).expect("short");
    sum_of(addresses) + u64::from(protocol) + length
}

/// Returns a packet with its checksums, and its headers as they are read.
fn built(content: &Content, has_checksum: bool) -> (Vec<u8>, Packet) {
    let mut bytes = content.bytes();
    complete(content, &mut bytes, has_checksum);
    let packet = packet::read(&bytes.as_slice(), content.family()).expect("a packet");
    (bytes, packet)
}

fn without_options(content: Content, protocol: Protocol) -> Content {
    Content {
        options: Vec::new(),
        protocol,
        ..content
    }
}

/// Asserts that an answer comes from where the packet went to, and that its IPv4 header is correct.
fn expect_header(answer: &[u8], content: &Content) {
    let family = content.family();
    let size = header_size(family) as usize;
    if family == Family::V4 {
        assert_eq!(folded(sum_of(&answer[..size])), 0xffff);
    }
    let length = match family {
        Family::V4 => usize::from(answer[2]) << 8 | usize::from(answer[3]),
        Family::V6 => size + (usize::from(answer[4]) << 8 | usize::from(answer[5])),
    };
    assert_eq!(length, answer.len());
}

#[test]
fn answers_are_limited_in_each_second() {
    let mut refusals = Refusals(0);
    for now in [7, 8] {
        for _ in 0..3 {
            refusals = refusals.next(now, 3).expect("an answer");
        }
        assert_eq!(refusals.next(now, 3), None);
    }
    assert_eq!(refusals.next(9, 0), None);
}

proptest! {
    #[test]
    fn a_reset_is_acceptable_to_the_client(content in any_content(), sequence: u32) {
        let content = without_options(content, Protocol::TCP);
        let (_, packet) = built(&content, true);

        let mut answer = header_of(&packet, Answer::Reset);
        let size = answer.len();
        answer.extend(bytes_of(&reset(&packet, sequence.to_be(), Checksum::Complete)));
        expect_header(&answer, &content);
        let read = packet::read(&answer.as_slice(), content.family()).expect("a packet");
        prop_assert_eq!(read.source_endpoint(), packet.destination_endpoint());
        prop_assert_eq!(read.destination_endpoint(), packet.source_endpoint());
        prop_assert!(read.flags.has_rst() && read.flags.has_ack());
        let acknowledged = u32::from_be_bytes(answer[size + 8..size + 12].try_into().expect("4 bytes"));
        prop_assert_eq!(acknowledged, sequence.wrapping_add(1));
        let sum = pseudo_header_of(&answer, 6) + sum_of(&answer[size..]);
        prop_assert_eq!(folded(sum), 0xffff);

        // The sum of the pseudo-header is what the network card expects in the field.
        let partial = bytes_of(&reset(&packet, sequence.to_be(), Checksum::Partial));
        prop_assert_eq!(folded(sum_of(&partial[16..18])), folded(pseudo_header_of(&answer, 6)));
        prop_assert_eq!(&partial[..16], &answer[size..size + 16]);
    }

    #[test]
    fn an_error_quotes_the_datagram_and_has_a_correct_checksum(
        content in any_content(),
        has_checksum: bool,
        is_partial: bool,
    ) {
        let content = without_options(content, Protocol::UDP);
        let (mut bytes, packet) = built(&content, has_checksum);
        let size = header_size(content.family()) as usize;
        if is_partial {
            let sum = folded(pseudo_header_of(&bytes, 17));
            bytes[size + 6..size + 8].copy_from_slice(&sum.to_be_bytes());
        }
        let checksum = if is_partial { Checksum::Partial } else { Checksum::Complete };
        let quoted = bytes.as_slice().words::<2>(packet.transport_offset).expect("a header");
        let icmp = match content.family() {
            Family::V4 => {
                let header = bytes.as_slice().words::<5>(0).expect("a header");
                error(&packet, &header, quoted, checksum)
            }
            Family::V6 => {
                let header = bytes.as_slice().words::<10>(0).expect("a header");
                error(&packet, &header, quoted, checksum)
            }
        };

        let mut quote = bytes[..size + 8].to_vec();
        if is_partial {
            // The kernel or the network card completes the checksum later (`skb_checksum_help` in net/core/dev.c).
            let sum = !folded(sum_of(&quote[size..]));
            quote[size + 6..].copy_from_slice(&sum.to_be_bytes());
        }
        let mut answer = header_of(&packet, Answer::Error);
        answer.extend(bytes_of(&icmp));
        answer.extend(quote);
        prop_assert_eq!(answer.len() - size - 8, error_size(content.family()) as usize);
        expect_header(&answer, &content);
        let (kind, pseudo) = match content.family() {
            Family::V4 => ([3, 3], 0),
            Family::V6 => ([1, 4], pseudo_header_of(&answer, 58)),
        };
        prop_assert_eq!(&answer[size..size + 2], &kind);
        prop_assert_eq!(folded(pseudo + sum_of(&answer[size..])), 0xffff);
        let addresses = if content.family() == Family::V4 { 12..20 } else { 8..40 };
        let half = addresses.len() / 2;
        let (from, to) = answer[addresses.clone()].split_at(half);
        let (client, dialled) = bytes[addresses].split_at(half);
        prop_assert_eq!((from, to), (dialled, client));
    }
}
