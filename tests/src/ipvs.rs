//! IPVS of a network namespace, told by messages of generic netlink: `net/netfilter/ipvs` and
//! `include/uapi/linux/ip_vs.h` of the kernel.

use std::{
    ffi::CStr,
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, bail};
use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

use crate::place::{ANSWER, Place};

/// The family that tells of the others, and its request for one by its name.
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const NAME: &CStr = c"IPVS";
const NEW_SERVICE: u8 = 1;
const REMOVE_SERVICE: u8 = 3;
const NEW_DESTINATION: u8 = 5;
/// The parts of a request.
const SERVICE: u16 = 1;
const DESTINATION: u16 = 2;

const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
const NESTED: u16 = 0x8000;
/// The header of a message, and that with the header of generic netlink.
const HEADER: usize = 16;
const HEADERS: usize = 20;
const ERROR: u16 = 2;

/// IPVS of a network namespace.
#[derive(Debug)]
pub struct Ipvs {
    socket: Socket,
    family: u16,
}

impl Ipvs {
    /// Asks for IPVS where a place is.
    ///
    /// # Errors
    ///
    /// When the kernel has none.
    pub fn open(place: &Place) -> Result<Self> {
        let socket = place.socket_of(domain(), Type::RAW, generic())?;
        let family = family(&socket)?.context("this kernel has no IPVS")?;
        Ok(Self { socket, family })
    }

    /// Makes a virtual service of TCP with one destination, whose packets are rewritten.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub fn add(&self, service: SocketAddr, destination: SocketAddr) -> Result<()> {
        // A mask in network byte order, or the length of a prefix.
        let whole = match service {
            SocketAddr::V4(_) => [0xff; 4],
            SocketAddr::V6(_) => 128_u32.to_ne_bytes(),
        };
        let full = [
            attribute(6, c"rr".to_bytes_with_nul()),
            attribute(7, &[0; 8]),
            attribute(8, &0_u32.to_ne_bytes()),
            attribute(9, &whole),
        ];
        let named = [name(service), full.concat()].concat();
        self.tell(NEW_SERVICE, &nested(SERVICE, &named))?;
        let destination = [
            attribute(1, &address(destination.ip())),
            attribute(2, &destination.port().to_be_bytes()),
            attribute(3, &0_u32.to_ne_bytes()),
            attribute(4, &1_u32.to_ne_bytes()),
            attribute(5, &0_u32.to_ne_bytes()),
            attribute(6, &0_u32.to_ne_bytes()),
        ];
        let both = [
            nested(SERVICE, &name(service)),
            nested(DESTINATION, &destination.concat()),
        ];
        self.tell(NEW_DESTINATION, &both.concat())
    }

    /// Takes a virtual service away.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn remove(&self, service: SocketAddr) -> Result<()> {
        self.tell(REMOVE_SERVICE, &nested(SERVICE, &name(service)))
    }

    fn tell(&self, command: u8, attributes: &[u8]) -> Result<()> {
        let answered = ask(&self.socket, self.family, command, attributes);
        answered.map(drop).context("IPVS refuses")
    }
}

/// Whether the kernel has IPVS; it loads the module if there is one.
///
/// # Errors
///
/// When it doesn't say.
pub(crate) fn is_there() -> Result<bool> {
    let socket = Socket::new(domain(), Type::RAW, Some(generic()))?;
    Ok(family(&socket)?.is_some())
}

fn domain() -> Domain {
    Domain::from(libc::AF_NETLINK)
}

fn generic() -> Protocol {
    Protocol::from(libc::NETLINK_GENERIC)
}

/// The number of the family; nothing if there is none.
fn family(socket: &Socket) -> Result<Option<u16>> {
    let name = attribute(FAMILY_NAME, NAME.to_bytes_with_nul());
    match ask(socket, CONTROL, GET_FAMILY, &name) {
        Ok(told) => find(&told, FAMILY_ID)
            .context("a family without a number")
            .map(Some),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error).context("the kernel doesn't tell of families"),
    }
}

