//! Netlink sockets for requests that are answered at once, for callers that may block.

use std::os::fd::OwnedFd;

use nix::sys::{
    socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};
use rtnetlink::packet_core::{NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable};

/// The time limit for a read. The kernel replies immediately; the limit guards against lost messages.
const RECEIVE_TIMEOUT: TimeVal = TimeVal::new(2, 0);
/// The size of a read buffer, in bytes. The kernel fills the buffer, but returns at most 32 KiB per read
/// (`netlink_recvmsg`).
pub(super) const BUFFER_SIZE: usize = 32 * 1024;

/// Opens a socket for the calling thread's network namespace.
pub(super) fn open(protocol: SockProtocol) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    setsockopt(&socket, ReceiveTimeout, &RECEIVE_TIMEOUT)?;
    Ok(socket)
}

/// Serialises a message with its header.
pub(super) fn message<T>(flags: u16, sequence: u32, body: T) -> Vec<u8>
where
    T: NetlinkSerializable + Into<NetlinkPayload<T>>,
{
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, body.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}
