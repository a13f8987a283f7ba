//! Executors: processes that keep a sandbox alive, and that perform in it the requests they receive over a
//! socket pair.
//!
//! The kernel selects the programs that run for a socket by the socket's own cgroup and network namespace. So
//! if an executor creates a socket and passes it to this process, the socket behaves as if this process were
//! in the sandbox.

use std::{
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use nix::sys::{
    signal::Signal,
    socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike as _},
};
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, Socket, Type};

use self::wire::{Exit, Failure, Request};
use crate::{environment, load_scale::LoadScale, wait};

pub(crate) mod child;
pub mod process;
pub mod wire;

/// The timeout for a response. Unless it is broken, an executor responds at once.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The properties of a sandbox.
#[derive(Args, Clone, Debug)]
pub struct SandboxSpec {
    /// The ID of a process in the network namespace that the sandbox should join. By default, the sandbox
    /// gets a new network namespace.
    #[arg(long)]
    pub network_of: Option<u32>,
    /// The ID of the user who creates the new network namespace, in a user namespace of their own. By default,
    /// root creates it.
    #[arg(long)]
    pub user: Option<u32>,
    /// The path of the sandbox's cgroup, which must exist.
    #[arg(long)]
    pub cgroup: PathBuf,
    /// A directory on which to mount a BPF file system, in a new mount namespace. By default, none is
    /// mounted.
    #[arg(long)]
    pub bpffs: Option<PathBuf>,
}

/// A sandbox's executor. Dropping it kills all processes in the sandbox.
#[derive(Debug)]
pub struct Executor {
    process: Mutex<Child>,
    pid: u32,
    channel: Mutex<OwnedFd>,
}

impl Executor {
    /// Starts an executor and waits until it has entered its sandbox.
    pub fn start(spec: &SandboxSpec) -> Result<Self> {
        let (channel, peer_end) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .context("cannot create a socket pair")?;
        let timeout = LoadScale::from_environment().timeout(RESPONSE_TIMEOUT);
        let timeout = TimeVal::milliseconds(i64::try_from(timeout.as_millis())?);
        setsockopt(&channel, ReceiveTimeout, &timeout)?;

        let program = environment::culvert_lab()?;
        let mut command = Command::new(&program);
        command.arg("executor").arg("--cgroup").arg(&spec.cgroup);
        if let Some(pid) = spec.network_of {
            command.arg("--network-of").arg(pid.to_string());
        }
        if let Some(user) = spec.user {
            command.arg("--user").arg(user.to_string());
            // Only a process with a single thread can create a user namespace, so the allocator must start none.
            command.env("_RJEM_MALLOC_CONF", "background_thread:false");
        }
        if let Some(directory) = &spec.bpffs {
            command.arg("--bpffs").arg(directory);
        }
        // The executor gets its own process group, so that an interrupt from the terminal reaches only this
        // process, which cleans up.
        let process = command
            .stdin(Stdio::from(peer_end))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = process.id();
        let executor = Self {
            process: Mutex::new(process),
            pid,
            channel: Mutex::new(channel),
        };
        // Close this process's copy of the executor's end of the socket pair. Otherwise, neither side would
        // notice that the other one has exited.
        drop(command);
        executor
            .call::<()>(&Request::Greet, &[])
            .context("an executor cannot enter its sandbox")?;
        Ok(executor)
    }

    /// Returns the executor's process ID. `/proc/<pid>/ns/net` and `/proc/<pid>/root` are the sandbox's
    /// network namespace and root directory.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Creates a socket in the sandbox. It belongs to the given user, or else to root.
    pub fn socket(
        &self,
        domain: Domain,
        kind: Type,
        protocol: Option<Protocol>,
        user: Option<u32>,
    ) -> io::Result<Socket> {
        let request = Request::Socket {
            domain: domain.into(),
            kind: kind.into(),
            protocol: protocol.map(Into::into),
            user,
        };
        let (response, socket) = self
            .exchange::<()>(&request, &[])
            .map_err(io::Error::other)?;
        let errno = response.as_ref().err().and_then(|failure| failure.errno);
        if let Some(errno) = errno {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let unexpected = || {
            io::Error::other(format!(
                "unexpected response to the request for a socket: {response:?}"
            ))
        };
        socket.map(Socket::from).ok_or_else(unexpected)
    }

    /// Starts a process in the sandbox, and returns its process ID. The process is killed when the executor
    /// exits.
    pub(crate) fn spawn(
        &self,
        argv: &[String],
        cpu: Option<u32>,
        output: [BorrowedFd<'_>; 2],
    ) -> Result<i32> {
        let argv = argv.to_vec();
        self.call(&Request::Spawn { argv, cpu }, &output)
    }

    /// Returns the exit status of a process in the sandbox, if the process has exited.
    pub(crate) fn try_wait(&self, pid: i32) -> Result<Option<Exit>> {
        self.call(&Request::TryWait { pid }, &[])
    }

    /// Sends a signal to a process in the sandbox.
    pub(crate) fn signal(&self, pid: i32, signal: Signal) -> Result<()> {
        #[expect(
            clippy::as_conversions,
            reason = "the number of a field-less enum of C"
        )]
        let signal = signal as i32;
        self.call(&Request::Signal { pid, signal }, &[])
    }

    /// Writes a file from within the sandbox. There, `/proc/sys/net` belongs to the sandbox's network
    /// namespace.
    pub fn write(&self, path: &Path, text: &str) -> Result<()> {
        let (path, text) = (path.to_owned(), text.to_owned());
        self.call(&Request::Write { path, text }, &[])
    }

    /// Sends a request and receives the response. Returns an error if the response reports a failure.
    fn call<T: DeserializeOwned>(&self, request: &Request, files: &[BorrowedFd<'_>]) -> Result<T> {
        let (response, _) = self.exchange(request, files)?;
        response.map_err(|failure| anyhow!(failure.message))
    }

    fn exchange<T: DeserializeOwned>(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> Result<(Result<T, Failure>, Option<OwnedFd>)> {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        wire::send(channel.as_fd(), request, files)
            .context("cannot send a request to an executor")?;
        let (response, mut files) = wire::receive(channel.as_fd())
            .context("an executor doesn't respond")?
            .context("an executor has ended")?;
        Ok((response, files.pop()))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let process = self
            .process
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        // When the executor exits, all processes in the sandbox are killed, and the kernel removes the
        // sandbox's mounts and network interfaces.
        drop(process.kill());
        drop(wait::until(RESPONSE_TIMEOUT, || {
            !matches!(process.try_wait(), Ok(None))
        }));
    }
}
