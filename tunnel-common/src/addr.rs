//! Addresses, ports and protocols as stored in the maps. Each type fixes its byte order.

use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An IPv4 or IPv6 address: four words in network byte order, as in `bpf_sock_addr::user_ip6`. An IPv4
/// address is stored in its v4-mapped form (`::ffff:a.b.c.d`, RFC 4291 section 2.5.5.2), so that IPv4 sockets
/// and v4-mapped IPv6 sockets find the same map entry.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(transparent)]
pub struct Address([u32; 4]);

/// The third word of a v4-mapped address, in network byte order.
const MAPPED: u32 = 0xffff_u32.to_be();

impl Address {
    /// The unspecified address, `::`.
    pub const UNSPECIFIED: Self = Self([0; 4]);

    /// `127.0.0.1`.
    pub const LOOPBACK_V4: Self = Self::from_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));

    /// `::1`.
    pub const LOOPBACK_V6: Self = Self::from_ip(IpAddr::V6(Ipv6Addr::LOCALHOST));

    /// `255.255.255.255`. A TCP connect() to it fails at once, even on a socket bound to a device.
    pub const BROADCAST_V4: Self = Self::from_ip(IpAddr::V4(Ipv4Addr::BROADCAST));

    /// `ff02::1`. A TCP connect() to it fails at once, even on a socket bound to a device.
    pub const MULTICAST_V6: Self =
        Self::from_ip(IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)));

    /// Creates an IPv4 address from a word in network byte order, as in `bpf_sock_addr::user_ip4`.
    #[inline(always)]
    #[must_use]
    pub const fn from_v4_word(word: u32) -> Self {
        Self([0, 0, MAPPED, word])
    }

    /// Creates an address from four words in network byte order, as in `bpf_sock_addr::user_ip6`.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(words: [u32; 4]) -> Self {
        Self(words)
    }

    /// Returns the four words in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn words(self) -> [u32; 4] {
        self.0
    }

    /// Returns the sixteen octets, the most significant first.
    #[inline(always)]
    #[must_use]
    pub const fn octets(self) -> [u8; 16] {
        zerocopy::transmute!(self.0)
    }

    /// Returns the last word in network byte order, which is the entire address if it is IPv4.
    #[inline(always)]
    #[must_use]
    pub const fn v4_word(self) -> u32 {
        let [_, _, _, word] = self.0;
        word
    }

    /// Returns the upper and lower 64 bits in host byte order. These pairs sort in the same order as the
    /// addresses.
    #[inline(always)]
    #[must_use]
    pub const fn halves(self) -> [u64; 2] {
        let halves: [u64; 2] = zerocopy::transmute!(self.0);
        let [upper, lower] = halves;
        [u64::from_be(upper), u64::from_be(lower)]
    }

    /// Creates an address from its upper and lower 64 bits in host byte order.
    #[inline(always)]
    #[must_use]
    pub const fn from_halves([upper, lower]: [u64; 2]) -> Self {
        Self(zerocopy::transmute!([upper.to_be(), lower.to_be()]))
    }

    /// Returns true if this is an IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn is_v4(self) -> bool {
        let [a, b, c, _] = self.0;
        (a | b) == 0 && c == MAPPED
    }

    /// Returns true if this is a loopback address: `::1`, or any address in `127.0.0.0/8`.
    #[inline(always)]
    #[must_use]
    pub const fn is_loopback(self) -> bool {
        let [a, b, c, d] = self.0;
        if self.is_v4() {
            d.to_ne_bytes()[0] == 127
        } else {
            (a | b | c) == 0 && d == Self::LOOPBACK_V6.0[3]
        }
    }

    /// Returns true if this is a link-local IPv6 address, in `fe80::/10`.
    #[inline(always)]
    #[must_use]
    pub const fn is_link_local(self) -> bool {
        let [a, _, _, _] = self.0;
        u32::from_be(a) >> 22 == 0xfe80 >> 6
    }

    /// Converts from the standard library's type. A v4-mapped IPv6 address gives the same result as the
    /// corresponding IPv4 address.
    #[must_use]
    pub const fn from_ip(ip: IpAddr) -> Self {
        let bits = match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let [
            a0,
            a1,
            a2,
            a3,
            b0,
            b1,
            b2,
            b3,
            c0,
            c1,
            c2,
            c3,
            d0,
            d1,
            d2,
            d3,
        ] = bits.to_be_bytes();
        Self([
            u32::from_ne_bytes([a0, a1, a2, a3]),
            u32::from_ne_bytes([b0, b1, b2, b3]),
            u32::from_ne_bytes([c0, c1, c2, c3]),
            u32::from_ne_bytes([d0, d1, d2, d3]),
        ])
    }

    /// Converts to the standard library's type. A v4-mapped address becomes an IPv4 address.
    #[must_use]
    pub const fn to_ip(self) -> IpAddr {
        let [a, b, c, d] = self.0;
        if self.is_v4() {
            return IpAddr::V4(Ipv4Addr::from_bits(u32::from_be(d)));
        }
        let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (a.to_ne_bytes(), b.to_ne_bytes());
        let ([c0, c1, c2, c3], [d0, d1, d2, d3]) = (c.to_ne_bytes(), d.to_ne_bytes());
        IpAddr::V6(Ipv6Addr::from_octets([
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
        ]))
    }
}

