//! Arithmetic on IP addresses.

use std::net::IpAddr;

/// Returns the address that is `number` places after `address`.
#[must_use]
pub fn nth_address(address: IpAddr, number: u32) -> IpAddr {
    match address {
        IpAddr::V4(address) => IpAddr::V4(address.to_bits().wrapping_add(number).into()),
        IpAddr::V6(address) => IpAddr::V6(address.to_bits().wrapping_add(number.into()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_counted_across_bytes() {
        assert_eq!(
            nth_address("10.96.0.255".parse().unwrap(), 1).to_string(),
            "10.96.1.0"
        );
        assert_eq!(
            nth_address("fd00::ffff".parse().unwrap(), 1).to_string(),
            "fd00::1:0"
        );
    }
}
