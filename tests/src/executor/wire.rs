//! The messages between an executor and the process that started it. Each message is a packet that contains
//! one JSON value and may carry open files.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    path::PathBuf,
};

use nix::{
    errno::Errno,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, sendmsg},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The maximum length of a message, in bytes. The longest messages contain a command line.
const MAX_LENGTH: usize = 128 * 1024;

/// A request to an executor.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Request {
    /// Asks the executor to confirm that it has entered its sandbox.
    Greet,
    /// Creates a socket, which is sent with the response. It belongs to the given user, or else to root.
    Socket {
        domain: i32,
        kind: i32,
        protocol: Option<i32>,
        user: Option<u32>,
    },
    /// Starts a process whose output goes to the two files sent with the request. The response is the process
    /// ID.
    Spawn { argv: Vec<String>, cpu: Option<u32> },
    /// Checks whether a process has exited; if so, the response is its [`Exit`].
    TryWait { pid: i32 },
    /// Sends a signal to a process.
    Signal { pid: i32, signal: i32 },
    /// Writes a file.
    Write { path: PathBuf, text: String },
}

/// The response to a request that failed.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Failure {
    pub(crate) errno: Option<i32>,
    pub(crate) message: String,
}

/// A process's exit status.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Exit {
    /// The exit code, unless the process was killed by a signal.
    pub code: Option<i32>,
    /// The signal that killed the process, if any.
    pub signal: Option<i32>,
}

impl Exit {
    /// Returns true if the exit code is 0.
    #[must_use]
    pub const fn is_success(self) -> bool {
        matches!(self.code, Some(0))
    }
}

pub(crate) fn send(
    channel: BorrowedFd<'_>,
    message: &impl Serialize,
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MAX_LENGTH {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the message is longer than 128 KiB",
        ));
    }
    let files: Vec<RawFd> = files.iter().map(|file| file.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&files)];
    let rights = if files.is_empty() {
        &rights[..0]
    } else {
        &rights[..]
    };
    let parts = [IoSlice::new(&text)];
    uninterrupted(|| {
        sendmsg::<()>(
            channel.as_raw_fd(),
            &parts,
            rights,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
    })?;
    Ok(())
}

/// Repeats a system call until no signal interrupts it. The kernel restarts none by itself on a socket with a time limit.
fn uninterrupted<T>(call: impl Fn() -> nix::Result<T>) -> nix::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

/// Receives the next message and the files it carries. Returns `None` if the other side has closed the
/// socket.
pub(crate) fn receive<T: DeserializeOwned>(
    channel: BorrowedFd<'_>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // Peek at the message to get its length, so that the buffer fits. Most messages are a thousand times
    // shorter than the maximum.
    let length = uninterrupted(|| {
        recv(
            channel.as_raw_fd(),
            &mut [],
            MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC,
        )
    })?;
    let mut text = vec![0; length.min(MAX_LENGTH)];
    let mut rights = nix::cmsg_space!([RawFd; 2]);
    let (length, files) = {
        let mut parts = [IoSliceMut::new(&mut text)];
        let message = recvmsg::<()>(
            channel.as_raw_fd(),
            &mut parts,
            Some(&mut rights),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )?;
        let files = message.cmsgs()?.flat_map(received_files).collect();
        (message.bytes, files)
    };
    if length == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&text[..length])?, files)))
}

#[expect(unsafe_code, reason = "a received file descriptor has no owner yet")]
fn received_files(message: ControlMessageOwned) -> Vec<OwnedFd> {
    let ControlMessageOwned::ScmRights(files) = message else {
        return Vec::new();
    };
    files
        .into_iter()
        .map(|file| {
            // SAFETY: the kernel opened this descriptor for this message, and the message is consumed here,
            // so nothing else owns the descriptor.
            unsafe { OwnedFd::from_raw_fd(file) }
        })
        .collect()
}
