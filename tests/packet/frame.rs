//! Builders for Ethernet frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const ETHERNET: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
const TCP: u8 = 6;

/// Builds a frame that contains a TCP packet to the given address.
pub(crate) fn tcp_to(to: IpAddr) -> Vec<u8> {
    match to {
        IpAddr::V4(to) => v4_to(to, &[]),
        IpAddr::V6(to) => v6_to(to),
    }
}

/// Builds a frame that contains a TCP packet to the given IPv4 address, with the given IPv4 options.
pub(crate) fn v4_to(to: Ipv4Addr, options: &[u8]) -> Vec<u8> {
    let words = u8::try_from(5 + options.len() / 4).expect("at most 40 bytes of options");
    let mut frame = ethernet(0x0800);
    frame.extend([0x40 | words, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0]);
    frame.extend(Ipv4Addr::new(192, 0, 2, 9).octets());
    frame.extend(to.octets());
    frame.extend(options);
    frame.extend([0; 20]);
    frame
}

fn v6_to(to: Ipv6Addr) -> Vec<u8> {
    let mut frame = ethernet(0x86dd);
    frame.extend([0x60, 0, 0, 0, 0, 20, TCP, 64]);
    frame.extend(
        "2001:db8::9"
            .parse::<Ipv6Addr>()
            .expect("an address")
            .octets(),
    );
    frame.extend(to.octets());
    frame.extend([0; 20]);
    frame
}

/// Builds an Ethernet header with the given EtherType.
pub(crate) fn ethernet(protocol: u16) -> Vec<u8> {
    let mut frame = ETHERNET.to_vec();
    frame.extend(protocol.to_be_bytes());
    frame
}
