use std::net::IpAddr;

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::packet::tests::{Content, any_content, complete, content, folded, sum_of};

/// An ICMP error to build.
#[derive(Clone, Debug)]
pub(crate) struct ErrorContent {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// The type and the code.
    pub(crate) kind: [u8; 2],
    pub(crate) quoted: Content,
    /// True if the quoted UDP packet has a checksum.
    pub(crate) has_udp_checksum: bool,
    /// The number of bytes that are quoted behind the network header.
    pub(crate) quoted_length: usize,
}

impl ErrorContent {
    /// Creates an error of a router about a packet.
    pub(crate) fn about(quoted: &Content, quoted_length: usize) -> Self {
        let is_v4 = quoted.family() == Family::V4;
        let router = if is_v4 { "203.0.113.1" } else { "2001:db8::1" };
        Self {
            source: router.parse().expect("an address"),
            destination: quoted.source.0,
            kind: if is_v4 { [3, 4] } else { [2, 0] },
            quoted: quoted.clone(),
            has_udp_checksum: true,
            quoted_length,
        }
    }

    /// Returns the offset of the quoted packet.
    pub(crate) fn quoted_offset(&self) -> usize {
        match self.quoted.family() {
            Family::V4 => 28,
            Family::V6 => 48,
        }
    }

    /// Returns the bytes of the error, with correct checksums.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut quoted = self.quoted.bytes();
        complete(&self.quoted, &mut quoted, self.has_udp_checksum);
        quoted.truncate(self.quoted.transport_offset() + self.quoted_length);
        let mut icmp = vec![self.kind[0], self.kind[1], 0, 0, 0, 0, 5, 0];
        icmp.extend(quoted);
        let length = u16::try_from(icmp.len()).expect("short");
        let mut bytes = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let [a, b] = (20 + length).to_be_bytes();
                let mut header = vec![0x45, 0, a, b, 0, 7, 0, 0, 64, 1, 0, 0];
                header.extend(source.octets().into_iter().chain(destination.octets()));
                let sum = !folded(sum_of(&header));
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                let sum = !folded(sum_of(&icmp));
                icmp[2..4].copy_from_slice(&sum.to_be_bytes());
                header
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let [a, b] = length.to_be_bytes();
                let mut header = vec![0x60, 0, 0, 0, a, b, 58, 64];
                header.extend(source.octets().into_iter().chain(destination.octets()));
                let pseudo = sum_of(&header[8..]) + 58 + u64::from(length);
                let sum = !folded(pseudo + sum_of(&icmp));
                icmp[2..4].copy_from_slice(&sum.to_be_bytes());
                header
            }
            _ => panic!("two families: {self:?}"),
        };
        bytes.extend(icmp);
        bytes
    }
}

/// Reads an error and the packet that it quotes.
pub(crate) fn read(bytes: &[u8], family: Family) -> Result<(ErrorHeader, Packet), Unread> {
    let header = read_header(&bytes, family)?;
    let quoted = read_quoted(&bytes, family, header.quoted_offset())?;
    Ok((header, quoted))
}

proptest! {
    #[test]
    fn an_error_is_read_if_it_contains_the_ports(content in any_content(), is_whole: bool) {
        let length = if is_whole { content.bytes().len() } else { 8 };
        let error = ErrorContent::about(&content, length);
        let bytes = error.bytes();
        let family = content.family();
        let (header, found) = read(&bytes, family).expect("an error");

        prop_assert_eq!(header.source.to_ip(), error.source);
        prop_assert_eq!(header.destination.to_ip(), content.source.0);
        prop_assert_eq!(header.quoted_offset() as usize, error.quoted_offset());
        prop_assert!(header.is_redirect == 0);
        let quoted = crate::packet::read(&content.bytes().as_slice(), family).expect("a packet");
        let expected = Packet {
            flags: TcpFlags::default(),
            transport_offset: quoted.transport_offset + header.quoted_offset(),
            ..quoted
        };
        prop_assert_eq!(found, expected);

        let ports = error.quoted_offset() + content.transport_offset() + 4;
        for length in 0..ports {
            prop_assert_eq!(read(&bytes[..length], family), Err(Unread::Malformed));
        }
        prop_assert_eq!(read(&bytes[..ports], family), Ok((header, found)));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..400), is_v4: bool) {
        let family = if is_v4 { Family::V4 } else { Family::V6 };
        if let Ok((_, quoted)) = read(&bytes, family) {
            prop_assert!((quoted.transport_offset as usize) < bytes.len());
        }
    }
}

/// Builds an error about a UDP packet, changes its bytes, and returns whether it is read as a redirect, or why not at all.
fn changed(is_v4: bool, change: impl FnOnce(&mut Vec<u8>)) -> Result<bool, Unread> {
    let quoted = content(is_v4, Protocol::UDP);
    let mut bytes = ErrorContent::about(&quoted, 8).bytes();
    change(&mut bytes);
    read(&bytes, quoted.family()).map(|(header, _)| header.is_redirect == 1)
}

#[test]
fn only_errors_about_packets_with_ports_are_read() {
    let other = Err(Unread::OtherProtocol);
    for (kind, expected) in [
        (0, other),
        (3, Ok(false)),
        (4, Ok(false)),
        (5, Ok(true)),
        (8, other),
        (11, Ok(false)),
        (12, Ok(false)),
        (13, other),
    ] {
        assert_eq!(changed(true, |it| it[20] = kind), expected, "ICMP {kind}");
    }
    for (kind, expected) in [
        (0, other),
        (1, Ok(false)),
        (4, Ok(false)),
        (5, other),
        (128, other),
        (137, other),
    ] {
        assert_eq!(
            changed(false, |it| it[40] = kind),
            expected,
            "ICMPv6 {kind}"
        );
    }
    assert_eq!(changed(true, |it| it[9] = 58), other, "ICMPv6 over IPv4");
    assert_eq!(changed(false, |it| it[6] = 1), other, "ICMP over IPv6");
    assert_eq!(changed(true, |it| it[37] = 47), other, "about GRE");
    assert_eq!(changed(false, |it| it[54] = 58), other, "about ICMPv6");
}

#[test]
fn an_error_may_be_about_the_first_fragment_of_a_packet_but_not_about_another_one() {
    assert_eq!(
        changed(true, |it| it[34] = 0x20),
        Ok(false),
        "the first one"
    );
    assert_eq!(
        changed(true, |it| it[35] = 1),
        Err(Unread::Fragment),
        "another one"
    );
    assert_eq!(
        changed(true, |it| it[6] = 0x20),
        Err(Unread::Fragment),
        "the error is one"
    );
    let of_v6 = |field: [u8; 2]| {
        changed(false, |it| {
            it[54] = 44;
            it.splice(88..88, [17, 0, field[0], field[1], 0, 0, 0, 1]);
        })
    };
    assert_eq!(of_v6([0, 1]), Ok(false), "the first one");
    assert_eq!(of_v6([0, 8]), Err(Unread::Fragment), "another one");
}

#[test]
fn addresses_that_no_router_forwards_are_left_alone() {
    let quoted_loopback = changed(true, |it| it[40..44].copy_from_slice(&[127, 0, 0, 1]));
    assert_eq!(quoted_loopback, Err(Unread::NotForwarded));
    let from_link_local = changed(false, |it| it[8..10].copy_from_slice(&[0xfe, 0x80]));
    assert_eq!(from_link_local, Err(Unread::NotForwarded));
}
