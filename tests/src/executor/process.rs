//! The executor process, which enters its sandbox and executes requests there.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::process::ExitStatusExt as _,
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, setns, unshare},
    sys::{
        prctl::set_dumpable,
        signal::{Signal, kill},
    },
    unistd::{Gid, Pid, Uid, geteuid, seteuid, setgroups, setresgid, setresuid},
};
use serde_json::Value;
use socket2::Socket;

use super::{
    SandboxSpec, child,
    wire::{self, Exit, Failure, Request},
};
use crate::cgroup;

/// Enters a sandbox, then executes requests from standard input, which is a socket, until the other side
/// closes that socket.
pub fn execute_requests(spec: &SandboxSpec) -> Result<()> {
    let channel = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("cannot duplicate standard input")?;
    if let Err(error) = enter(spec) {
        // This responds to the first request, which is `Greet`.
        wire::send(channel.as_fd(), &Err::<(), _>(failure(&error)), &[])?;
        return Err(error);
    }
    let mut children = BTreeMap::new();
    while let Some((request, files)) = wire::receive::<Request>(channel.as_fd())? {
        let (reply, socket) = match execute(request, files, &mut children) {
            Ok((value, socket)) => (Ok(value), socket),
            Err(error) => (Err(failure(&error)), None),
        };
        let files = socket
            .iter()
            .map(|socket| socket.as_fd())
            .collect::<Vec<_>>();
        wire::send(channel.as_fd(), &reply, &files)?;
    }
    Ok(())
}

fn enter(spec: &SandboxSpec) -> Result<()> {
    cgroup::enter(&spec.cgroup)?;
    match spec.network_of {
        None if let Some(user) = spec.user => enter_user_namespace(user)?,
        None => {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot create a network namespace")?;
        }
        Some(pid) => {
            let path = format!("/proc/{pid}/ns/net");
            let namespace = fs::File::open(&path).with_context(|| format!("cannot open {path}"))?;
            setns(namespace, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("cannot enter the network namespace {path}"))?;
        }
    }
    spec.bpffs.as_deref().map_or(Ok(()), mount_bpffs)
}

/// Becomes an unprivileged user, and creates a user namespace in which the user is root, and a network namespace
/// that belongs to it.
fn enter_user_namespace(user: u32) -> Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    // After a change of the user, the files of the process in /proc belong to root, unless it is dumpable.
    set_dumpable(true)?;
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)
        .context("cannot create a user namespace")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1")).context("cannot map the user")
}

/// Mounts a BPF file system in a new mount namespace, so that it is visible only to this sandbox's processes.
fn mount_bpffs(directory: &Path) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("cannot create a mount namespace")?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount::<str, str, str, str>(None, "/", None, private, None)
        .context("cannot make mounts private")?;
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    mount::<str, Path, str, str>(Some("bpf"), directory, Some("bpf"), MsFlags::empty(), None)
        .with_context(|| format!("cannot mount a BPF file system on {}", directory.display()))
}

type Response = (Value, Option<OwnedFd>);

fn execute(
    request: Request,
    files: Vec<OwnedFd>,
    children: &mut BTreeMap<i32, Child>,
) -> Result<Response> {
    let reply = match request {
        Request::Greet => Value::Null,
        Request::Socket {
            domain,
            kind,
            protocol,
            user,
        } => {
            let socket = create_socket(domain, kind, protocol, user)?;
            return Ok((Value::Null, Some(socket.into())));
        }
        Request::Spawn { argv, cpu } => {
            let child = spawn(&argv, cpu, files)?;
            let pid = i32::try_from(child.id())?;
            children.insert(pid, child);
            pid.into()
        }
        Request::TryWait { pid } => {
            let child = children
                .get_mut(&pid)
                .context("no such process in this sandbox")?;
            let exit = child.try_wait()?.map(|status| Exit {
                code: status.code(),
                signal: status.signal(),
            });
            serde_json::to_value(exit)?
        }
        Request::Signal { pid, signal } => {
            let child = children
                .get_mut(&pid)
                .context("no such process in this sandbox")?;
            // A child's process ID can't have been reused yet: after exiting, the child remains a zombie
            // until this process waits for it.
            if child.try_wait()?.is_none() {
                kill(Pid::from_raw(pid), Signal::try_from(signal)?)?;
            }
            Value::Null
        }
        Request::Write { path, text } => {
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Value::Null
        }
    };
    Ok((reply, None))
}

/// Creates a socket. It belongs to the user who is the effective user at this moment.
fn create_socket(
    domain: i32,
    kind: i32,
    protocol: Option<i32>,
    user: Option<u32>,
) -> Result<Socket> {
    let own = geteuid();
    seteuid(user.map_or(own, Uid::from_raw))?;
    let socket = Socket::new(domain.into(), kind.into(), protocol.map(Into::into));
    seteuid(own)?;
    Ok(socket?)
}

/// Starts a program that the kernel kills when this process exits.
fn spawn(argv: &[String], cpu: Option<u32>, files: Vec<OwnedFd>) -> Result<Child> {
    let [output, errors] = <[OwnedFd; 2]>::try_from(files)
        .ok()
        .context("the request must have two files, for standard output and error output")?;
    let (program, arguments) = argv.split_first().context("the command line is empty")?;
    let mut command = Command::new(program);
    child::add_pre_exec_steps(&mut command, cpu)?;
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::from(output))
        .stderr(Stdio::from(errors))
        .spawn()
        .with_context(|| format!("cannot start {program}"))
}

fn failure(error: &anyhow::Error) -> Failure {
    let errno = error
        .downcast_ref::<io::Error>()
        .and_then(io::Error::raw_os_error);
    Failure {
        errno,
        message: format!("{error:#}"),
    }
}
