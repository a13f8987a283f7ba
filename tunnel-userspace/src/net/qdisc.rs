//! Reads the kinds of the qdiscs at which the filters for packets that arrive on links are.

use std::{collections::BTreeMap, io, os::fd::AsRawFd as _};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockProtocol, recv, send},
};
use rtnetlink::{
    packet_core::{
        NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NlasIterator,
        parse_string,
    },
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcHandle, TcHeader, TcMessage},
    },
};

use super::blocking_netlink::{self, BUFFER_SIZE, message};

/// The parent of the qdiscs `ingress` and `clsact` (`TC_H_INGRESS`, `TC_H_CLSACT`).
const PARENT: TcHandle = TcHandle {
    major: 0xffff,
    minor: 0xfff1,
};
/// The length of a message's header (`struct tcmsg`).
const HEADER_LENGTH: usize = 20;
/// The attribute that contains the kind of a qdisc (`TCA_KIND`).
const KIND: u16 = 1;

/// Returns the kinds of the links' qdiscs for packets that arrive, `ingress` or `clsact`, by the indices of the links that have
/// one.
///
/// # Errors
///
/// Returns an error if the kernel can't list the qdiscs.
pub fn ingress_qdiscs() -> io::Result<BTreeMap<u32, String>> {
    let socket = blocking_netlink::open(SockProtocol::NetlinkRoute)?;
    send(socket.as_raw_fd(), &request(), MsgFlags::empty())?;
    let mut kinds = BTreeMap::new();
    let mut buffer = vec![0; BUFFER_SIZE];
    loop {
        let length = match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Err(Errno::EINTR) => continue,
            length => length?,
        };
        match read_kinds(buffer.get(..length).unwrap_or_default(), &mut kinds) {
            Reply::End => return Ok(kinds),
            Reply::Continued if length > 0 => {}
            Reply::Continued | Reply::Malformed => {
                return Err(io::Error::other("the list of qdiscs can't be parsed"));
            }
            Reply::Failed(errno) => return Err(errno.into()),
        }
    }
}

/// Returns the request for a list of the qdiscs of all links. The kernel can't list those of one link.
fn request() -> Vec<u8> {
    message(
        NLM_F_REQUEST | NLM_F_DUMP,
        0,
        RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default()),
    )
}

/// The content of a read buffer.
#[derive(Debug, Eq, PartialEq)]
enum Reply {
    /// The end of the list.
    End,
    /// A part of the list before the end.
    Continued,
    /// The request failed.
    Failed(Errno),
    /// No netlink messages.
    Malformed,
}

/// Adds the kinds in a read buffer. Parses no other attributes of qdiscs, which differ between kernels.
fn read_kinds(mut rest: &[u8], kinds: &mut BTreeMap<u32, String>) -> Reply {
    // This terminates, since a message is at least as long as its header.
    while !rest.is_empty() {
        let Ok(message) = NetlinkBuffer::new_checked(rest) else {
            return Reply::Malformed;
        };
        match message.message_type() {
            NLMSG_DONE => return Reply::End,
            NLMSG_ERROR => {
                let code = message.payload().first_chunk();
                let code = code.map_or(0, |code| i32::from_ne_bytes(*code));
                return Reply::Failed(Errno::from_raw(code.wrapping_neg()));
            }
            _ => kinds.extend(kind_of(message.payload())),
        }
        // Messages are aligned to four bytes.
        let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
        let next = length.checked_next_multiple_of(4);
        rest = next.and_then(|next| rest.get(next..)).unwrap_or_default();
    }
    Reply::Continued
}

/// Returns the index of a qdisc's link and the kind of the qdisc, if it is for packets that arrive.
fn kind_of(message: &[u8]) -> Option<(u32, String)> {
    let header = TcHeader::parse(message).ok()?;
    if header.parent != PARENT {
        return None;
    }
    let link = u32::try_from(header.index).ok()?;
    let attributes = NlasIterator::new(message.get(HEADER_LENGTH..)?);
    let mut attributes = attributes.filter_map(Result::ok);
    let kind = attributes.find(|attribute| attribute.kind() == KIND)?;
    let kind = parse_string(kind.value()).ok()?;
    Some((link, kind))
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::tc::TcAttribute;

    use super::*;

    /// Returns a part of the list that contains a qdisc.
    fn part(link: i32, parent: TcHandle, kind: &str) -> Vec<u8> {
        let mut message = TcMessage::with_index(link);
        message.header.parent = parent;
        message.attributes = vec![TcAttribute::Kind(kind.to_owned())];
        super::message(0, 0, RouteNetlinkMessage::NewQueueDiscipline(message))
    }

    /// Returns a message that ends the list.
    fn end(message_type: u16, code: i32) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        bytes[..4].copy_from_slice(&20_u32.to_ne_bytes());
        bytes[4..6].copy_from_slice(&message_type.to_ne_bytes());
        bytes[16..].copy_from_slice(&code.to_ne_bytes());
        bytes
    }

    /// Reads a buffer. Returns the reply, and the links with the kinds of their qdiscs.
    fn read(buffer: &[u8]) -> (Reply, Vec<(u32, String)>) {
        let mut kinds = BTreeMap::new();
        let reply = read_kinds(buffer, &mut kinds);
        (reply, kinds.into_iter().collect())
    }

    #[test]
    fn the_qdiscs_for_arriving_packets_are_found_among_others() {
        let root = TcHandle::ROOT;
        let parts = [
            part(7, root, "fq_codel"),
            part(8, PARENT, "clsact"),
            part(7, root, "noqueue"),
        ];
        let parts = parts.concat();
        let clsact = (8, "clsact".to_owned());
        assert_eq!(read(&parts), (Reply::Continued, vec![clsact.clone()]));
        for kind in ["ingress", "clsact"] {
            let all = [&*parts, &part(7, PARENT, kind), &end(NLMSG_DONE, 0)].concat();
            let kinds = vec![(7, kind.to_owned()), clsact.clone()];
            assert_eq!(read(&all), (Reply::End, kinds));
        }
        let ended = [&*parts, &end(NLMSG_DONE, 0)].concat();
        assert_eq!(read(&ended), (Reply::End, vec![clsact]));
        let denied = end(NLMSG_ERROR, -libc::EPERM);
        assert_eq!(read(&denied), (Reply::Failed(Errno::EPERM), vec![]));
        assert_eq!(read(&parts[..30]), (Reply::Malformed, vec![]));
    }
}
