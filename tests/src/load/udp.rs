//! A load of UDP requests, each from a new socket.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use socket2::Type;

use super::{CreateSocket, Failure, Plan, Report, Success};
use crate::clock::Instant;

/// The kind of sockets that send the requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    /// Uses `connect`, then `send` and `recv`.
    Connected,
    /// Uses `sendto` and `recvfrom`.
    Unconnected,
}

/// Runs the load. `sockets` creates its sockets.
#[must_use]
pub fn run(plan: &Plan, mode: Mode, sockets: CreateSocket<'_>) -> Report {
    let request = format!("{} is here?", plan.service.as_deref().unwrap_or("who"));
    let try_once = |to| attempt(to, mode, request.as_bytes(), sockets);
    // Like a DNS resolver, this client retries once if its socket was terminated before a response arrived.
    super::run(plan, &|to| match try_once(to) {
        Err(failure) if failure.is_of_terminated_socket() => try_once(to),
        first => first,
    })
}

fn attempt(
    to: SocketAddr,
    mode: Mode,
    request: &[u8],
    sockets: CreateSocket<'_>,
) -> Result<Success, Failure> {
    let socket = UdpSocket::from(super::create_socket(to, Type::DGRAM, sockets)?);
    let mut response = [0; 2048];

    let start = Instant::now();
    let (connect, length, peer) = match mode {
        Mode::Connected => {
            socket.connect(to).map_err(Failure::at("connect"))?;
            let connect = start.elapsed();
            socket.send(request).map_err(Failure::at("send"))?;
            let length = socket.recv(&mut response).map_err(Failure::at("answer"))?;
            let peer = socket.peer_addr().map_err(Failure::at("getpeername"))?;
            (connect, length, peer)
        }
        Mode::Unconnected => {
            socket.send_to(request, to).map_err(Failure::at("sendto"))?;
            let connect = start.elapsed();
            let received = socket.recv_from(&mut response);
            let (length, from) = received.map_err(Failure::at("answer"))?;
            (connect, length, from)
        }
    };
    Ok(Success {
        server: server(&response[..length], request).map_err(Failure::at("answer"))?,
        connect,
        is_peer_dialled: peer == to,
    })
}

/// Parses the name of the server in a response, which must consist of that name, a space and the request.
fn server(response: &[u8], request: &[u8]) -> io::Result<String> {
    let name = response
        .strip_suffix(request)
        .and_then(|rest| rest.strip_suffix(b" "));
    let name = name.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(String::from_utf8_lossy(name).into_owned())
}
