//! Requests over UDP, each from a socket of its own.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use socket2::Type;

use super::{Answered, Failed, Plan, Report, Sockets};
use crate::clock::Instant;

/// The way in which a datagram gets its destination.
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
    // As resolvers do, it retries once if its backend was removed before the response.
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

/// Returns the server's name, if the rest of the response is the request.
fn server(answer: &[u8], question: &[u8]) -> io::Result<String> {
    let name = answer
        .strip_suffix(question)
        .and_then(|rest| rest.strip_suffix(b" "));
    let name = name.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(String::from_utf8_lossy(name).into_owned())
}
