//! Parses IP addresses in the same way as Kubernetes (`ParseIPSloppy` in `k8s.io/utils/net`): numbers may
//! have leading zeros but are always decimal, and an IPv4-mapped IPv6 address is treated as IPv4.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{FieldError, FieldErrorKind};

/// The expected CIDR format, as described in error messages.
pub(super) const CIDR_FORM: &str = "an address with a prefix length, such as 10.0.0.0/8";

/// Parses an IP address. An IPv4-mapped IPv6 address becomes an IPv4 address.
pub(super) fn parse_ip(text: &str) -> Option<IpAddr> {
    if text.contains(':') {
        parse_v6(text).map(|v6| IpAddr::V6(v6).to_canonical())
    } else {
        parse_v4(text).map(IpAddr::V4)
    }
}

/// Parses a CIDR. The bits after the prefix are set to zero.
pub(super) fn parse_cidr(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    let length = parse_decimal(length)?;
    let (network, length) = if address.contains(':') {
        let mask = u128::MAX.checked_shl(128_u32.checked_sub(length)?);
        let network = Ipv6Addr::from_bits(parse_v6(address)?.to_bits() & mask.unwrap_or(0));
        match network.to_ipv4_mapped() {
            Some(v4) if length >= 96 => (IpAddr::V4(v4), length - 96),
            Some(_) | None => (IpAddr::V6(network), length),
        }
    } else {
        let mask = u32::MAX.checked_shl(32_u32.checked_sub(length)?);
        let network = Ipv4Addr::from_bits(parse_v4(address)?.to_bits() & mask.unwrap_or(0));
        (IpAddr::V4(network), length)
    };
    Some((network, u8::try_from(length).ok()?))
}

/// The IPv4 dummy address (RFC 7600 section 4.8), which no host has.
const DUMMY: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);

/// Parses a unicast address that has the same meaning on every node. Like Kubernetes
/// (`pkg/apis/core/validation`, `ValidateNonSpecialIP`), rejects loopback and link-local addresses: a frontend
/// or an endpoint at such an address would give access to services that a node offers only to itself
/// (CVE-2020-8558). Rejects the unspecified address and the broadcast address, too.
pub(super) fn parse_routable(text: &str, field: impl Fn() -> String) -> Result<IpAddr, FieldError> {
    let address = parse_ip(text).ok_or_else(|| {
        FieldError::new(field(), FieldErrorKind::wrong_form("an IP address", text))
    })?;
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let what = if address.is_unspecified() {
        "the unspecified address"
    } else if address.is_multicast() {
        "a multicast address"
    } else if address == IpAddr::V4(Ipv4Addr::BROADCAST) {
        "the broadcast address"
    } else if address.is_loopback() {
        "a loopback address"
    } else if is_link_local {
        "a link-local address"
    } else if address == IpAddr::V4(DUMMY) {
        "the IPv4 dummy address, which the daemon's own test connections use"
    } else {
        return Ok(address);
    };
    Err(forbidden_address(text, what, field()))
}

fn forbidden_address(address: &str, what: &'static str, field: String) -> FieldError {
    let address = address.to_owned();
    FieldError::new(field, FieldErrorKind::ForbiddenAddress { address, what })
}

fn parse_v4(text: &str) -> Option<Ipv4Addr> {
    let mut parts = text
        .split('.')
        .map(|part| u8::try_from(parse_decimal(part)?).ok());
    let mut part = || parts.next().flatten();
    let address = Ipv4Addr::new(part()?, part()?, part()?, part()?);
    parts.next().is_none().then_some(address)
}

/// Parses an IPv6 address. Excess leading zeros are removed first, since the standard library does not accept
/// them.
fn parse_v6(text: &str) -> Option<Ipv6Addr> {
    let (groups, tail) = text.rsplit_once(':')?;
    let mut plain: Vec<String> = groups.split(':').map(without_zeros).collect();
    if tail.contains('.') {
        let [a, b, c, d] = parse_v4(tail)?.octets();
        plain.push(format!("{a:x}{b:02x}:{c:x}{d:02x}"));
    } else {
        plain.push(without_zeros(tail));
    }
    plain.join(":").parse().ok()
}

fn without_zeros(group: &str) -> String {
    let rest = group.trim_start_matches('0');
    let is_zero = rest.is_empty() && !group.is_empty();
    if is_zero { "0" } else { rest }.to_owned()
}

/// Parses a number that consists of decimal digits only.
fn parse_decimal(text: &str) -> Option<u32> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn leading_zeros_are_decimal_and_a_v4_mapped_address_is_ipv4() {
        for (text, wanted) in [
            ("172.30.0.041", "172.30.0.41"),
            ("010.000.000.008", "10.0.0.8"),
            ("fd00::00010", "fd00::10"),
            ("64:ff9b::010.0.0.1", "64:ff9b::a00:1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
        ] {
            assert_eq!(parse_ip(text), wanted.parse().ok(), "{text}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        let v4 = "10.0.0|10.0.0.0.1|10.0.0.256|10.0.0.+1|0x0a.0.0.1";
        let v6 = ":|:::|1:2|::1.2.3|1.2.3.4::|12345::|fe80::1%eth0";
        for text in v4.split('|').chain(v6.split('|')).chain(["", "nonsense"]) {
            assert_eq!(parse_ip(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_cidr_is_an_address_cut_to_its_prefix() {
        for (text, wanted, length) in [
            ("10.96.0.010/012", "10.96.0.0", 12),
            ("0.0.0.0/0", "0.0.0.0", 0),
            ("fd00::1/64", "fd00::", 64),
            ("::ffff:10.0.0.1/120", "10.0.0.0", 24),
        ] {
            let wanted = wanted.parse().expect("an address");
            assert_eq!(parse_cidr(text), Some((wanted, length)), "{text}");
        }
        for text in "10.0.0.0|10.0.0.0/33|fd00::/129|10.0.0.0/-1|/8|10.0.0.0/".split('|') {
            assert_eq!(parse_cidr(text), None, "{text:?}");
        }
    }

    #[test]
    fn addresses_that_do_not_mean_the_same_host_on_every_node_are_refused() {
        for (text, what) in [
            ("0.0.0.0", "the unspecified address"),
            ("::", "the unspecified address"),
            ("224.0.0.251", "a multicast address"),
            ("ff02::fb", "a multicast address"),
            ("255.255.255.255", "the broadcast address"),
            ("127.0.0.1", "a loopback address"),
            ("127.255.255.254", "a loopback address"),
            ("::1", "a loopback address"),
            ("::ffff:127.0.0.1", "a loopback address"),
            ("169.254.169.254", "a link-local address"),
            ("::ffff:169.254.169.254", "a link-local address"),
            ("fe80::1", "a link-local address"),
        ] {
            let wrong = parse_routable(text, || "field".to_owned()).expect_err(text);
            let wanted = format!("field: {text} is {what}, which is not allowed here");
            assert_eq!(wrong.to_string(), wanted);
        }
        for text in ["10.0.0.1", "198.51.100.1", "fd00::1", "2001:db8::1"] {
            assert!(parse_routable(text, String::new).is_ok(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_formatted_address_is_parsed_to_the_same_address(bits: u128, word: u32) {
            let v6 = IpAddr::V6(Ipv6Addr::from_bits(bits));
            prop_assert_eq!(parse_ip(&v6.to_string()), Some(v6.to_canonical()));
            let v4 = IpAddr::V4(Ipv4Addr::from_bits(word));
            prop_assert_eq!(parse_ip(&v4.to_string()), Some(v4));
        }
    }
}
