//! A load of HTTP requests, each over a new TCP connection.

use std::{
    io::{self, Read as _, Write as _},
    net::SocketAddr,
};

use socket2::Socket;

use super::{CreateSocket, Failure, Plan, Report, Success, connect_tcp};

/// Runs the load. `sockets` creates its sockets.
#[must_use]
pub fn run(plan: &Plan, sockets: CreateSocket<'_>) -> Report {
    run_with_path(plan, "/", sockets)
}

/// Runs the load with requests for `path`. Each response's body must be the server's name.
#[must_use]
pub fn run_with_path(plan: &Plan, path: &str, sockets: CreateSocket<'_>) -> Report {
    let request = request(path, plan.service.as_deref());
    super::run(plan, &|to| attempt(to, &request, sockets))
}

fn request(path: &str, service: Option<&str>) -> String {
    let service = service
        .map(|name| format!("X-Service: {name}\r\n"))
        .unwrap_or_default();
    format!("GET {path} HTTP/1.1\r\nHost: lab\r\n{service}Connection: close\r\n\r\n")
}

fn attempt(to: SocketAddr, request: &str, sockets: CreateSocket<'_>) -> Result<Success, Failure> {
    let (socket, connect) = connect_tcp(to, sockets)?;
    let peer = socket.peer_addr().map_err(Failure::at("getpeername"))?;
    let server = exchange(socket, request).map_err(Failure::at("answer"))?;
    Ok(Success {
        server,
        connect,
        is_peer_dialled: peer.as_socket() == Some(to),
    })
}

fn exchange(mut socket: Socket, request: &str) -> io::Result<String> {
    socket.write_all(request.as_bytes())?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, name)) if head.starts_with("HTTP/1.1 200 ") && !name.is_empty() => {
            Ok(name.to_owned())
        }
        Some(_) | None => Err(io::ErrorKind::InvalidData.into()),
    }
}
