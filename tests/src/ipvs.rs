//! Configures IPVS in a network namespace over generic netlink. See `net/netfilter/ipvs` and
//! `include/uapi/linux/ip_vs.h` in the kernel source.

use std::{
    ffi::CStr,
    io,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, bail};
use nix::libc;
use rtnetlink::packet_core::{
    DefaultNla, Emitable as _, NLA_F_NESTED, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkSerializable, NlasIterator, parse_u16,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{ip, sandbox::Sandbox};

/// Constants for requests to the generic netlink controller, which looks up a family's ID by the family's
/// name.
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const FAMILY: &CStr = c"IPVS";
const NEW_SERVICE: u8 = 1;
const REMOVE_SERVICE: u8 = 3;
const NEW_DESTINATION: u8 = 5;
/// The top-level attributes of a request.
const SERVICE: u16 = 1;
const DESTINATION: u16 = 2;

/// A connection to IPVS in one network namespace.
#[derive(Debug)]
pub struct Ipvs {
    socket: Socket,
    family: u16,
}

impl Ipvs {
    /// Connects to IPVS in a sandbox's network namespace.
    pub fn open(sandbox: &Sandbox) -> Result<Self> {
        let socket = sandbox.socket_with_protocol(domain(), Type::RAW, generic())?;
        let family = family_id(&socket, FAMILY)?.context("this kernel has no IPVS")?;
        Ok(Self { socket, family })
    }

    /// Adds a virtual TCP service that forwards its connections to one destination, using NAT.
    pub fn add(&self, service: SocketAddr, destination: SocketAddr) -> Result<()> {
        // For IPv4, the field is a netmask in network byte order; for IPv6, it is a prefix length in host
        // byte order.
        let netmask = match service {
            SocketAddr::V4(_) => [0xff; 4],
            SocketAddr::V6(_) => 128_u32.to_ne_bytes(),
        };
        let mut named = service_id(service);
        named.extend([
            attribute(6, c"rr".to_bytes_with_nul()),
            attribute(7, &[0; 8]),
            attribute(8, &0_u32.to_ne_bytes()),
            attribute(9, &netmask),
        ]);
        self.send(NEW_SERVICE, &[nested(SERVICE, &named)])?;
        let destination = [
            attribute(1, &address(destination.ip())),
            attribute(2, &destination.port().to_be_bytes()),
            attribute(3, &0_u32.to_ne_bytes()),
            attribute(4, &1_u32.to_ne_bytes()),
            attribute(5, &0_u32.to_ne_bytes()),
            attribute(6, &0_u32.to_ne_bytes()),
        ];
        let both = [
            nested(SERVICE, &service_id(service)),
            nested(DESTINATION, &destination),
        ];
        self.send(NEW_DESTINATION, &both)
    }

    /// Removes a virtual service.
    pub fn remove(&self, service: SocketAddr) -> Result<()> {
        self.send(REMOVE_SERVICE, &[nested(SERVICE, &service_id(service))])
    }

    fn send(&self, command: u8, attributes: &[DefaultNla]) -> Result<()> {
        let message = Message {
            family: self.family,
            command,
            attributes: encode(attributes),
        };
        let answered = ip::request(&self.socket, message, ip::CHANGE_FLAGS);
        answered.map(drop).context("IPVS refused the request")
    }
}

/// Returns true if the kernel supports IPVS, after loading the module if necessary.
pub(crate) fn is_supported() -> Result<bool> {
    let socket = Socket::new(domain(), Type::RAW, Some(generic()))?;
    Ok(family_id(&socket, FAMILY)?.is_some())
}

fn domain() -> Domain {
    Domain::from(libc::AF_NETLINK)
}

fn generic() -> Protocol {
    Protocol::from(libc::NETLINK_GENERIC)
}

/// Looks up the ID of a generic netlink family. Returns `None` if the kernel lacks the family.
fn family_id(socket: &Socket, name: &CStr) -> Result<Option<u16>> {
    let name = attribute(FAMILY_NAME, name.to_bytes_with_nul());
    let message = Message {
        family: CONTROLLER,
        command: GET_FAMILY,
        attributes: encode(&[name]),
    };
    match ip::request(socket, message, NLM_F_REQUEST) {
        Ok(response) => response
            .and_then(|response| find_u16(&response.attributes, FAMILY_ID))
            .context("the response has no ID of the family")
            .map(Some),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error).context("cannot look up a generic netlink family"),
    }
}

/// Returns the attributes that identify a virtual service: its address family, protocol, address and port.
fn service_id(service: SocketAddr) -> Vec<DefaultNla> {
    let family = match service {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let short = |number: i32| u16::try_from(number).unwrap_or_default().to_ne_bytes();
    vec![
        attribute(1, &short(family)),
        attribute(2, &short(libc::IPPROTO_TCP)),
        attribute(3, &address(service.ip())),
        attribute(4, &service.port().to_be_bytes()),
    ]
}

/// Encodes an address as the kernel's `union nf_inet_addr`.
fn address(of: IpAddr) -> [u8; 16] {
    let mut address = [0; 16];
    match of {
        IpAddr::V4(of) => address[..4].copy_from_slice(&of.octets()),
        IpAddr::V6(of) => address = of.octets(),
    }
    address
}

fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    DefaultNla::new(NLA_F_NESTED | kind, encode(attributes))
}

fn attribute(kind: u16, value: &[u8]) -> DefaultNla {
    DefaultNla::new(kind, value.to_vec())
}

fn encode(attributes: &[DefaultNla]) -> Vec<u8> {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    bytes
}

/// Returns the value of the first attribute of the given kind, which must be a 16-bit number.
fn find_u16(attributes: &[u8], kind: u16) -> Option<u16> {
    let mut attributes = NlasIterator::new(attributes).flatten();
    let found = attributes.find(|attribute| attribute.kind() == kind)?;
    parse_u16(found.value()).ok()
}

/// A generic netlink message.
#[derive(Debug)]
struct Message {
    family: u16,
    command: u8,
    attributes: Vec<u8>,
}

/// The length of `struct genlmsghdr`: a command byte, a version byte and two reserved bytes.
const HEADER: usize = 4;

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        let (header, attributes) = buffer.split_at_mut(HEADER);
        header.copy_from_slice(&[self.command, 1, 0, 0]);
        attributes.copy_from_slice(&self.attributes);
    }
}

impl NetlinkDeserializable for Message {
    type Error = io::Error;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> io::Result<Self> {
        let (&[command, ..], attributes) = payload
            .split_first_chunk::<HEADER>()
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(Self {
            family: header.message_type,
            command,
            attributes: attributes.to_vec(),
        })
    }
}

/// Returns how many connections the IPVS table of a sandbox contains.
pub fn connections(sandbox: &Sandbox) -> Result<usize> {
    let table = sandbox.run(&["cat", "/proc/net/ip_vs_conn"])?;
    let Some((_head, connections)) = table.split_once('\n') else {
        bail!("/proc/net/ip_vs_conn has no header line: {table}");
    };
    Ok(connections.lines().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_family_has_an_id_and_a_missing_one_has_none() {
        let socket = Socket::new(domain(), Type::RAW, Some(generic())).unwrap();

        assert_eq!(family_id(&socket, c"nlctrl").unwrap(), Some(CONTROLLER));
        assert_eq!(family_id(&socket, c"absent").unwrap(), None);
    }
}