/// What names a service: family, protocol, address and port.
fn name(service: SocketAddr) -> Vec<u8> {
    let family = match service {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let short = |number: i32| u16::try_from(number).unwrap_or_default().to_ne_bytes();
    [
        attribute(1, &short(family)),
        attribute(2, &short(libc::IPPROTO_TCP)),
        attribute(3, &address(service.ip())),
        attribute(4, &service.port().to_be_bytes()),
    ]
    .concat()
}

/// `union nf_inet_addr`.
fn address(of: IpAddr) -> [u8; 16] {
    let mut address = [0; 16];
    match of {
        IpAddr::V4(of) => address[..4].copy_from_slice(&of.octets()),
        IpAddr::V6(of) => address = of.octets(),
    }
    address
}

fn nested(kind: u16, attributes: &[u8]) -> Vec<u8> {
    attribute(NESTED | kind, attributes)
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The number of two bytes that an attribute holds.
fn find(mut attributes: &[u8], kind: u16) -> Option<u16> {
    let short = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 2)?;
        Some(u16::from_ne_bytes(bytes.try_into().ok()?))
    };
    // Each turn takes an attribute off.
    while let Some(length) = short(attributes, 0).filter(|length| *length >= 4) {
        if short(attributes, 2)? == kind {
            return short(attributes, 4);
        }
        attributes = attributes.get(usize::from(length).next_multiple_of(4)..)?;
    }
    None
}

/// Sends a request, and gives the attributes of what is answered before the acknowledgement.
fn ask(socket: &Socket, family: u16, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(HEADERS + attributes.len()).map_err(io::Error::other)?;
    let mut request = length.to_ne_bytes().to_vec();
    request.extend(family.to_ne_bytes());
    request.extend(REQUEST_AND_ACKNOWLEDGE.to_ne_bytes());
    request.extend([0; 8]);
    request.extend([command, 1, 0, 0]);
    request.extend(attributes);
    socket.set_read_timeout(Some(ANSWER))?;
    socket.send(&request)?;
    let mut told = Vec::new();
    let mut buffer = [0; 8192];
    loop {
        let received = (&*socket).read(&mut buffer)?;
        let mut messages = &buffer[..received];
        // Each turn takes a message off.
        while let Some((message, rest)) = split(messages) {
            messages = rest;
            if message[4..6] != ERROR.to_ne_bytes() {
                told.extend(message.get(HEADERS..).unwrap_or_default());
                continue;
            }
            let number = message.get(HEADER..HEADERS).unwrap_or_default();
            let number = number.try_into().map_err(io::Error::other)?;
            return match i32::from_ne_bytes(number) {
                0 => Ok(told),
                number => Err(io::Error::from_raw_os_error(-number)),
            };
        }
    }
}

/// The first message, and those behind it.
fn split(messages: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = messages.first_chunk().copied().map(u32::from_ne_bytes)?;
    let length = usize::try_from(length).ok()?;
    if length < HEADER || length > messages.len() {
        return None;
    }
    let next = length.next_multiple_of(4).min(messages.len());
    Some((&messages[..length], &messages[next..]))
}

/// How many connections the IPVS of a place holds.
///
/// # Errors
///
/// When it can't be read.
pub fn connections(place: &Place) -> Result<usize> {
    let listed = place.run(&["cat", "/proc/net/ip_vs_conn"])?;
    let Some((_head, connections)) = listed.split_once('\n') else {
        bail!("no list of connections: {listed}");
    };
    Ok(connections.lines().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_is_found_behind_others() {
        let bytes = [attribute(2, b"IPVS\0"), attribute(1, &37_u16.to_ne_bytes())].concat();

        assert_eq!(find(&bytes, 1), Some(37));
        assert_eq!(find(&bytes, 3), None);
        assert_eq!(find(&bytes[..bytes.len() - 4], 1), None);
    }

    #[test]
    fn messages_are_taken_one_by_one() {
        let message = |length: u32, bytes: usize| {
            let mut message = length.to_ne_bytes().to_vec();
            message.resize(bytes, 0);
            message
        };
        let two = [message(18, 20), message(16, 16)].concat();

        let (first, rest) = split(&two).unwrap();
        assert_eq!((first.len(), rest.len()), (18, 16));
        let (second, rest) = split(rest).unwrap();
        assert_eq!((second.len(), rest.len()), (16, 0));
        assert!(split(rest).is_none());
        assert!(split(&message(24, 20)).is_none());
        assert!(split(&message(4, 20)).is_none());
    }
}
