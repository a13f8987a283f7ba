//! A load of UDP requests, each from a new socket.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use socket2::Type;

use super::{Answered, Failed, Plan, Report, Sockets};
use crate::clock::Instant;

/// Chooses between connected and unconnected sockets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    /// `connect`, then `send` and `recv`.
    Connected,
    /// `sendto` and `recvfrom`.
    Unconnected,
}

/// Runs the load with sockets that `sockets` creates.
#[must_use]
pub fn run(plan: &Plan, mode: Mode, sockets: Sockets<'_>) -> Report {
    let question = format!("{} is here?", plan.service.as_deref().unwrap_or("who"));
    let ask = |to| attempt(to, mode, question.as_bytes(), sockets);
    // Like a resolver, the client tries again, once, if its socket was terminated before the response.
    super::run(plan, &|to| match ask(to) {
        Err(failed) if failed.was_ended() => ask(to),
        first => first,
    })
}

fn attempt(
    to: SocketAddr,
    mode: Mode,
    question: &[u8],
    sockets: Sockets<'_>,
) -> Result<Answered, Failed> {
    let socket = UdpSocket::from(super::socket(to, Type::DGRAM, sockets)?);
    let mut answer = [0; 2048];

    let start = Instant::now();
    let (connect, length, peer) = match mode {
        Mode::Connected => {
            socket.connect(to).map_err(Failed::at("connect"))?;
            let connect = start.elapsed();
            socket.send(question).map_err(Failed::at("send"))?;
            let length = socket.recv(&mut answer).map_err(Failed::at("answer"))?;
            let peer = socket.peer_addr().map_err(Failed::at("getpeername"))?;
            (connect, length, peer)
        }
        Mode::Unconnected => {
            socket.send_to(question, to).map_err(Failed::at("sendto"))?;
            let connect = start.elapsed();
            let received = socket.recv_from(&mut answer);
            let (length, from) = received.map_err(Failed::at("answer"))?;
            (connect, length, from)
        }
    };
    Ok(Answered {
        server: server(&answer[..length], question).map_err(Failed::at("answer"))?,
        connect,
        peer_as_dialled: peer == to,
    })
}

/// Parses the server's name from a response, which must be the name, a blank and the request.
fn server(answer: &[u8], question: &[u8]) -> io::Result<String> {
    let name = answer
        .strip_suffix(question)
        .and_then(|rest| rest.strip_suffix(b" "));
    let name = name.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(String::from_utf8_lossy(name).into_owned())
}
