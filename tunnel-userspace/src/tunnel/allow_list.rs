//! The allow-list of targets that the agent may dial, and the target that a CONNECT request asks for.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use http::Request;
use nix::{ifaddrs::getifaddrs, sys::socket::SockaddrStorage};
use tracing::debug;
use tunnel_common::reason::Reason;

use super::InvalidAllowedTarget;
use crate::file_descriptors;

/// The CONNECT request header that asks the agent to dial loopback instead of the requested address.
pub(super) const TARGET_HEADER: &str = "culvert-target";
/// The only valid value of the [`TARGET_HEADER`] header.
pub(super) const LOOPBACK: &str = "loopback";

/// The target that a CONNECT request asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RequestedTarget {
    /// The address and port that the client dialled.
    pub(super) address: SocketAddr,
    /// True if the agent must dial the port on loopback instead of on this address.
    pub(super) loopback: bool,
}

impl RequestedTarget {
    /// Parses the target of a CONNECT request.
    pub(super) fn parse<B>(request: &Request<B>) -> Result<Self, Reason> {
        let authority = request.uri().authority().ok_or(Reason::ProtocolError)?;
        let address: SocketAddr = authority
            .as_str()
            .parse()
            .map_err(|_error: std::net::AddrParseError| Reason::ProtocolError)?;
        let loopback = match request.headers().get(TARGET_HEADER) {
            None => false,
            Some(value) if value.as_bytes() == LOOPBACK.as_bytes() => true,
            // A later release may send another value to ask for something other than the address to be
            // dialled.
            Some(_) => return Err(Reason::ProtocolError),
        };
        Ok(Self {
            address: SocketAddr::new(address.ip().to_canonical(), address.port()),
            loopback,
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum AllowedTarget {
    /// This port on any address of this node.
    Own(u16),
    /// This port on loopback.
    Loopback(u16),
    /// This address and port.
    Exact(SocketAddr),
}

/// The targets that the agent may dial.
#[derive(Debug)]
pub(super) struct AllowList(Vec<AllowedTarget>);

impl AllowList {
    pub(super) fn parse(entries: &[String]) -> Result<Self, InvalidAllowedTarget> {
        entries
            .iter()
            .map(|text| {
                parse_allowed_target(text).ok_or_else(|| InvalidAllowedTarget(text.clone()))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Returns the address to dial, if the list permits the requested target. `is_own` must return true for
    /// this node's addresses, or an error if they can't be read.
    pub(super) fn resolve(
        &self,
        requested: &RequestedTarget,
        is_own: impl Fn(IpAddr) -> io::Result<bool>,
    ) -> Result<SocketAddr, Reason> {
        let (address, port) = (requested.address.ip(), requested.address.port());
        let mut is_allowed = false;
        for allowance in &self.0 {
            // An entry that allows this address if it is one of this node's.
            let needs_own = match *allowance {
                AllowedTarget::Own(own) => !requested.loopback && own == port,
                AllowedTarget::Loopback(local) => requested.loopback && local == port,
                AllowedTarget::Exact(exact) => {
                    is_allowed |= !requested.loopback && exact == requested.address;
                    false
                }
            };
            if needs_own && can_identify_node(address) {
                is_allowed |= is_own(address).map_err(|error| reason_of_error(&error))?;
            }
        }
        if port == 0 || !is_allowed {
            return Err(Reason::TargetDenied);
        }
        let address = match address {
            IpAddr::V4(_) if requested.loopback => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) if requested.loopback => Ipv6Addr::LOCALHOST.into(),
            IpAddr::V4(_) | IpAddr::V6(_) => address,
        };
        Ok(SocketAddr::new(address, port))
    }
}

/// Returns true if `text` is a valid allow-list entry.
#[must_use]
pub fn is_allowed_target(text: &str) -> bool {
    parse_allowed_target(text).is_some()
}

fn parse_allowed_target(text: &str) -> Option<AllowedTarget> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    match host {
        "self" => Some(AllowedTarget::Own(port)),
        "localhost" => Some(AllowedTarget::Loopback(port)),
        _ => {
            let exact: SocketAddr = text.parse().ok()?;
            let exact = SocketAddr::new(exact.ip().to_canonical(), port);
            Some(AllowedTarget::Exact(exact))
        }
    }
}

/// Returns true if an address can identify a single node, which an unspecified, loopback, multicast,
/// broadcast or link-local address can't.
const fn can_identify_node(address: IpAddr) -> bool {
    let is_of_a_link = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(is_of_a_link || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

/// Returns the reason for a stream that is refused because this node's addresses can't be read.
fn reason_of_error(error: &io::Error) -> Reason {
    debug!(%error, "cannot read the addresses of this node");
    if file_descriptors::is_exhausted(error) {
        Reason::DescriptorLimit
    } else {
        Reason::TargetDenied
    }
}

/// Returns true if one of this node's interfaces currently has the address.
pub(super) fn is_own_address(address: IpAddr) -> io::Result<bool> {
    let mut interfaces = getifaddrs()?;
    Ok(interfaces.any(|interface| interface.address.as_ref().and_then(ip) == Some(address)))
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| v4.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| v6.ip().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> AllowList {
        let entries: Vec<_> = entries.iter().map(|text| (*text).to_owned()).collect();
        AllowList::parse(&entries).expect("allowances")
    }

    fn requested(address: &str, loopback: bool) -> RequestedTarget {
        RequestedTarget {
            address: address.parse().expect("an address"),
            loopback,
        }
    }

    #[test]
    fn entries_are_self_localhost_or_an_address_with_a_port() {
        for good in [
            "self:1",
            "localhost:65535",
            "10.0.0.1:80",
            "[fd00::1]:10250",
        ] {
            assert!(AllowList::parse(&[good.to_owned()]).is_ok(), "{good}");
        }
        for bad in [
            "",
            "self",
            "self:",
            "self:0",
            "self:65536",
            "selfish:1",
            "10.0.0.1",
            "example.org:80",
            "fd00::1:10250x",
            ":80",
        ] {
            assert!(AllowList::parse(&[bad.to_owned()]).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_entry_allows_its_own_port_of_its_own_host_and_nothing_else() {
        let allowed = list(&["self:10250", "localhost:10266", "192.168.0.9:443"]);
        let own: [IpAddr; 2] = ["10.1.2.3", "fd00::3"].map(|it| it.parse().expect("an address"));
        let resolve = |address, loopback| {
            allowed.resolve(&requested(address, loopback), |it| Ok(own.contains(&it)))
        };

        for (address, loopback, dialled) in [
            ("10.1.2.3:10250", false, "10.1.2.3:10250"),
            ("10.1.2.3:10266", true, "127.0.0.1:10266"),
            ("[fd00::3]:10266", true, "[::1]:10266"),
            ("192.168.0.9:443", false, "192.168.0.9:443"),
        ] {
            let dialled = dialled.parse().expect("an address");
            assert_eq!(resolve(address, loopback), Ok(dialled), "{address}");
        }
        for (what, address, loopback) in [
            ("self: somebody else's address", "10.1.2.4:10250", false),
            ("self: another port", "10.1.2.3:22", false),
            ("self: loopback", "10.1.2.3:10250", true),
            ("localhost: without the header", "10.1.2.3:10266", false),
            ("localhost: another node's", "10.1.2.4:10266", true),
            ("exact: loopback", "192.168.0.9:443", true),
            ("exact: another port", "192.168.0.9:444", false),
            ("exact: another address", "192.168.0.8:443", false),
        ] {
            let resolved = resolve(address, loopback);
            assert_eq!(resolved, Err(Reason::TargetDenied), "{what}");
        }
    }

    #[test]
    fn self_is_never_an_address_that_other_nodes_have_too() {
        let allowed = list(&["self:80", "localhost:80"]);
        for address in [
            "127.0.0.1:80",
            "127.9.9.9:80",
            "169.254.169.254:80",
            "0.0.0.0:80",
            "224.0.0.1:80",
            "255.255.255.255:80",
            "[::1]:80",
            "[::]:80",
            "[fe80::1]:80",
            "[ff02::1]:80",
        ] {
            for loopback in [false, true] {
                let requested = requested(address, loopback);
                let resolved = allowed.resolve(&requested, |_| Ok(true));
                assert_eq!(resolved, Err(Reason::TargetDenied), "{address}");
            }
        }
    }

    #[test]
    fn a_target_is_not_called_denied_for_lack_of_file_descriptors() {
        let allowed = list(&["10.1.2.3:80", "self:10250"]);
        let resolve = |address, number| {
            allowed.resolve(&requested(address, false), |_| {
                Err(io::Error::from_raw_os_error(number))
            })
        };

        let (full, denied) = (Reason::DescriptorLimit, Reason::TargetDenied);
        assert_eq!(resolve("10.1.2.3:10250", libc::EMFILE), Err(full));
        assert_eq!(resolve("10.1.2.3:10250", libc::ENOMEM), Err(denied));
        assert_eq!(resolve("10.1.2.3:22", libc::EMFILE), Err(denied));
        let exact = "10.1.2.3:80";
        let address = exact.parse().expect("an address");
        assert_eq!(resolve(exact, libc::EMFILE), Ok(address));
    }

    #[test]
    fn the_target_of_a_request_is_parsed_or_refused() {
        let of = |authority: &str, header: Option<&[u8]>| {
            let mut request = Request::connect(authority);
            if let Some(value) = header {
                request = request.header(TARGET_HEADER, value);
            }
            request
                .body(())
                .ok()
                .map(|request| RequestedTarget::parse(&request))
        };
        let v4 = Some(Ok(requested("10.1.2.3:10250", false)));
        assert_eq!(of("10.1.2.3:10250", None), v4);
        assert_eq!(of("[::ffff:10.1.2.3]:10250", None), v4, "v4-mapped");
        assert_eq!(
            of("[fd00::3]:10250", Some(b"loopback")),
            Some(Ok(requested("[fd00::3]:10250", true)))
        );
        for bad in [
            "example.org:80",
            "10.1.2.3",
            "10.1.2.3:99999",
            "user@10.1.2.3:80",
        ] {
            let read = of(bad, None);
            assert!(
                matches!(read, None | Some(Err(Reason::ProtocolError))),
                "{bad}: {read:?}"
            );
        }
        assert_eq!(
            of("10.1.2.3:80", Some(b"\xff")),
            Some(Err(Reason::ProtocolError))
        );
    }

    #[test]
    fn the_own_addresses_are_those_of_the_interfaces() {
        let is_own = |address: Ipv4Addr| is_own_address(address.into()).expect("addresses");
        assert!(is_own(Ipv4Addr::LOCALHOST));
        assert!(!is_own(Ipv4Addr::new(192, 0, 2, 77)));
    }
}
