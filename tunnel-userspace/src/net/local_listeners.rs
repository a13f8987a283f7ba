//! Finds local listeners in this process's network namespace.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::{addr::Protocol, service::FrontendKey};

use super::sock_diag::{DiagError, SockDiag, SocketFilter};

/// The protocols whose sockets can be listed.
const PROTOCOLS: [Protocol; 2] = [Protocol::TCP, Protocol::UDP];

/// Finds local listeners, reusing one sock_diag socket.
#[derive(Debug, Default)]
pub struct Listeners {
    diag: Option<SockDiag>,
}

impl Listeners {
    /// Returns the frontends in `wanted` (address, port and protocol) that have a local listener, each with
    /// the ids of the users who own these listeners. A socket that listens on all addresses doesn't count.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't list its sockets.
    pub fn find(
        &mut self,
        wanted: &BTreeSet<FrontendKey>,
    ) -> Result<BTreeMap<FrontendKey, BTreeSet<u32>>, DiagError> {
        // On an error, the socket is dropped, since the rest of the reply has yet to be read from it.
        let mut diag = match self.diag.take() {
            Some(diag) => diag,
            None => SockDiag::open()?,
        };
        let mut found = BTreeMap::<_, BTreeSet<u32>>::new();
        for protocol in PROTOCOLS {
            if !wanted.iter().any(|key| key.protocol == protocol) {
                continue;
            }
            diag.list(protocol, SocketFilter::Listening, |socket| {
                let (address, port) = socket.local();
                let key = FrontendKey::new(address, port, protocol);
                if wanted.contains(&key) {
                    found.entry(key).or_default().insert(socket.user());
                }
            })?;
        }
        self.diag = Some(diag);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, UdpSocket};

    use tunnel_common::addr::{Address, Port};

    use super::*;

    fn key(at: SocketAddr, protocol: Protocol) -> FrontendKey {
        let (address, port) = (Address::from_ip(at.ip()), Port::from_host(at.port()));
        FrontendKey::new(address, port, protocol)
    }

    fn is_found(listeners: &mut Listeners, key: FrontendKey) -> bool {
        let found = listeners.find(&[key].into()).expect("searched");
        let own = [(key, [nix::unistd::geteuid().as_raw()].into())];
        assert!(found.is_empty() || found == own.into());
        !found.is_empty()
    }

    #[test]
    fn a_listener_is_found_at_its_address_while_it_is_bound() {
        let mut listeners = Listeners::default();
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(any).expect("bound");
            let at = listener.local_addr().expect("an address");
            let tcp = key(at, Protocol::TCP);
            let udp = key(at, Protocol::UDP);
            assert!(is_found(&mut listeners, tcp) && !is_found(&mut listeners, udp));
            drop(listener);
            assert!(!is_found(&mut listeners, tcp));

            let socket = UdpSocket::bind(any).expect("bound");
            let at = socket.local_addr().expect("an address");
            let udp = key(at, Protocol::UDP);
            assert!(is_found(&mut listeners, udp));
            // A connected UDP socket is not a listener, since it receives only from its peer.
            socket.connect(at).expect("connected");
            assert!(!is_found(&mut listeners, udp));
        }
    }

    #[test]
    fn a_listener_on_all_addresses_or_another_port_does_not_count() {
        let mut listeners = Listeners::default();
        for (all, one) in [("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "::1")] {
            let tcp = TcpListener::bind(all).expect("bound");
            let udp = UdpSocket::bind(all).expect("bound");
            for (bound, protocol) in [
                (tcp.local_addr(), Protocol::TCP),
                (udp.local_addr(), Protocol::UDP),
            ] {
                let port = bound.expect("an address").port();
                let at = SocketAddr::new(one.parse().expect("an address"), port);
                assert!(!is_found(&mut listeners, key(at, protocol)));
            }
            let tcp = TcpListener::bind((one, 0)).expect("bound");
            let mut at = tcp.local_addr().expect("an address");
            at.set_port(at.port() ^ 1);
            // This check is skipped if another process uses the port.
            if let Ok(_free) = TcpListener::bind(at) {
                let other = key(at, Protocol::UDP);
                assert!(!is_found(&mut listeners, other));
            }
        }
    }
}
