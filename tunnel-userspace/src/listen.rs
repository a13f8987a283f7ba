//! Listening sockets: binding with retries, and accepting connections until the drain begins.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::warn;

use crate::drain;

/// The interval between attempts to bind a port that is in use.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// The minimum interval between log messages about failures of accept().
const LOG_INTERVAL: Duration = Duration::from_secs(30);
/// The listeners that are not bound yet, by name, each with the error from the last attempt.
pub(crate) type UnboundPorts = watch::Sender<BTreeMap<String, String>>;

/// Binds a TCP listener. `prepare` may set further socket options before the socket is bound.
pub(crate) fn tcp(
    address: SocketAddr,
    backlog: i32,
    prepare: impl FnOnce(&Socket) -> io::Result<()>,
) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    prepare(&socket)?;
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    TcpListener::from_std(socket.into())
}

/// Returns the address under which connections from a peer are counted: its IPv4 address, or the /64 prefix of its
/// IPv6 address, since an IPv6 host may use any address in its /64.
pub(crate) const fn source_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & (u128::MAX << 64))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// Binds a Unix socket with mode 0600, replacing any socket that an earlier process left at the path.
///
/// # Errors
///
/// Returns an error if the directory does not exist, or if the socket can't be created.
pub(crate) fn unix(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Returns true if a file system is full, over quota or read-only, which must not keep Services from being
/// programmed.
pub(crate) fn is_unwritable(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    number.is_some_and(|number| [libc::ENOSPC, libc::EDQUOT, libc::EROFS].contains(&number))
}

/// Retries `bind` until it succeeds, and then calls `run` with the listener. Returns early if the drain
/// begins first. While `bind` keeps failing, `unbound_ports` holds its error under `name`.
pub(crate) async fn bind_and_serve<T, F: Future<Output = ()>>(
    name: String,
    bind: impl Fn() -> io::Result<T>,
    unbound_ports: UnboundPorts,
    mut draining: watch::Receiver<bool>,
    run: impl FnOnce(T, watch::Receiver<bool>) -> F,
) {
    loop {
        match bind() {
            Ok(listener) => {
                unbound_ports.send_if_modified(|names| names.remove(&name).is_some());
                return run(listener, draining).await;
            }
            Err(error) => unbound_ports.send_if_modified(|names| {
                let reason = error.to_string();
                let is_new = names.get(&name) != Some(&reason);
                if is_new {
                    warn!(
                        name,
                        reason, "cannot bind the listener; retrying every second"
                    );
                    names.insert(name.clone(), reason);
                }
                is_new
            }),
        };
        tokio::select! {
            () = sleep(RETRY_DELAY) => {}
            () = drain::begun(&mut draining) => return,
        }
    }
}

/// Accepts connections until the drain begins. `admit` may start a task for each connection. Pauses after a
/// failed accept(), since the next one would also fail at once.
pub(crate) async fn accept_all<S, F: Future<Output = io::Result<S>>>(
    accept: impl Fn() -> F,
    pause: Duration,
    tasks: &mut JoinSet<()>,
    mut draining: watch::Receiver<bool>,
    mut admit: impl FnMut(&mut JoinSet<()>, S),
) {
    let mut failures = 0_u64;
    let mut logged_at: Option<Instant> = None;
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            Some(_) = tasks.join_next() => {}
            accepted = accept() => match accepted {
                Ok(connection) => admit(tasks, connection),
                Err(error) => {
                    failures += 1;
                    if logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                        warn!(%error, failures, "cannot accept a connection");
                        logged_at = Some(Instant::now());
                    }
                    sleep(pause).await;
                }
            },
        }
    }
}
