//! Builds a frame with the first packet of a connection or of datagrams, and reads the ends of packets.

use std::net::IpAddr;

use tunnel_common::{
    addr::Protocol,
    flow::Endpoint,
    packet::{self, Family},
};

/// The length of an Ethernet header.
const ETHERNET: usize = 14;

/// Builds the first frame of a flow: a SYN, an INIT or an empty datagram. The link-layer addresses are those of the loopback device,
/// on which the kernel runs programs for trials. The checksums are wrong.
pub(super) fn first_of(from: Endpoint, to: Endpoint, protocol: Protocol) -> Vec<u8> {
    let mut transport = from.port.to_host().to_be_bytes().to_vec();
    transport.extend(to.port.to_host().to_be_bytes());
    match protocol {
        Protocol::TCP => {
            transport.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0]);
        }
        // A chunk of type INIT, without parameters.
        // The programs only change the checksum by a difference, but don't answer packets whose checksum is left to the network
        // card (0).
        Protocol::SCTP => transport.extend([0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 4]),
        _ => transport.extend([0, 8, 0, 0]),
    }
    let length = u8::try_from(transport.len()).unwrap_or(u8::MAX);
    let number = protocol.number();
    let mut frame = vec![0; 12];
    match (from.address.to_ip(), to.address.to_ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame.extend([0x08, 0x00]);
            let total = length.saturating_add(20);
            frame.extend([0x45, 0, 0, total, 0, 0, 0x40, 0, 64, number, 0, 0]);
            frame.extend(from.octets().into_iter().chain(to.octets()));
        }
        (from, to) => {
            let octets = |ip| match ip {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, length, number, 64]);
            frame.extend(octets(from).into_iter().chain(octets(to)));
        }
    }
    frame.extend(transport);
    frame
}

/// Returns the ends of the packet in a frame, or `None` if it has none.
pub(super) fn ends(frame: &[u8]) -> Option<(Endpoint, Endpoint)> {
    let bytes = frame.get(ETHERNET..)?;
    let family = match bytes.first()? >> 4 {
        4 => Family::V4,
        _ => Family::V6,
    };
    let packet = packet::read(&bytes, family).ok()?;
    Some((packet.source_endpoint(), packet.destination_endpoint()))
}

#[cfg(test)]
mod tests {
    use tunnel_common::addr::{Address, Port};

    use super::*;

    #[test]
    fn the_ends_of_a_built_frame_are_read() {
        for [from, to] in [
            ["203.0.113.9", "198.51.100.1"],
            ["2001:db8::9", "2001:db8:1::1"],
        ] {
            let endpoint = |ip: &str, port| {
                let ip = ip.parse().expect("an address");
                Endpoint::new(Address::from_ip(ip), Port::from_host(port))
            };
            let (from, to) = (endpoint(from, 40_000), endpoint(to, 443));
            for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
                assert_eq!(ends(&first_of(from, to, protocol)), Some((from, to)));
            }
        }
        assert_eq!(ends(&[0; 20]), None);
    }
}