impl PartialEq for Address {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        ((a ^ e) | (b ^ f) | (c ^ g) | (d ^ h)) == 0
    }
}

impl core::hash::Hash for Address {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Ord for Address {
    /// Compares two halves instead of sixteen bytes: kernel programs also compare addresses, and every
    /// comparison adds a branch for the verifier to explore.
    #[inline(always)]
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        let ([a, b], [c, d]) = (self.halves(), other.halves());
        if a == c { b.cmp(&d) } else { a.cmp(&c) }
    }
}

impl PartialOrd for Address {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_ip().fmt(f)
    }
}

/// A transport port in network byte order, as in `bpf_sock_addr::user_port`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(transparent)]
pub struct Port(u16);

impl Port {
    /// Creates a port from a number in host byte order.
    #[inline(always)]
    #[must_use]
    pub const fn from_host(port: u16) -> Self {
        Self(port.to_be())
    }

    /// Creates a port from a number that is already in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn from_network(port: u16) -> Self {
        Self(port)
    }

    /// Returns the port number in host byte order.
    #[inline(always)]
    #[must_use]
    pub const fn to_host(self) -> u16 {
        u16::from_be(self.0)
    }

    /// Returns the port in network byte order.
    #[inline(always)]
    #[must_use]
    pub const fn to_network(self) -> u16 {
        self.0
    }
}

impl Ord for Port {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        self.to_host().cmp(&other.to_host())
    }
}

impl PartialOrd for Port {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_host().fmt(f)
    }
}

/// An IP protocol number, from IANA's registry "Assigned Internet Protocol Numbers".
#[derive(
    Clone,
    Copy,
    Debug,
    Eq,
    FromBytes,
    Hash,
    Immutable,
    IntoBytes,
    KnownLayout,
    Ord,
    PartialEq,
    PartialOrd,
)]
#[repr(transparent)]
pub struct Protocol(u8);

/// `IPPROTO_MPTCP`, the protocol that a multipath TCP socket reports instead of TCP.
const MPTCP: u32 = 262;

impl Protocol {
    /// Stands for every protocol in keys that are about an address itself.
    pub const ANY: Self = Self(0);
    /// TCP (protocol number 6).
    pub const TCP: Self = Self(6);
    /// UDP (protocol number 17).
    pub const UDP: Self = Self(17);
    /// SCTP (protocol number 132). The kernel has no connect hook for SCTP sockets, so only packets are translated.
    pub const SCTP: Self = Self(132);

