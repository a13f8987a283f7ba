//! Listening sockets: a bind is retried until it succeeds, and connections are accepted until the drain.

use std::{
    collections::BTreeMap, fs, io, net::SocketAddr, os::unix::fs::PermissionsExt as _, path::Path,
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
    task::JoinSet,
    time::sleep,
};
use tracing::warn;

use crate::drain;

/// The interval between attempts to bind a taken port.
const RETRY: Duration = Duration::from_secs(1);
/// Ports that could not be bound yet, with the error.
pub(crate) type Waiting = watch::Sender<BTreeMap<String, String>>;

/// Binds a TCP port. `prepare` sets further options before the bind.
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

/// Binds a socket that only its owner may use, and replaces one of an earlier process.
///
/// # Errors
///
/// The folder does not exist, or the socket can't be created.
pub(crate) fn unix(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Retries a bind until it succeeds, with the error in `waiting`, then runs the listener; returns if the
/// drain begins before.
pub(crate) async fn serve<T, F: Future<Output = ()>>(
    name: String,
    bind: impl Fn() -> io::Result<T>,
    waiting: Waiting,
    mut draining: watch::Receiver<bool>,
    run: impl FnOnce(T, watch::Receiver<bool>) -> F,
) {
    loop {
        match bind() {
            Ok(listener) => {
                waiting.send_if_modified(|names| names.remove(&name).is_some());
                return run(listener, draining).await;
            }
            Err(error) => waiting.send_if_modified(|names| {
                let reason = error.to_string();
                let is_new = names.get(&name) != Some(&reason);
                if is_new {
                    warn!(name, reason, "cannot listen, trying again until it is free");
                    names.insert(name.clone(), reason);
                }
                is_new
            }),
        };
        tokio::select! {
            () = sleep(RETRY) => {}
            () = drain::begun(&mut draining) => return,
        }
    }
}

/// Accepts until the drain begins, and pauses after a failed accept, since an immediate retry would
/// fail, too. `admit` may start a task for each connection.
pub(crate) async fn accept_all<S, F: Future<Output = io::Result<S>>>(
    accept: impl Fn() -> F,
    pause: Duration,
    tasks: &mut JoinSet<()>,
    mut draining: watch::Receiver<bool>,
    mut admit: impl FnMut(&mut JoinSet<()>, S),
) {
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            Some(_) = tasks.join_next() => {}
            accepted = accept() => match accepted {
                Ok(connection) => admit(tasks, connection),
                Err(error) => {
                    warn!(%error, "accept failed");
                    sleep(pause).await;
                }
            },
        }
    }
}
