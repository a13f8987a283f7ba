//! Sockets of one network namespace, as sock_diag(7) lists and ends them.

mod message;

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt,
            socket, sockopt::ReceiveTimeout,
        },
        time::TimeVal,
    },
};
use tunnel_common::addr::Protocol;

use self::message::{Answer, FAMILIES};
pub use self::message::{Place, Stage, is_connected};

/// Counts the messages in a part of an answer.
pub(crate) fn messages_in(part: &[u8]) -> usize {
    message::answers(part, 0).count()
}

/// How long the kernel may take for a part of an answer. It answers at once; the bound is against a
/// message that was lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// What is read at once: the most that the kernel puts into one part of a list (`netlink_recvmsg`
/// takes the size of the reader's buffer for it, up to 32 KiB).
const ROOM: usize = 32 * 1024;

/// Sockets can't be listed or ended.
#[derive(Debug, thiserror::Error)]
pub enum DiagError {
    /// No socket of sock_diag.
    #[error("cannot open a socket of sock_diag")]
    Open(#[source] io::Error),
    /// The kernel has no diagnosis of that protocol.
    #[error("this kernel has no module {module}, which lists and ends sockets of {protocol}")]
    Absent {
        /// The kernel module.
        module: &'static str,
        /// The protocol.
        protocol: &'static str,
    },
    /// The kernel can list, but not end.
    #[error("this kernel can't end sockets (CONFIG_INET_DIAG_DESTROY)")]
    Unable,
    /// The kernel refused a step for want of rights.
    #[error("the kernel does not let this process {step}: it takes CAP_NET_ADMIN")]
    Denied {
        /// What was tried.
        step: &'static str,
    },
    /// A step failed.
    #[error("cannot {step}")]
    Step {
        /// What was tried.
        step: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel's answer is not what sock_diag(7) says.
    #[error("sock_diag answered in a way that is not known")]
    Answer,
}

impl DiagError {
    /// Whether the same may succeed a moment later.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Open(_) | Self::Step { .. } | Self::Answer => true,
            Self::Absent { .. } | Self::Unable | Self::Denied { .. } => false,
        }
    }
}

const LIST: &str = "list sockets";
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

/// sock_diag of the network namespace in which this was opened.
#[derive(Debug)]
pub struct Diag {
    socket: OwnedFd,
    /// The number of the last question, which its answers bear.
    number: u32,
    buffer: Vec<u8>,
}

impl Diag {
    /// Opens it, for the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// The kernel gives no such socket.
    pub fn open() -> Result<Self, DiagError> {
        let opened = || -> Result<OwnedFd, Errno> {
            let flags = SockFlag::SOCK_CLOEXEC;
            let protocol = SockProtocol::NetlinkSockDiag;
            let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
            let seconds = i64::try_from(PATIENCE.as_secs()).unwrap_or(1);
            setsockopt(&socket, ReceiveTimeout, &TimeVal::new(seconds, 0))?;
            Ok(socket)
        };
        Ok(Self {
            socket: opened().map_err(|errno| DiagError::Open(errno.into()))?,
            number: 0,
            buffer: vec![0; ROOM],
        })
    }

    /// Shows every socket of a protocol that is at a stage, of both families. Sockets that are made or
    /// closed meanwhile may be among them or not.
    ///
    /// # Errors
    ///
    /// The kernel can't list them, or breaks off.
    pub fn list(
        &mut self,
        protocol: Protocol,
        stage: Stage,
        mut show: impl FnMut(Place),
    ) -> Result<(), DiagError> {
        for family in FAMILIES {
            self.ask(LIST, |number| {
                message::list(family, protocol, stage, number)
            })?;
            // Ends with the kernel's list, of which each part is waited for at most for `PATIENCE`.
            while !self.part(protocol, &mut show)? {}
        }
        Ok(())
    }

    /// Ends a socket as if its peer had: whoever waits on it gets ECONNABORTED. False if it is not
    /// there any more, or is connected elsewhere by now.
    ///
    /// # Errors
    ///
    /// The kernel can't end it.
    pub fn end(&mut self, protocol: Protocol, place: &Place) -> Result<bool, DiagError> {
        self.ask(END, |number| message::end(protocol, place, number))?;
        loop {
            let number = self.number;
            let length = self.receive(END)?;
            let part = self.buffer.get(..length).unwrap_or_default();
            for answer in message::answers(part, number) {
                match answer.ok_or(DiagError::Answer)? {
                    Answer::Failed(Errno::ENOENT) => return Ok(false),
                    Answer::Failed(Errno::EOPNOTSUPP) => return Err(DiagError::Unable),
                    Answer::Failed(errno) => return Err(failed(END)(errno)),
                    Answer::Done => return Ok(true),
                    Answer::Socket(_) | Answer::Other => {}
                }
            }
        }
    }

    fn ask(
        &mut self,
        step: &'static str,
        message: impl FnOnce(u32) -> Vec<u8>,
    ) -> Result<(), DiagError> {
        self.number = self.number.wrapping_add(1);
        let message = message(self.number);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())
            .map(drop)
            .map_err(failed(step))
    }

    /// Takes one part of a list; whether it was the last.
    fn part(
        &mut self,
        protocol: Protocol,
        show: &mut impl FnMut(Place),
    ) -> Result<bool, DiagError> {
        let length = self.receive(LIST)?;
        let part = self.buffer.get(..length).unwrap_or_default();
        for answer in message::answers(part, self.number) {
            match answer.ok_or(DiagError::Answer)? {
                Answer::Socket(found) => show(found),
                Answer::Other => {}
                Answer::Done => return Ok(true),
                // No handler of that protocol: `inet_diag_lock_handler`, `__sock_diag_cmd`.
                Answer::Failed(Errno::ENOENT) => return Err(absent(protocol)),
                Answer::Failed(errno) => return Err(failed(LIST)(errno)),
            }
        }
        Ok(false)
    }

    fn receive(&mut self, step: &'static str) -> Result<usize, DiagError> {
        loop {
            // With MSG_TRUNC the whole length is told, also of what did not fit.
            match recv(
                self.socket.as_raw_fd(),
                &mut self.buffer,
                MsgFlags::MSG_TRUNC,
            ) {
                Ok(length) if length > self.buffer.len() || length == 0 => {
                    return Err(DiagError::Answer);
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
