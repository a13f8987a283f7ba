//! A sandbox: a network namespace and a cgroup, in which sockets can be created and processes run.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::Signal,
};
use serde::de::DeserializeOwned;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    cgroup, environment,
    executor::{Executor, SandboxSpec, wire::Exit},
    ip, log, wait,
};

/// The timeout for a connect() or a response.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time limit for a short command.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// The accept backlog of the listeners that tests create.
const BACKLOG: i32 = 1024;

/// A network namespace and a cgroup, which an executor keeps alive.
#[derive(Clone, Debug)]
pub struct Sandbox {
    executor: Arc<Executor>,
}

impl Sandbox {
    pub fn new(spec: &SandboxSpec) -> Result<Self> {
        Ok(Self {
            executor: Arc::new(Executor::start(spec)?),
        })
    }

    /// Runs `work` on a separate thread in the sandbox's network namespace.
    pub fn in_network<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(format!("/proc/{}/ns/net", self.pid()))?;
        let there = || {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            work()
        };
        thread::scope(|scope| scope.spawn(there).join())
            .map_err(|_panic| anyhow::anyhow!("the thread failed"))?
    }

    /// Creates a sandbox with a new network namespace and a new cgroup, and sets the given sysctls in it.
    pub fn with_new_network(
        cgroup: PathBuf,
        bpffs: Option<PathBuf>,
        parameters: &[(&str, &str)],
    ) -> Result<Self> {
        cgroup::create(&cgroup)?;
        let sandbox = Self::new(&SandboxSpec {
            network_of: None,
            user: None,
            cgroup,
            bpffs,
        })?;
        for (name, value) in parameters {
            sandbox.sysctl(name, value)?;
        }
        Ok(sandbox)
    }

    /// Creates a sandbox whose network namespace an unprivileged user has created in a user namespace.
    pub fn in_user_namespace(cgroup: PathBuf, user: u32) -> Result<Self> {
        cgroup::create(&cgroup)?;
        Self::new(&SandboxSpec {
            network_of: None,
            user: Some(user),
            cgroup,
            bpffs: None,
        })
    }

    /// Returns the executor's process ID, for use with `nsenter -t` or in `/proc/<pid>/root`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.executor.pid()
    }

    /// Creates a socket in the sandbox, with the default protocol.
    pub fn socket(&self, domain: Domain, kind: Type) -> io::Result<Socket> {
        self.executor.socket(domain, kind, None, None)
    }

    /// Creates a socket in the sandbox that belongs to a user, who has no capabilities.
    pub fn socket_of_user(&self, domain: Domain, kind: Type, user: u32) -> io::Result<Socket> {
        self.executor.socket(domain, kind, None, Some(user))
    }

    /// Creates a socket in the sandbox, with the given protocol.
    pub fn socket_with_protocol(
        &self,
        domain: Domain,
        kind: Type,
        protocol: Protocol,
    ) -> io::Result<Socket> {
        self.executor.socket(domain, kind, Some(protocol), None)
    }

    /// Opens a TCP connection from the sandbox. Reads and writes on it time out after [`RESPONSE_TIMEOUT`].
    pub fn connect(&self, to: impl ToSocketAddrs) -> io::Result<TcpStream> {
        let to = resolve_one(to)?;
        let socket = self.socket(Domain::for_address(to), Type::STREAM)?;
        connect_within(&socket, to, RESPONSE_TIMEOUT)?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(socket.into())
    }

    /// Opens a TCP listener in the sandbox.
    pub fn listen(&self, at: impl ToSocketAddrs) -> io::Result<TcpListener> {
        let at = resolve_one(at)?;
        let socket = self.socket(Domain::for_address(at), Type::STREAM)?;
        socket.set_reuse_address(true)?;
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    }

    /// Binds a UDP socket in the sandbox. Reads from it time out after [`RESPONSE_TIMEOUT`].
    pub fn udp(&self, at: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        let at = resolve_one(at)?;
        let socket = self.socket(Domain::for_address(at), Type::DGRAM)?;
        socket.bind(&at.into())?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(socket.into())
    }

    /// Runs a command and waits until it exits. Returns its standard output, or an error if the command
    /// fails.
    pub fn run<A: AsRef<str>>(&self, argv: &[A]) -> Result<String> {
        let output = self.command(argv).start()?.finish(COMMAND_TIMEOUT)?;
        if !output.exit.is_success() {
            bail!(
                "`{}` failed: {:?}\n{}{}",
                join_words(argv),
                output.exit,
                output.stdout,
                output.stderr
            );
        }
        Ok(output.stdout)
    }

    /// Creates links, addresses and routes from commands in ip(8)'s syntax, one per line.
    pub fn ip(&self, commands: &str) -> Result<()> {
        ip::run_commands(self, commands)
    }

    /// Prepares to run a command in the sandbox.
    pub fn command<A: AsRef<str>>(&self, argv: &[A]) -> Command<'_> {
        let argv = argv.iter().map(|word| word.as_ref().to_owned()).collect();
        Command {
            sandbox: self,
            argv,
            cpu: None,
            log: None,
        }
    }

    /// Prepares to run a `culvert-lab` subcommand in the sandbox.
    pub fn lab_command<A: AsRef<str>>(&self, arguments: &[A]) -> Result<Command<'_>> {
        let program = environment::culvert_lab()?;
        let program = program
            .to_str()
            .context("the path of culvert-lab is not UTF-8")?
            .to_owned();
        let mut command = self.command(arguments);
        command.argv.insert(0, program);
        Ok(command)
    }

    /// Sets a sysctl in the sandbox's network namespace, for example `net.ipv4.ip_forward`.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        self.executor.write(&path, value)
    }
}

