//! The netlink messages for sock_diag(7): requests and replies about TCP and UDP sockets. This module does no
//! I/O.

use std::net::SocketAddr;

use netlink_packet_sock_diag::{
    SockDiagDestroy, SockDiagMessage,
    constants::{AF_INET, AF_INET6},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use nix::errno::Errno;
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use tunnel_common::addr::{Address, Port, Protocol};

use crate::net::blocking_netlink::message;

/// The address families to list sockets for. IPv6 includes sockets with v4-mapped addresses.
pub(super) const ADDRESS_FAMILIES: [u8; 2] = [AF_INET, AF_INET6];

/// A listed socket's identity (its address family, addresses, ports, device and cookie), its owner, and its inode.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ListedSocket {
    family: u8,
    id: SocketId,
    user: u32,
    inode: u32,
}

impl ListedSocket {
    /// Returns the identity of an IPv6 socket that is connected to the given address and port.
    #[cfg(test)]
    pub(crate) fn of(address: Address, port: Port, cookie: u64) -> Self {
        let mut id = SocketId::new_v6();
        id.destination_address = std::net::Ipv6Addr::from(address.octets()).into();
        id.destination_port = port.to_host();
        id.cookie = cookie.to_ne_bytes();
        Self {
            family: AF_INET6,
            id,
            user: 0,
            inode: 0,
        }
    }

    /// Returns the address and port that the socket is bound to.
    #[must_use]
    pub fn local(&self) -> (Address, Port) {
        let address = Address::from_ip(self.id.source_address);
        (address, Port::from_host(self.id.source_port))
    }

    /// Returns the id of the user who created the socket, as seen from this process's user namespace
    /// (`idiag_uid`). If that namespace has no id for the user, the kernel reports the overflow id, which is
    /// 65534 by default (`from_kuid_munged`).
    #[must_use]
    pub const fn user(&self) -> u32 {
        self.user
    }

    /// Returns true if a process has the socket open. For a socket that is closed, but whose connection has not ended
    /// yet, the kernel may report root as the user.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.inode != 0
    }

    /// Returns the address and port that the socket is connected to.
    #[must_use]
    pub fn peer(&self) -> (Address, Port) {
        let address = Address::from_ip(self.id.destination_address);
        (address, Port::from_host(self.id.destination_port))
    }

    /// Returns the socket's cookie. The message contains it as two words, the lower one first
    /// (`sock_diag_save_cookie`).
    #[must_use]
    pub fn cookie(&self) -> u64 {
        let [a, b, c, d, e, f, g, h] = self.id.cookie;
        let word = |bytes| u64::from(u32::from_ne_bytes(bytes));
        word([e, f, g, h]) << 32 | word([a, b, c, d])
    }
}

/// Returns true if a socket in this state (`net/tcp_states.h`) is connected, so that a process may be waiting
/// for its peer.
#[must_use]
pub fn is_connected(protocol: Protocol, state: u32) -> bool {
    1_u32
        .checked_shl(state)
        .is_some_and(|bit| SocketFilter::Connected.states(protocol).bits() & bit != 0)
}

/// A filter for listed sockets, based on their state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SocketFilter {
    /// Connected sockets.
    Connected,
    /// Listening TCP sockets, and UDP sockets that are bound but not connected.
    Listening,
}

impl SocketFilter {
    /// Returns the socket states that match the filter. A connected UDP socket is in state `ESTABLISHED`.
    const fn states(self, protocol: Protocol) -> StateFlags {
        let is_tcp = protocol.number() == Protocol::TCP.number();
        match self {
            Self::Connected if is_tcp => StateFlags::ESTABLISHED
                .union(StateFlags::SYN_SENT)
                .union(StateFlags::FIN_WAIT1)
                .union(StateFlags::FIN_WAIT2)
                .union(StateFlags::CLOSE_WAIT),
            Self::Connected => StateFlags::ESTABLISHED,
            Self::Listening if is_tcp => StateFlags::LISTEN,
            Self::Listening => StateFlags::CLOSE,
        }
    }
}

