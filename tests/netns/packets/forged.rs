//! TCP packets with the address of a client, whose sender doesn't see what the backend sends.

use std::{
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};
use tunnel_tests::{checksum::sum_of, sandbox::Sandbox, wait};

use super::{connect_to_node_port, exchange_stream, start_with_remote_backend};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_HTTP, configured},
    support::{CHANGE_TIMEOUT, HOST, ensure_eq},
};

const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// A TCP packet over IPv4 without data.
pub(super) struct Segment {
    pub(super) from: SocketAddrV4,
    pub(super) to: SocketAddrV4,
    pub(super) flags: u8,
    pub(super) sequence: u32,
    pub(super) acknowledged: u32,
    /// True if the checksum is wrong, so that the receiver ignores the packet.
    pub(super) is_damaged: bool,
}

/// Returns a socket for whole packets.
pub(super) fn raw_socket(sandbox: &Sandbox) -> Result<Socket> {
    Ok(sandbox.socket_with_protocol(Domain::IPV4, Type::RAW, Protocol::from(255))?)
}

impl Segment {
    /// Sends the packet, unless the queue of the link is full.
    pub(super) fn send(&self, raw: &Socket) {
        let (from, to) = (self.from.ip().octets(), self.to.ip().octets());
        let mut segment = Vec::new();
        segment.extend(self.from.port().to_be_bytes());
        segment.extend(self.to.port().to_be_bytes());
        segment.extend(self.sequence.to_be_bytes());
        segment.extend(self.acknowledged.to_be_bytes());
        segment.extend([0x50, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        let pseudo = [&from[..], &to, &[0, 6, 0, 20]].concat();
        let sum = !sum_of(&[&pseudo, &segment]) ^ u16::from(self.is_damaged);
        let [high, low] = sum.to_be_bytes();
        segment[16..18].copy_from_slice(&[high, low]);
        // The kernel fills in the length, the identification and the checksum.
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
        packet.extend(from);
        packet.extend(to);
        packet.extend(segment);
        drop(raw.send_to(&packet, &SocketAddrV4::new(*self.to.ip(), 0).into()));
    }
}

/// Returns the address of a socket.
fn v4(address: SocketAddr) -> Result<SocketAddrV4> {
    match address {
        SocketAddr::V4(address) => Ok(address),
        SocketAddr::V6(_) => bail!("{address} is no IPv4 address"),
    }
}

/// Returns the flows.
fn flows(scene: &Scene) -> Result<Vec<Value>> {
    let output = scene.node.culvert(&["flows", "--output", "json"])?;
    Ok(serde_json::from_str(&output.stdout)?)
}

/// Returns the phases of the flows.
fn phases(scene: &Scene) -> Result<Value> {
    Ok(flows(scene)?
        .iter()
        .map(|flow| flow["state"].clone())
        .collect())
}

#[test]
fn forged_packets_neither_end_a_connection_nor_move_it_to_another_backend() -> Result<()> {
    let scene = configured("packets: { timeouts: { tcpClosed: 1s, tcpClosing: 1s } }")?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    let (one, other) = connect_to_node_port(client, &backend)?;
    exchange_stream(&one, &other)?;
    let raw = raw_socket(client)?;
    let (from, to) = (v4(one.local_addr()?)?, v4(one.peer_addr()?)?);
    let forged = |flags| Segment {
        from,
        to,
        flags,
        sequence: 0x5555_5555,
        acknowledged: 0x5555_5555,
        is_damaged: false,
    };

    for flags in [RST, RST | ACK, FIN | ACK, SYN, SYN] {
        forged(flags).send(&raw);
    }
    // A connection that was reset would be over.
    let is_idle = |flow: &Value| flow["idleSeconds"].as_u64() >= Some(3);
    wait::until(CHANGE_TIMEOUT, || {
        flows(&scene).unwrap_or_default().iter().any(is_idle)
    })?;
    exchange_stream(&one, &other).context("after forged packets")
}

#[test]
fn the_reset_of_a_client_ends_its_flow() -> Result<()> {
    let scene = configured("packets: { enabled: true }")?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let reset = |stream: TcpStream| -> Result<()> {
        Ok(Socket::from(stream).set_linger(Some(Duration::ZERO))?)
    };
    // With and without data that the backend has acknowledged.
    for has_data in [false, true] {
        let (one, other) = connect_to_node_port(scene.node.outside(), &backend)?;
        if has_data {
            exchange_stream(&one, &other)?;
        }
        reset(one)?;
    }
    let closed = || phases(&scene).unwrap_or_default() == serde_json::json!(["closed", "closed"]);
    wait::until(CHANGE_TIMEOUT, closed).with_context(|| format!("{:?}", phases(&scene)))
}

#[test]
fn forged_handshakes_leave_half_open_flows() -> Result<()> {
    let scene = configured("packets: { enabled: true }")?;
    let (_remote, _backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    // The answers to the forged sender lead nowhere.
    client.ip("route add unreachable 198.18.0.0/15\n")?;
    let raw = raw_socket(client)?;
    let forged = |port, flags, is_damaged| Segment {
        from: SocketAddrV4::new(Ipv4Addr::new(198, 18, 0, 1), port),
        to: SocketAddrV4::new(HOST.v4, NODE_HTTP),
        flags,
        sequence: 700,
        acknowledged: 0x5555_5555,
        is_damaged,
    };
    let begin = |port, number: usize| -> Result<()> {
        forged(port, SYN, false).send(&raw);
        let begun = || phases(&scene).unwrap_or_default().as_array().map(Vec::len);
        wait::until(CHANGE_TIMEOUT, || begun() == Some(number))
    };

    begin(5000, 1)?;
    // The backend would reset the connection if it accepted the checksum.
    forged(5000, ACK, true).send(&raw);
    begin(5001, 2)?;

    let expected = serde_json::json!(["half_open", "half_open"]);
    ensure_eq("phases", phases(&scene)?, expected)
}
