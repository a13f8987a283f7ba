//! Requests to the kernel's generic netlink families. See `include/uapi/linux/genetlink.h` in the kernel source.

use std::{ffi::CStr, io};

use anyhow::{Context as _, Result};
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

/// A connection to a family in one network namespace.
#[derive(Debug)]
pub(crate) struct Connection {
    name: &'static CStr,
    socket: Socket,
    family: u16,
}

impl Connection {
    /// Connects to a family in a sandbox's network namespace.
    pub(crate) fn open(sandbox: &Sandbox, name: &'static CStr) -> Result<Self> {
        let socket = sandbox.socket_with_protocol(domain(), Type::RAW, generic())?;
        let family = family_id(&socket, name)?;
        let family =
            family.with_context(|| format!("this kernel has no {}", name.to_string_lossy()))?;
        Ok(Self {
            name,
            socket,
            family,
        })
    }

    /// Sends a command.
    pub(crate) fn send(&self, command: u8, attributes: &[DefaultNla]) -> Result<()> {
        let message = Message {
            family: self.family,
            command,
            attributes: encode(attributes),
        };
        let answered = ip::request(&self.socket, message, ip::CHANGE_FLAGS);
        let refused = || format!("{} refused the request", self.name.to_string_lossy());
        answered.map(drop).with_context(refused)
    }
}

/// Returns true if the kernel has a family, after loading its module if necessary.
pub(crate) fn is_known(name: &CStr) -> Result<bool> {
    let socket = Socket::new(domain(), Type::RAW, Some(generic()))?;
    Ok(family_id(&socket, name)?.is_some())
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

/// Returns an attribute that consists of others.
pub(crate) fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    DefaultNla::new(NLA_F_NESTED | kind, encode(attributes))
}

/// Returns an attribute with a value.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> DefaultNla {
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