    /// Returns the protocol for the protocol number that a socket reports, if the socket hooks translate it:
    /// TCP (including multipath TCP) or UDP. Returns `None` for any other protocol, such as ICMP.
    #[inline(always)]
    #[must_use]
    pub const fn of_socket(number: u32) -> Option<Self> {
        match number {
            6 | MPTCP => Some(Self::TCP),
            17 => Some(Self::UDP),
            _ => None,
        }
    }

    /// Returns true for TCP and SCTP, whose ends open and close connections.
    #[inline(always)]
    #[must_use]
    pub const fn has_connections(self) -> bool {
        self.0 != Self::UDP.0
    }

    /// Returns true for TCP. Unlike `==`, this can be used in const functions.
    #[inline(always)]
    #[must_use]
    pub const fn is_tcp(self) -> bool {
        self.0 == Self::TCP.0
    }

    /// Returns the protocol number.
    #[must_use]
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TCP => f.write_str("TCP"),
            Self::UDP => f.write_str("UDP"),
            Self::SCTP => f.write_str("SCTP"),
            Self(number) => write!(f, "protocol {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> Address {
        Address::from_ip(text.parse().expect("an address"))
    }

    #[test]
    fn loopback_and_link_local_addresses_are_recognised() {
        for (texts, is_loopback, is_link_local) in [
            ("127.0.0.1 127.255.0.9 ::1 ::ffff:127.0.0.1", true, false),
            ("fe80::1 febf:ffff::", false, true),
            ("126.0.0.1 128.0.0.1 10.0.0.127", false, false),
            (":: ::2 1::1 fd00::1", false, false),
            ("fe7f::1 fec0::1 254.128.0.1", false, false),
        ] {
            for text in texts.split(' ') {
                let address = address(text);
                assert_eq!(address.is_loopback(), is_loopback, "{text}");
                assert_eq!(address.is_link_local(), is_link_local, "{text}");
            }
        }
    }

    #[test]
    fn an_ipv4_address_is_its_mapped_form_and_not_its_compatible_one() {
        let v4 = address("10.96.0.10");

        assert_eq!(v4, address("::ffff:10.96.0.10"));
        assert!(v4.is_v4() && !address("::10.96.0.10").is_v4());
        assert_eq!(v4.to_ip(), IpAddr::from([10, 96, 0, 10]));
    }

    #[test]
    fn a_port_is_held_in_network_byte_order() {
        assert_eq!(Port::from_host(0x1f90).as_bytes(), [0x1f, 0x90]);
        assert!(Port::from_host(255) < Port::from_host(256));
    }

    #[test]
    fn multipath_tcp_counts_as_tcp_and_icmp_is_left_alone() {
        assert_eq!(Protocol::of_socket(262), Some(Protocol::TCP));
        assert_eq!(Protocol::of_socket(1), None);
    }

    proptest! {
        #[test]
        fn any_ip_address_comes_back_as_it_went_in(bits: u128, v4: bool, word: u32) {
            let ip = if v4 {
                IpAddr::V4(Ipv4Addr::from_bits(word))
            } else {
                IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()
            };
            prop_assert_eq!(Address::from_ip(ip).to_ip(), ip);
            prop_assert_eq!(Address::from_words(Address::from_ip(ip).words()), Address::from_ip(ip));
            prop_assert_eq!(Address::from_halves(Address::from_ip(ip).halves()), Address::from_ip(ip));
        }

        #[test]
        fn the_word_of_the_kernel_is_the_address_in_network_order(octets: [u8; 4]) {
            let word = u32::from_ne_bytes(octets);
            let ip = IpAddr::V4(Ipv4Addr::from(octets));
            prop_assert_eq!(Address::from_v4_word(word), Address::from_ip(ip));
            prop_assert_eq!(Address::from_ip(ip).v4_word(), word);
        }
    }
}
