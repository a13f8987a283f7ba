//! Opens sockets and keeps them open until this process exits.

use std::{
    collections::VecDeque,
    io,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use clap::Args;
use socket2::{Domain, Socket, Type};

use super::{create_local_socket, timeout, udp::Mode};
use crate::{http, sandbox};

/// The sockets to open.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    /// An address to open TCP connections to.
    #[arg(long)]
    pub tcp: Vec<SocketAddr>,
    /// An address for UDP sockets: some are connected to it, others are unconnected and send a datagram to
    /// it.
    #[arg(long)]
    pub udp: Vec<SocketAddr>,
    /// The number of sockets to keep open, for each kind of socket and each address.
    #[arg(long)]
    pub each: u32,
    /// The number of additional sockets to open and close first.
    #[arg(long, default_value_t = 0)]
    pub before: u32,
    /// The number of HTTP requests to send over each TCP connection, once all are open.
    #[arg(long, default_value_t = 0)]
    pub requests: u32,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp,
    Udp(Mode),
}

/// Opens the sockets, and returns the ones to keep open.
pub fn open_sockets(plan: &Plan) -> io::Result<Vec<Socket>> {
    let tcp = plan.tcp.iter().map(|to| (Kind::Tcp, *to));
    let udp = plan.udp.iter();
    let modes = [Mode::Connected, Mode::Unconnected];
    let udp = udp.flat_map(|to| modes.map(|mode| (Kind::Udp(mode), *to)));
    let kinds: Vec<_> = tcp.chain(udp).collect();
    let each = usize::try_from(plan.each).map_err(io::Error::other)?;
    let before = usize::try_from(plan.before).map_err(io::Error::other)?;
    let open_count = each * kinds.len();
    let mut open = VecDeque::new();
    for (kind, to) in kinds.into_iter().cycle().take(before + open_count) {
        if open.len() == open_count {
            open.pop_front();
        }
        open.push_back(open_socket(kind, to, before > 0)?);
    }
    for _ in 0..plan.requests {
        for socket in open
            .iter()
            .filter(|it| it.r#type().is_ok_and(|kind| kind == Type::STREAM))
        {
            http::get(socket).map_err(io::Error::other)?;
        }
    }
    Ok(open.into())
}

/// Opens a socket. If `resets` is true, closing a TCP socket resets its connection, so that nothing remains
/// in TIME_WAIT.
fn open_socket(kind: Kind, to: SocketAddr, resets: bool) -> io::Result<Socket> {
    let domain = Domain::for_address(to);
    match kind {
        Kind::Tcp => {
            let socket = create_local_socket(domain, Type::STREAM)?;
            if resets {
                socket.set_linger(Some(Duration::ZERO))?;
            }
            sandbox::connect_within(&socket, to, timeout())?;
            Ok(socket)
        }
        Kind::Udp(mode) => {
            let socket = UdpSocket::from(create_local_socket(domain, Type::DGRAM)?);
            match mode {
                Mode::Connected => socket.connect(to)?,
                Mode::Unconnected => socket.send_to(b"held", to).map(drop)?,
            }
            Ok(socket.into())
        }
    }
}