/// Returns a request to list the sockets of a family and protocol that match a filter.
pub(super) fn list(family: u8, protocol: Protocol, filter: SocketFilter, sequence: u32) -> Vec<u8> {
    let id = if family == AF_INET {
        SocketId::new_v4()
    } else {
        SocketId::new_v6()
    };
    let request = request(
        protocol,
        filter.states(protocol),
        &ListedSocket {
            family,
            id,
            user: 0,
            inode: 0,
        },
    );
    message(NLM_F_REQUEST | NLM_F_DUMP, sequence, request)
}

/// Returns a request to find the TCP socket that is bound to `local` and connected to `peer`. The kernel may find a
/// listening socket instead.
pub(super) fn find(local: SocketAddr, peer: SocketAddr, sequence: u32) -> Vec<u8> {
    let (local_ip, peer_ip) = (local.ip().to_canonical(), peer.ip().to_canonical());
    let (family, mut id) = if local_ip.is_ipv4() {
        (AF_INET, SocketId::new_v4())
    } else {
        (AF_INET6, SocketId::new_v6())
    };
    (id.source_address, id.source_port) = (local_ip, local.port());
    (id.destination_address, id.destination_port) = (peer_ip, peer.port());
    // `INET_DIAG_NOCOOKIE`.
    id.cookie = [0xff; 8];
    let socket = ListedSocket {
        family,
        id,
        user: 0,
        inode: 0,
    };
    let request = request(Protocol::TCP, StateFlags::all(), &socket);
    message(NLM_F_REQUEST | NLM_F_ACK, sequence, request)
}

/// Returns a request to end a socket.
pub(super) fn end(protocol: Protocol, socket: &ListedSocket, sequence: u32) -> Vec<u8> {
    let request = request(protocol, StateFlags::all(), socket);
    message(
        NLM_F_REQUEST | NLM_F_ACK,
        sequence,
        SockDiagDestroy::new(request),
    )
}

fn request(protocol: Protocol, states: StateFlags, socket: &ListedSocket) -> SockDiagMessage {
    SockDiagMessage::InetRequest(InetRequest {
        family: socket.family,
        protocol: protocol.number(),
        extensions: ExtensionFlags::empty(),
        states,
        socket_id: socket.id.clone(),
    })
}

/// A message from the kernel.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Reply {
    /// A listed socket.
    Socket(ListedSocket),
    /// The end of a list, or the acknowledgement of another kind of request.
    Done,
    /// The request failed.
    Failed(Errno),
    /// Another kind of message, or a reply to another request.
    Other,
}

/// Parses the messages in a read buffer. Yields `None` for a malformed message, and then stops.
pub(super) fn parse_replies(part: &[u8], sequence: u32) -> impl Iterator<Item = Option<Reply>> {
    let mut rest = part;
    // This terminates, since a message is at least as long as its header.
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let read = NetlinkMessage::<SockDiagMessage>::deserialize(rest).ok();
        let length = read.as_ref().map(|message| message.header.length);
        let length = length.and_then(|length| usize::try_from(length).ok());
        // Messages are aligned to four bytes.
        let next = length.map(|length| length.next_multiple_of(4));
        rest = next.and_then(|next| rest.get(next..)).unwrap_or_default();
        Some(read.map(|message| reply(message, sequence)))
    })
}

fn reply(message: NetlinkMessage<SockDiagMessage>, sequence: u32) -> Reply {
    if message.header.sequence_number != sequence {
        return Reply::Other;
    }
    // `Done` also contains an error code if the kernel ended the list early.
    let code = match message.payload {
        NetlinkPayload::Error(error) => error.raw_code(),
        NetlinkPayload::Done(done) => done.code,
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found)) => {
            return Reply::Socket(ListedSocket {
                family: found.header.family,
                id: found.header.socket_id,
                user: found.header.uid,
                inode: found.header.inode,
            });
        }
        NetlinkPayload::Noop | NetlinkPayload::Overrun(_) | NetlinkPayload::InnerMessage(_) | _ => {
            return Reply::Other;
        }
    };
    if code < 0 {
        Reply::Failed(Errno::from_raw(code.wrapping_neg()))
    } else {
        Reply::Done
    }
}

#[cfg(test)]
mod tests;
