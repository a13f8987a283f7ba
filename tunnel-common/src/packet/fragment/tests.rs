use std::vec::Vec;

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::packet::tests::{Content, any_content, content};

/// Builds a fragment of a packet: `length` bytes behind the network header and the extension headers, from `offset` on.
pub(crate) fn fragment(content: &Content, id: u16, offset: usize, length: usize) -> Vec<u8> {
    let whole = content.bytes();
    let start = content.transport_offset();
    let end = (start + offset + length).min(whole.len());
    let (more, data) = (u16::from(end < whole.len()), &whole[start + offset..end]);
    let units = u16::try_from(offset / 8).expect("short");
    let mut bytes = whole[..start].to_vec();
    match content.family() {
        Family::V4 => {
            bytes[2..4].copy_from_slice(
                &u16::try_from(start + data.len())
                    .expect("short")
                    .to_be_bytes(),
            );
            bytes[4..6].copy_from_slice(&id.to_be_bytes());
            bytes[6..8].copy_from_slice(&(more << 13 | units).to_be_bytes());
        }
        Family::V6 => {
            let length = u16::try_from(start - 40 + 8 + data.len()).expect("short");
            bytes[4..6].copy_from_slice(&length.to_be_bytes());
            // The fragment header follows all extension headers, so the last one names it.
            let at = if start == 40 { 6 } else { start - 16 };
            bytes[at] = 44;
            let [a, b] = (units << 3 | more).to_be_bytes();
            let [c, d] = id.to_be_bytes();
            bytes.extend([content.protocol.number(), 0, a, b, 0, 0, c, d]);
        }
    }
    bytes.extend(data);
    bytes
}

proptest! {
    #[test]
    fn every_fragment_of_a_packet_is_read_and_only_the_first_has_ports(
        content in any_content(),
        id: u16,
        units in 3_usize..6,
    ) {
        let content = Content { payload: vec![7; 64], ..content };
        let family = content.family();
        let whole = crate::packet::read(&content.bytes().as_slice(), family).expect("a packet");
        let length = units * 8;
        let total = content.bytes().len() - content.transport_offset();
        for offset in (0..total).step_by(length) {
            let bytes = fragment(&content, id, offset, length);
            prop_assert_eq!(crate::packet::read(&bytes.as_slice(), family), Err(Unread::Fragment));
            let read = read(&bytes.as_slice(), family).expect("a fragment");
            prop_assert_eq!([read.source, read.destination], [whole.source, whole.destination]);
            let expected_id = match family {
                Family::V4 => u32::from(id),
                Family::V6 => u32::from(id).to_be(),
            };
            prop_assert_eq!(read.id, expected_id);
            let headers = if family == Family::V4 { 0 } else { 8 };
            let first = Packet {
                transport_offset: whole.transport_offset + headers,
                is_fragment: true,
                ..whole
            };
            prop_assert_eq!(read.first, (offset == 0).then_some(first));
            let protocol = if family == Family::V4 { content.protocol.number() } else { 0 };
            prop_assert_eq!(read.protocol, protocol);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..400), is_v4: bool) {
        let family = if is_v4 { Family::V4 } else { Family::V6 };
        if let Ok(header) = read(&bytes.as_slice(), family) {
            prop_assert_eq!(header.source.is_v4(), is_v4);
        }
    }
}

#[test]
fn a_first_fragment_without_its_whole_transport_header_is_too_short() {
    for (protocol, header) in [(Protocol::TCP, 20), (Protocol::UDP, 8)] {
        for is_v4 in [true, false] {
            let content = Content {
                payload: vec![7; 64],
                ..content(is_v4, protocol)
            };
            let family = content.family();
            for length in (0..32).step_by(4) {
                let bytes = fragment(&content, 1, 0, length);
                let read = read(&bytes.as_slice(), family).map(|it| it.first.is_some());
                let expected = if length < header {
                    Err(Unread::ShortFragment)
                } else {
                    Ok(true)
                };
                assert_eq!(read, expected, "{protocol} {is_v4} {length}");
            }
        }
    }
}

#[test]
fn fragments_of_other_protocols_are_left_alone() {
    for (is_v4, protocol_at) in [(true, 9), (false, 40)] {
        let content = Content {
            payload: vec![7; 64],
            ..content(is_v4, Protocol::UDP)
        };
        for offset in [0, 16] {
            let mut bytes = fragment(&content, 1, offset, 16);
            bytes[protocol_at] = 50;
            let read = read(&bytes.as_slice(), content.family());
            assert_eq!(read, Err(Unread::OtherProtocol), "ESP, {offset}");
        }
    }
    let whole = content(true, Protocol::UDP).bytes();
    assert_eq!(
        read(&whole.as_slice(), Family::V4),
        Err(Unread::OtherProtocol)
    );
}
