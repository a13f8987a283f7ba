//! Executors: processes that keep a sandbox alive and carry out, inside it, the requests that they receive
//! over a socket pair.
//!
//! The kernel chooses the programs for a socket by the cgroup and network namespace of the socket itself. A
//! socket that an executor creates and passes to this process therefore behaves as if this process were in
//! the sandbox.

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

/// The timeout for a request. An executor responds at once unless it is broken.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The properties of a sandbox.
#[derive(Args, Clone, Debug)]
pub struct SandboxSpec {
    /// The ID of a process whose network namespace the sandbox joins; by default, a new namespace is created.
    #[arg(long)]
    pub network_of: Option<u32>,
    /// The path of an existing cgroup.
    #[arg(long)]
    pub cgroup: PathBuf,
    /// The directory on which to mount a BPF file system, in a new mount namespace.
    #[arg(long)]
    pub bpffs: Option<PathBuf>,
}

/// A sandbox's executor. When it is dropped, all processes in the sandbox are killed.
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
        if let Some(directory) = &spec.bpffs {
            command.arg("--bpffs").arg(directory);
        }
        // The executor gets its own process group, so that an interrupt at the terminal reaches only the
        // process that cleans up.
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
        // This process's copy of the executor's end must be closed; otherwise, neither side would notice when
        // the other one exits.
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

    /// Creates a socket in the sandbox.
    pub fn socket(
        &self,
        domain: Domain,
        kind: Type,
        protocol: Option<Protocol>,
    ) -> io::Result<Socket> {
        let request = Request::Socket {
            domain: domain.into(),
            kind: kind.into(),
            protocol: protocol.map(Into::into),
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

    /// Starts a process in the sandbox and returns its process ID. The process is killed when the executor
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

    /// Writes a file from within the sandbox, where `/proc/sys/net` belongs to the sandbox's network
    /// namespace.
    pub fn write(&self, path: &Path, text: &str) -> Result<()> {
        let (path, text) = (path.to_owned(), text.to_owned());
        self.call(&Request::Write { path, text }, &[])
    }

    /// Sends a request, and turns a failure reported in the response into an error.
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
        // When the executor dies, the sandbox's processes are killed, and the kernel removes its mounts and
        // interfaces.
        drop(process.kill());
        drop(wait::until(RESPONSE_TIMEOUT, || {
            !matches!(process.try_wait(), Ok(None))
        }));
    }
}
