//! Outgoing connections: TLS connections to gateways, and TCP connections to targets.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    net::{TcpSocket, TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::{TlsConnector, TlsStream};
use tunnel_common::reason::Reason;

use super::{
    http2::{self, TlsConnection},
    socket::{SessionSocket, set_session_options},
};
use crate::{
    file_descriptors::{self, Part},
    identity::{self, Identity},
};

/// The time limit for connecting to one of a gateway's addresses, and for resolving its host name.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for the TLS handshake.
const TLS_TIMEOUT: Duration = Duration::from_secs(5);

/// An error from connecting to a gateway.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error("cannot resolve the host name of the gateway")]
    Resolve(#[source] io::Error),
    #[error("the host name of the gateway has no address")]
    NoAddress,
    #[error("cannot connect to {0}")]
    Connect(SocketAddr, #[source] io::Error),
    #[error("the TLS handshake with {0} failed")]
    Tls(SocketAddr, #[source] io::Error),
}

/// Sets the firewall mark on a socket, if one is configured. Without CAP_NET_ADMIN, the socket stays
/// unmarked.
pub(super) fn set_mark(socket: &SockRef<'_>, mark: Option<u32>) {
    if let Some(mark) = mark
        && let Err(error) = socket.set_mark(mark)
    {
        tracing::debug!(%error, "cannot set the firewall mark of a socket");
    }
}

/// Creates a socket for a connection to an address.
fn new_socket(address: SocketAddr, mark: Option<u32>) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    set_mark(&SockRef::from(&socket), mark);
    Ok(socket)
}

/// Awaits an operation with a time limit.
async fn with_timeout<T>(
    limit: Duration,
    step: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    timeout(limit, step).await?
}

/// Dials a gateway's addresses one after another, and returns the first connection on which the TLS handshake
/// succeeds.
pub(super) async fn gateway(
    name: &str,
    mark: Option<u32>,
    own: &Identity,
) -> Result<TlsConnection, DialError> {
    let addresses = with_timeout(CONNECT_TIMEOUT, lookup_host(name)).await;
    let addresses = addresses.map_err(DialError::Resolve)?;
    let mut last = DialError::NoAddress;
    for address in addresses {
        match Box::pin(connect_tls(address, mark, own)).await {
            Ok(connection) => return Ok(connection),
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect_tls(
    address: SocketAddr,
    mark: Option<u32>,
    own: &Identity,
) -> Result<TlsConnection, DialError> {
    let connected = async {
        let tcp = new_socket(address, mark)?.connect(address).await?;
        set_session_options(&tcp)?;
        Ok(tcp)
    };
    let tcp = with_timeout(CONNECT_TIMEOUT, connected).await;
    let tcp = tcp.map_err(|error| DialError::Connect(address, error))?;
    let connector = TlsConnector::from(Arc::clone(&own.client));
    let handshake = async {
        let tls = connector.connect(Identity::gateway_name(), SessionSocket::new(tcp));
        let mut connection = TlsStream::Client(tls.await?);
        http2::finish_handshake(&mut connection)?;
        Ok(connection)
    };
    let connection = with_timeout(TLS_TIMEOUT, handshake).await;
    connection.map_err(|error| DialError::Tls(address, with_both_times(error)))
}

/// Gives an error about the dates of the gateway's certificate a message with these and the time of the clock.
fn with_both_times(error: io::Error) -> io::Error {
    let of_tls = error.get_ref().and_then(|it| it.downcast_ref());
    let described = of_tls.map(identity::describe);
    described.map_or(error, io::Error::other)
}

/// Dials a target. If that fails, returns the reason.
pub(super) async fn target(
    address: SocketAddr,
    mark: Option<u32>,
    limit: Duration,
) -> Result<TcpStream, Reason> {
    let socket = new_socket(address, mark).map_err(|error| reason_of_error(&error))?;
    if file_descriptors::part_of(&socket) != Part::Clients {
        return Err(Reason::DescriptorLimit);
    }
    let dialled = with_timeout(limit, socket.connect(address)).await;
    dialled.map_err(|error| reason_of_error(&error))
}

fn reason_of_error(error: &io::Error) -> Reason {
    let kind = error.kind();
    if file_descriptors::is_exhausted(error) {
        Reason::DescriptorLimit
    } else if [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset].contains(&kind) {
        Reason::DialRefused
    } else if kind == ErrorKind::TimedOut {
        Reason::DialTimedOut
    } else {
        Reason::DialUnreachable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn errors_of_a_dial_map_to_reasons() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = closed.local_addr().expect("an address");
        drop(closed);
        let second = Duration::from_secs(1);

        let refused = target(address, None, second).await;
        assert_eq!(refused.map(drop), Err(Reason::DialRefused));

        let error = io::Error::from_raw_os_error(libc::EHOSTUNREACH);
        assert_eq!(reason_of_error(&error), Reason::DialUnreachable);
        let error = io::Error::from_raw_os_error(libc::ETIMEDOUT);
        assert_eq!(reason_of_error(&error), Reason::DialTimedOut);
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        assert_eq!(reason_of_error(&error), Reason::DescriptorLimit);
    }
}
