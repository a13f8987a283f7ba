//! Agents: processes that hold a place and do in it what they are asked over a socket pair.
//!
//! Cgroup programs go by the cgroup and the network namespace of the *socket*, so a socket that an
//! agent made and handed over is used from here as if this process were in the place.

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

use anyhow::{Context as _, Result, bail};
use nix::sys::{
    signal::Signal,
    socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike as _},
};
use socket2::{Domain, Protocol, Socket, Type};

use self::wire::{Exit, Reply, Request};
use crate::{environment, scale::Scale, wait};

pub(crate) mod child;
pub mod run;
pub mod wire;

/// No request takes long: the agent answers at once or is broken.
const ANSWER: Duration = Duration::from_secs(10);

/// Where a place begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Network {
    /// In a network namespace of its own.
    Own,
    /// In the network namespace of another place, given by the process that holds it.
    Of(u32),
}

/// What a place consists of.
#[derive(Clone, Debug)]
pub struct Ground {
    /// The network namespace.
    pub network: Network,
    /// The cgroup, which exists.
    pub cgroup: PathBuf,
    /// A folder on which a BPF file system is mounted, in a mount namespace of the place's own.
    pub bpffs: Option<PathBuf>,
}

/// A place's agent, seen from the process that started it. The place ends when it is dropped.
#[derive(Debug)]
pub struct Agent {
    process: Mutex<Child>,
    pid: u32,
    channel: Mutex<OwnedFd>,
}

impl Agent {
    /// Starts an agent and waits until it stands in its place.
    ///
    /// # Errors
    ///
    /// When it can't be started, or the kernel refuses it the place.
    pub fn start(ground: &Ground) -> Result<Self> {
        let (channel, other) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .context("cannot make a socket pair")?;
        let patience = Scale::from_environment().patience(ANSWER);
        let patience = TimeVal::milliseconds(i64::try_from(patience.as_millis())?);
        setsockopt(&channel, ReceiveTimeout, &patience)?;

        let program = environment::culvert_lab()?;
        let mut command = Command::new(&program);
        command.arg("agent").arg("--cgroup").arg(&ground.cgroup);
        if let Network::Of(pid) = ground.network {
            command.arg("--network-of").arg(pid.to_string());
        }
        if let Some(folder) = &ground.bpffs {
            command.arg("--bpffs").arg(folder);
        }
        // A group of its own: an interrupt typed at a terminal is for the process that cleans up.
        let process = command
            .stdin(Stdio::from(other))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = process.id();
        let agent = Self {
            process: Mutex::new(process),
            pid,
            channel: Mutex::new(channel),
        };
        // Dropping the parent's copy of the other end is what lets both sides see the end.
        drop(command);
        agent
            .call(&Request::Greet, &[])
            .context("an agent didn't get into its place")?;
        Ok(agent)
    }

    /// The agent's process: `/proc/<pid>/ns/net` and `/proc/<pid>/root` are those of the place.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Makes a socket in the place.
    ///
    /// # Errors
    ///
    /// With the kernel's error, or when the agent is gone.
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
        match self.exchange(&request, &[]).map_err(io::Error::other)? {
            (Reply::Done, Some(socket)) => Ok(Socket::from(socket)),
            (
                Reply::Failed {
                    errno: Some(errno), ..
                },
                _,
            ) => Err(io::Error::from_raw_os_error(errno)),
            (reply, _) => Err(io::Error::other(format!(
                "odd answer to a request: {reply:?}"
            ))),
        }
    }

    /// Starts a process in the place, which ends with it.
    pub(crate) fn spawn(
        &self,
        argv: &[String],
        cpu: Option<u32>,
        output: [BorrowedFd<'_>; 2],
    ) -> Result<i32> {
        match self.call(
            &Request::Spawn {
                argv: argv.to_vec(),
                cpu,
            },
            &output,
        )? {
            Reply::Pid(pid) => Ok(pid),
            reply @ (Reply::Done | Reply::Running | Reply::Ended(_) | Reply::Failed { .. }) => {
                bail!("odd answer to a start: {reply:?}")
            }
        }
    }

    /// How a process of the place ended, if it did.
    pub(crate) fn ended(&self, pid: i32) -> Result<Option<Exit>> {
        match self.call(&Request::Ended { pid }, &[])? {
            Reply::Running => Ok(None),
            Reply::Ended(exit) => Ok(Some(exit)),
            reply @ (Reply::Done | Reply::Pid(_) | Reply::Failed { .. }) => {
                bail!("odd answer to a question after a process: {reply:?}")
            }
        }
    }

    /// Sends a signal to a process of the place.
    pub(crate) fn signal(&self, pid: i32, signal: Signal) -> Result<()> {
        #[expect(
            clippy::as_conversions,
            reason = "the number of a field-less enum of C"
        )]
        let signal = signal as i32;
        self.call(&Request::Signal { pid, signal }, &[]).map(drop)
    }

    /// Writes a file as the place sees it: what lies under `/proc/sys/net` is the place's own.
    ///
    /// # Errors
    ///
    /// With the kernel's error, or when the agent is gone.
    pub fn write(&self, path: &Path, text: &str) -> Result<()> {
        self.call(
            &Request::Write {
                path: path.to_owned(),
                text: text.to_owned(),
            },
            &[],
        )
        .map(drop)
    }

    /// Asks, and makes a failure that the agent reports an error.
    fn call(&self, request: &Request, files: &[BorrowedFd<'_>]) -> Result<Reply> {
        match self.exchange(request, files)?.0 {
            Reply::Failed { message, .. } => bail!(message),
            reply @ (Reply::Done | Reply::Pid(_) | Reply::Running | Reply::Ended(_)) => Ok(reply),
        }
    }

    fn exchange(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>)> {
        let channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        wire::send(channel.as_fd(), request, files).context("cannot ask an agent")?;
        let (reply, mut files) = wire::receive(channel.as_fd())
            .context("no answer from an agent")?
            .context("an agent has gone")?;
        Ok((reply, files.pop()))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let process = self
            .process
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        // The kernel takes the place's processes, mounts and interfaces down with the agent.
        drop(process.kill());
        drop(wait::until(ANSWER, || {
            !matches!(process.try_wait(), Ok(None))
        }));
    }
}