/// Connects a socket within a time limit. The socket remains in blocking mode.
pub fn connect_within(socket: &Socket, to: SocketAddr, within: Duration) -> io::Result<()> {
    // The kernel applies the write timeout to a blocking connect(), so the same system call is made as
    // without a time limit.
    socket.set_write_timeout(Some(within))?;
    socket.connect(&to.into()).map_err(|error| {
        let is_timed_out = error.raw_os_error() == Some(nix::libc::EINPROGRESS);
        if is_timed_out {
            io::ErrorKind::TimedOut.into()
        } else {
            error
        }
    })
}

fn resolve_one(address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
    let mut addresses = address.to_socket_addrs()?;
    addresses
        .next()
        .ok_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable))
}

fn join_words<A: AsRef<str>>(argv: &[A]) -> String {
    argv.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ")
}

/// A command that has not been started yet.
#[derive(Debug)]
#[must_use]
pub struct Command<'a> {
    sandbox: &'a Sandbox,
    argv: Vec<String>,
    cpu: Option<u32>,
    log: Option<File>,
}

impl Command<'_> {
    /// Pins the command to one CPU.
    pub const fn cpu(mut self, cpu: u32) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// Appends an option and its value.
    pub fn option(mut self, name: &str, value: impl Display) -> Self {
        self.argv.extend([name.to_owned(), value.to_string()]);
        self
    }

    /// Writes the command's output to a file. [`Process::finish`] then doesn't return it.
    pub fn log(mut self, file: File) -> Self {
        self.log = Some(file);
        self
    }

    pub fn start(self) -> Result<Process> {
        let (stdout, stderr) = match self.log {
            Some(log) => (log.try_clone()?, log),
            None => (tempfile::tempfile()?, tempfile::tempfile()?),
        };
        let executor = Arc::clone(&self.sandbox.executor);
        let pid = executor.spawn(&self.argv, self.cpu, [stdout.as_fd(), stderr.as_fd()])?;
        Ok(Process {
            executor,
            pid,
            argv: self.argv,
            stdout,
            stderr,
        })
    }

    /// Starts the command with its output in a file, and waits until it has written a word.
    pub fn start_until(self, word: &str, output: &Path, within: Duration) -> Result<Process> {
        let process = self.log(log::append(output)?).start()?;
        let text = || fs::read_to_string(output).unwrap_or_default();
        wait::until(within, || text().contains(word))
            .with_context(|| format!("not {word}: {}", text()))?;
        Ok(process)
    }
}

/// A process in a sandbox. It is killed on drop.
#[derive(Debug)]
pub struct Process {
    executor: Arc<Executor>,
    pid: i32,
    argv: Vec<String>,
    stdout: File,
    stderr: File,
}

/// A process's exit status and output.
#[derive(Clone, Debug)]
pub struct Output {
    pub exit: Exit,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Parses the JSON report that the process wrote to standard output.
    pub fn parse_report<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.stdout).with_context(|| self.stderr.clone())
    }
}

impl Process {
    #[must_use]
    pub const fn pid(&self) -> i32 {
        self.pid
    }

    /// Sends a signal to the process, unless the process has exited.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.executor.signal(self.pid, signal)
    }

    /// Returns the process's exit status if the process has exited.
    pub fn try_wait(&self) -> Result<Option<Exit>> {
        self.executor.try_wait(self.pid)
    }

    pub fn wait(&self, within: Duration) -> Result<Exit> {
        wait::until_some(within, || self.try_wait().transpose())
            .with_context(|| format!("`{}` is still running", join_words(&self.argv)))?
    }

    /// Waits until the process has exited, for at most `within`, and returns its output.
    pub fn finish(mut self, within: Duration) -> Result<Output> {
        let exit = self.wait(within)?;
        Ok(Output {
            exit,
            stdout: read_all(&mut self.stdout)?,
            stderr: read_all(&mut self.stderr)?,
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If signalling fails, the sandbox is gone, and so is the process.
        if self.signal(Signal::SIGKILL).is_ok() {
            drop(self.wait(RESPONSE_TIMEOUT));
        }
    }
}

fn read_all(file: &mut File) -> Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
