//! Identifies the clients of a TCP listener. All processes on this node may have the same addresses, so they are
//! identified by their users.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tracing::debug;

use crate::{listen::source_of, net::SockDiag};

/// A client.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Client {
    /// A client on another host or in a pod. The address stands for all addresses that one host can be expected to
    /// have: an IPv4 address itself, or the /64 prefix of an IPv6 address.
    Address(IpAddr),
    /// A process in the network namespace of this node. The number is the id of its user.
    User(u32),
    /// A process in the network namespace of this node that has already closed its socket.
    Closed,
}

/// The client that runs as root on this node, such as the kubelet.
pub(super) const ROOT: Client = Client::User(0);

impl Client {
    pub(super) fn of_address(address: IpAddr) -> Self {
        Self::Address(source_of(address))
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::User(user) => write!(f, "user {user} of this node"),
            Self::Closed => f.write_str("a process of this node"),
        }
    }
}

/// Finds the clients of connections.
#[derive(Debug, Default)]
pub(super) struct ClientFinder {
    /// The socket for requests to the kernel; `None` until the first request, and after a failure.
    diag: Mutex<Option<SockDiag>>,
    /// True once a socket has been found. A kernel without the module `tcp_diag` finds none, and reports the same error
    /// as for a socket that no longer exists.
    has_found: AtomicBool,
}

impl ClientFinder {
    /// Returns the client of a connection from `peer` to `own`. If the kernel can't search for sockets, clients are
    /// identified by their addresses.
    pub(super) fn find(&self, own: SocketAddr, peer: SocketAddr) -> Client {
        let mut diag = self.diag.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = diag.take().map_or_else(SockDiag::open, Ok);
        let found = opened.and_then(|mut opened| {
            let found = opened.find_connected(peer, own)?;
            *diag = Some(opened);
            Ok(found)
        });
        if matches!(found, Ok(Some(_))) {
            self.has_found.store(true, Ordering::Relaxed);
        }
        let is_local = || peer.ip().to_canonical().is_loopback() || own.ip() == peer.ip();
        match found {
            Ok(Some(socket)) if socket.is_open() => Client::User(socket.user()),
            Ok(Some(_)) => Client::Closed,
            // A socket that is closed and reset no longer exists.
            Ok(None) if is_local() && self.has_found.load(Ordering::Relaxed) => Client::Closed,
            Ok(None) => Client::of_address(peer.ip()),
            Err(error) => {
                debug!(%error, "cannot find the client of a connection");
                Client::of_address(peer.ip())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_local_client_is_identified_by_its_user_until_it_has_closed_its_socket() {
        let finder = ClientFinder::default();
        let user = Client::User(nix::unistd::geteuid().as_raw());
        for (at, to) in [
            ("127.0.0.1:0", None),
            ("[::1]:0", None),
            // An IPv4 client of an IPv6 listener.
            ("[::]:0", Some("127.0.0.1")),
        ] {
            let listener = TcpListener::bind(at).expect("bound");
            let mut to_address = listener.local_addr().expect("an address");
            if let Some(ip) = to {
                to_address.set_ip(ip.parse().expect("an address"));
            }
            let client = TcpStream::connect(to_address).expect("connected");
            let (server, peer) = listener.accept().expect("accepted");
            let own = server.local_addr().expect("an address");
            assert_eq!(finder.find(own, peer), user, "{at}");

            drop(client);
            assert_eq!(finder.find(own, peer), Client::Closed, "{at}");
        }
    }

    #[test]
    fn on_a_kernel_that_finds_no_sockets_a_local_client_is_identified_by_its_address() {
        let finder = ClientFinder::default();
        let [own, peer] = ["127.0.0.1:1", "127.0.0.1:2"].map(|it| it.parse().expect("an address"));
        assert_eq!(finder.find(own, peer), Client::of_address(peer.ip()));
        finder.has_found.store(true, Ordering::Relaxed);
        assert_eq!(finder.find(own, peer), Client::Closed);
    }

    #[test]
    fn a_remote_client_is_identified_by_its_address_even_if_a_process_listens_on_its_port() {
        let finder = ClientFinder::default();
        let listener = TcpListener::bind("0.0.0.0:0").expect("bound");
        let port = listener.local_addr().expect("an address").port();
        let own = "192.0.2.1:80".parse().expect("an address");
        for (peer, client) in [
            ("192.0.2.9", "192.0.2.9"),
            ("::ffff:192.0.2.9", "192.0.2.9"),
            ("2001:db8::9", "2001:db8::"),
        ] {
            let peer = SocketAddr::new(peer.parse().expect("an address"), port);
            let client = Client::Address(client.parse().expect("an address"));
            assert_eq!(finder.find(own, peer), client);
        }
    }
}
