//! NFS servers and mounts of the kernel, in network namespaces.
//!
//! The kernel asks programs in user space which clients and exports there are. This answers before it asks, by writing to its
//! caches. See `fs/nfsd/export.c`, `fs/nfsd/nfsctl.c` and `net/sunrpc/svcauth_unix.c` in the kernel source.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use crate::sandbox::Sandbox;

/// The port of NFS.
pub const PORT: u16 = 2049;

/// The kernel's name for clients, whichever address they have.
const CLIENTS: &str = "clients";
/// The time at which the entries of the caches expire, in seconds since 1970. The kernel reads it as an `int`.
const EXPIRY: i32 = i32::MAX;
/// `NFSEXP_INSECURE_PORT`, `NFSEXP_NOSUBTREECHECK` and `NFSEXP_FSID`: any port of the client is accepted, only the file system is
/// checked, and its number is given.
const FLAGS: u32 = 0x2 | 0x400 | 0x2000;

/// Returns true if the kernel has the server and the client.
pub fn is_supported() -> io::Result<bool> {
    let known = fs::read_to_string("/proc/filesystems")?;
    let has = |name| known.split_whitespace().any(|word| word == name);
    Ok(has("nfsd") && has("nfs4"))
}

/// A mounted file system, which is unmounted when it is dropped.
#[derive(Debug)]
pub struct Mount(TempDir);

impl Mount {
    /// Creates a file system in memory.
    pub fn in_memory() -> Result<Self> {
        Self::new("tmpfs", "tmpfs", "")
    }

    /// Mounts the export of a server in the network namespace of a sandbox.
    pub fn of_server(sandbox: &Sandbox, server: IpAddr) -> Result<Self> {
        let source = match server {
            IpAddr::V4(server) => format!("{server}:/"),
            IpAddr::V6(server) => format!("[{server}]:/"),
        };
        let family = if server.is_ipv4() { "tcp" } else { "tcp6" };
        // Calls fail some time after the server has vanished, so that no test waits forever.
        let options = format!(
            "vers=4.1,proto={family},port={PORT},sec=sys,soft,timeo=50,retrans=3,addr={server}"
        );
        sandbox.in_network(|| Self::new(&source, "nfs4", &options))
    }

    fn new(source: &str, kind: &str, options: &str) -> Result<Self> {
        let directory = TempDir::new()?;
        let flags = MsFlags::empty();
        mount(
            Some(source),
            directory.path(),
            Some(kind),
            flags,
            Some(options),
        )
        .with_context(|| format!("cannot mount {source} with {options:?}"))?;
        Ok(Self(directory))
    }

    /// Returns the path of the root directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A mount that is still in use goes away with its last user. The directory remains if this fails.
        let _unmounted = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}

/// A server for NFS 4 over TCP, which ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    /// The files by which the server is controlled.
    control: Mount,
}

impl Server {
    /// Exports a file system from the network namespace of a sandbox, to clients with these addresses.
    pub fn start(sandbox: &Sandbox, exported: &Mount, clients: &[IpAddr]) -> Result<Self> {
        sandbox.in_network(|| {
            for client in clients {
                answer("auth.unix.ip", &format!("nfsd {client} {EXPIRY} {CLIENTS}"))?;
            }
            let path = exported.path().display();
            let export = format!("{CLIENTS} {path} {EXPIRY} {FLAGS} 65534 65534 0");
            answer("nfsd.export", &export)?;
            // The file system with number 0 is the root of the export.
            let root = format!("{CLIENTS} 1 \\x00000000 {EXPIRY} {path}");
            answer("nfsd.fh", &root)?;

            let server = Self {
                control: Mount::new("nfsd", "nfsd", "")?,
            };
            // New kernels don't have version 2. Versions 2 and 3 would need the port mapper.
            drop(server.set("versions", "-2"));
            server.set("versions", "-3 +4 +4.1")?;
            // The time until clients may open files, in seconds. It is the minimum.
            server.set("nfsv4gracetime", "10")?;
            server.set("portlist", &format!("tcp {PORT}"))?;
            server.set("threads", "2")?;
            Ok(server)
        })
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        write_line(&self.control.path().join(file), value)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The threads end with the network namespace otherwise.
        drop(self.set("threads", "0"));
    }
}

/// Writes an entry to a cache of this thread's network namespace.
fn answer(cache: &str, entry: &str) -> Result<()> {
    let directory = PathBuf::from("/proc/thread-self/net/rpc");
    write_line(&directory.join(cache).join("channel"), entry)
}

fn write_line(file: &Path, line: &str) -> Result<()> {
    fs::write(file, format!("{line}\n"))
        .with_context(|| format!("cannot write {line:?} to {}", file.display()))
}
