//! Addresses and ranges in Kubernetes notation.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address family. The two families are served independently (contract §1, "dual stack").
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub const BOTH: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    /// Returns an address's family.
    #[must_use]
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Ipv4,
            IpAddr::V6(_) => Self::Ipv6,
        }
    }

    /// Returns the `addressType` of EndpointSlices in this family.
    #[must_use]
    pub const fn address_type(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }

    pub(super) const fn unspecified(self) -> IpAddr {
        match self {
            Self::Ipv4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::Ipv6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }

    /// Returns the length of an address in bits.
    const fn bits(self) -> u32 {
        match self {
            Self::Ipv4 => 32,
            Self::Ipv6 => 128,
        }
    }
}

/// Parses an address (contract §1, "IP text"). Octets with leading zeros are decimal, and an IPv4-mapped IPv6
/// address becomes an IPv4 address, as in Go. Returns `None` for invalid text.
#[must_use]
pub fn parse(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        return Some(text.parse::<Ipv6Addr>().ok()?.to_canonical());
    }
    let octet = |text| u8::try_from(decimal(text)?).ok();
    let octets: Vec<u8> = text.split('.').map(octet).collect::<Option<_>>()?;
    let octets: [u8; 4] = octets.try_into().ok()?;
    Some(IpAddr::from(octets))
}

/// Returns true if a Service may be served at an address. Kubernetes refuses most of the others in
/// `ValidateNonSpecialIP` (`pkg/apis/core/validation`), because each host has them for itself.
#[must_use]
pub fn is_servable(address: IpAddr) -> bool {
    let refused: &[&str] = match address {
        IpAddr::V4(_) => &[
            "0.0.0.0/32",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "255.255.255.255/32",
        ],
        IpAddr::V6(_) => &["::/128", "::1/128", "fe80::/10", "ff00::/8"],
    };
    let mut refused = refused.iter().filter_map(|range| Cidr::parse(range));
    !refused.any(|range| range.contains(address))
}

/// Parses decimal digits, allowing any number of leading zeros.
fn decimal(text: &str) -> Option<u32> {
    let all_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    all_digits.then(|| text.parse().ok())?
}

/// A range of addresses: those whose first `length` bits are the same as in `address`.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Cidr {
    address: IpAddr,
    length: u32,
}

impl Cidr {
    /// Parses `address/length`. Surrounding whitespace and any address bits after the first `length` are
    /// ignored.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (address, length) = text.trim().split_once('/')?;
        let address = parse(address)?;
        let length = decimal(length)?;
        (length <= Family::of(address).bits()).then(|| Self::new(address, length))
    }

    /// Returns the range that contains all addresses of a family.
    #[must_use]
    pub fn all_of(family: Family) -> Self {
        Self::new(family.unspecified(), 0)
    }

    /// Returns the range that contains only this address.
    #[must_use]
    pub fn single(address: IpAddr) -> Self {
        Self::new(address, Family::of(address).bits())
    }

    fn new(address: IpAddr, length: u32) -> Self {
        let masked = match address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        };
        Self {
            address: masked,
            length,
        }
    }

    /// Returns the range's family.
    #[must_use]
    pub const fn family(self) -> Family {
        Family::of(self.address)
    }

    /// Returns the first address of the range.
    #[must_use]
    pub const fn address(self) -> IpAddr {
        self.address
    }

    /// Returns the prefix length.
    #[must_use]
    pub const fn length(self) -> u32 {
        self.length
    }

    /// Returns true if the address is in the range. An address of the other family never is.
    #[must_use]
    pub fn contains(self, address: IpAddr) -> bool {
        Family::of(address) == self.family() && Self::new(address, self.length) == self
    }

    /// Returns true if the range contains all addresses of its family.
    #[must_use]
    pub const fn is_all(self) -> bool {
        self.length == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn text_that_go_refuses_is_no_address_and_no_range() {
        assert_eq!(parse("::ffff:10.0.0.1"), Some(ip("10.0.0.1")), "mapped");
        for text in [
            "10.0.0.256",
            "10.0.0",
            "10.0.0.0x1",
            "10.0.0.+1",
            "10.0.0.1.",
            " 10.0.0.1",
            "",
            "fe80::1%eth0",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        for text in [
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "x/8",
            "fd00::/129",
        ] {
            assert_eq!(Cidr::parse(text), None, "{text}");
        }
    }
}
