//! Lists and ends the sockets in a network namespace through sock_diag(7).

mod message;

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, SockProtocol, recv, send},
};
use tunnel_common::addr::{Address, Port, Protocol};

use self::message::{ADDRESS_FAMILIES, Reply};
pub use self::message::{ListedSocket, SocketFilter, is_connected};
use super::blocking_netlink::{self, BUFFER_SIZE};

/// Returns the number of netlink messages in a buffer. Used by the fuzz target.
pub(crate) fn messages_in(part: &[u8]) -> usize {
    message::parse_replies(part, 0).count()
}

/// An error from listing or ending sockets.
#[derive(Debug, thiserror::Error)]
pub enum DiagError {
    /// The netlink socket for sock_diag can't be opened.
    #[error("cannot open a netlink socket for sock_diag")]
    Open(#[source] io::Error),
    /// The kernel has no sock_diag support for a protocol.
    #[error("this kernel lacks the module {module}, which lists and ends {protocol} sockets")]
    Absent {
        /// The name of the kernel module.
        module: &'static str,
        /// The name of the protocol.
        protocol: &'static str,
    },
    /// The kernel can list sockets, but it can't end them.
    #[error("this kernel can't end sockets: it was built without CONFIG_INET_DIAG_DESTROY")]
    Unable,
    /// The process lacks the privileges for an operation.
    #[error("cannot {step}: this process lacks CAP_NET_ADMIN")]
    Denied {
        /// The operation that failed.
        step: &'static str,
    },
    /// An operation failed.
    #[error("cannot {step}")]
    Step {
        /// The operation that failed.
        step: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel's reply does not conform to sock_diag(7).
    #[error("the reply of sock_diag can't be parsed")]
    UnknownReply,
}

impl DiagError {
    /// Returns true if retrying the operation may succeed.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Open(_) | Self::Step { .. } | Self::UnknownReply => true,
            Self::Absent { .. } | Self::Unable | Self::Denied { .. } => false,
        }
    }
}

const LIST: &str = "list sockets";
const FIND: &str = "search for a socket";
const END: &str = "end a socket";

fn failed(step: &'static str) -> impl Fn(Errno) -> DiagError {
    move |errno| {
        if matches!(errno, Errno::EPERM | Errno::EACCES) {
            DiagError::Denied { step }
        } else {
            let source = errno.into();
            DiagError::Step { step, source }
        }
    }
}

/// A sock_diag socket, for the network namespace in which it was opened.
#[derive(Debug)]
pub struct SockDiag {
    socket: OwnedFd,
    /// The sequence number of the last request, which the replies repeat.
    sequence: u32,
    buffer: Vec<u8>,
}

impl SockDiag {
    /// Opens a socket for the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// Returns an error if the socket can't be opened.
    pub fn open() -> Result<Self, DiagError> {
        Ok(Self {
            socket: blocking_netlink::open(SockProtocol::NetlinkSockDiag)
                .map_err(|errno| DiagError::Open(errno.into()))?,
            sequence: 0,
            buffer: vec![0; BUFFER_SIZE],
        })
    }

    /// Calls `visit` for every IPv4 and IPv6 socket of a protocol that matches a filter. Sockets that are
    /// opened or closed in the meantime may or may not be included.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't list the sockets, or ends the list early.
    pub fn list(
        &mut self,
        protocol: Protocol,
        filter: SocketFilter,
        mut visit: impl FnMut(ListedSocket),
    ) -> Result<(), DiagError> {
        for family in ADDRESS_FAMILIES {
            let request = |sequence| message::list(family, protocol, filter, sequence);
            match self.request(LIST, request, &mut visit)? {
                None => {}
                // The kernel has no handler for the protocol (`inet_diag_lock_handler`, `__sock_diag_cmd`).
                Some(Errno::ENOENT) => return Err(absent(protocol)),
                Some(errno) => return Err(failed(LIST)(errno)),
            }
        }
        Ok(())
    }

    /// Returns the TCP socket that is bound to `local` and connected to `peer`, if it is in this network namespace.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't search for sockets.
    pub fn find_connected(
        &mut self,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<Option<ListedSocket>, DiagError> {
        let mut found = None;
        let request = |sequence| message::find(local, peer, sequence);
        let ended = self.request(FIND, request, |socket| found = Some(socket))?;
        let address = |at: SocketAddr| (Address::from_ip(at.ip()), Port::from_host(at.port()));
        // Without such a socket, the kernel also searches for a listening one.
        let is_wanted = |socket: &ListedSocket| {
            (socket.local(), socket.peer()) == (address(local), address(peer))
        };
        match ended {
            None => Ok(found.filter(is_wanted)),
            Some(Errno::ENOENT) => Ok(None),
            Some(errno) => Err(failed(FIND)(errno)),
        }
    }

    /// Ends a socket: blocked calls on it fail with ECONNABORTED. Returns false if the socket has been
    /// closed, or connected to another peer, since it was listed.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't end the socket.
    pub fn end(&mut self, protocol: Protocol, socket: &ListedSocket) -> Result<bool, DiagError> {
        let request = |sequence| message::end(protocol, socket, sequence);
        match self.request(END, request, |_socket| {})? {
            None => Ok(true),
            Some(Errno::ENOENT) => Ok(false),
            Some(Errno::EOPNOTSUPP) => Err(DiagError::Unable),
            Some(errno) => Err(failed(END)(errno)),
        }
    }

    /// Sends a request, and calls `visit` for each socket in the replies. Returns the error that ended the
    /// kernel's replies, if any. Waits at most `RECEIVE_TIMEOUT` for each read.
    fn request(
        &mut self,
        step: &'static str,
        request: impl FnOnce(u32) -> Vec<u8>,
        mut visit: impl FnMut(ListedSocket),
    ) -> Result<Option<Errno>, DiagError> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = request(self.sequence);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty()).map_err(failed(step))?;
        loop {
            let length = self.receive(step)?;
            let part = self.buffer.get(..length).unwrap_or_default();
            for reply in message::parse_replies(part, self.sequence) {
                match reply.ok_or(DiagError::UnknownReply)? {
                    Reply::Socket(found) => visit(found),
                    Reply::Other => {}
                    Reply::Done => return Ok(None),
                    Reply::Failed(errno) => return Ok(Some(errno)),
                }
            }
        }
    }

    fn receive(&mut self, step: &'static str) -> Result<usize, DiagError> {
        loop {
            // With MSG_TRUNC, recv() returns the full length of a message even if it exceeds the buffer.
            match recv(
                self.socket.as_raw_fd(),
                &mut self.buffer,
                MsgFlags::MSG_TRUNC,
            ) {
                Ok(length) if length > self.buffer.len() || length == 0 => {
                    return Err(DiagError::UnknownReply);
                }
                Ok(length) => return Ok(length),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(failed(step)(errno)),
            }
        }
    }
}

fn absent(protocol: Protocol) -> DiagError {
    let (module, protocol) = if protocol == Protocol::TCP {
        ("tcp_diag", "TCP")
    } else {
        ("udp_diag", "UDP")
    };
    DiagError::Absent { module, protocol }
}
