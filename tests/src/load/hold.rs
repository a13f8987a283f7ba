//! Sockets that are connected and then held, until the process that owns them ends.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use socket2::{Domain, Socket, Type};

use super::{own_sockets, patience};
use crate::place;

/// What is held.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where TCP connects.
    pub tcp: Vec<SocketAddr>,
    /// Where UDP sockets connect, and others send without connecting.
    pub udp: Vec<SocketAddr>,
    /// How many sockets there are of each kind and address.
    pub each: u32,
}

/// Makes the sockets.
///
/// # Errors
///
/// When one of them can't connect or send.
pub fn sockets(plan: &Plan) -> io::Result<Vec<Socket>> {
    let mut held = Vec::new();
    for _ in 0..plan.each {
        for to in &plan.tcp {
            let socket = own_sockets(Domain::for_address(*to), Type::STREAM)?;
            place::connect_within(&socket, *to, patience())?;
            held.push(socket);
        }
        for to in &plan.udp {
            let connected = UdpSocket::from(own_sockets(Domain::for_address(*to), Type::DGRAM)?);
            connected.connect(to)?;
            let unconnected = UdpSocket::from(own_sockets(Domain::for_address(*to), Type::DGRAM)?);
            unconnected.send_to(b"held", to)?;
            held.extend([connected.into(), unconnected.into()]);
        }
    }
    Ok(held)
}
