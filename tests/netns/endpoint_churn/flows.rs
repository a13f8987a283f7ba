//! Long-lived TCP and UDP flows that exchange data continuously.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread::{Scope, ScopedJoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    clock,
    sandbox::{RESPONSE_TIMEOUT, Sandbox},
};

use super::ECHO;
use crate::support::{DNS, server};

/// The pause between receiving a reply and sending the next request on the same flow.
const PAUSE: Duration = Duration::from_millis(2);

/// The name of a running flow, and its thread, which returns how many replies the flow received.
type Flow<'scope> = (&'static str, ScopedJoinHandle<'scope, Result<u32>>);

/// The running flows.
pub(super) struct Flows<'scope>(Vec<Flow<'scope>>);

impl Flows<'_> {
    /// Waits until every flow has ended, and returns each flow's name and how many replies it received.
    pub(super) fn finish(self) -> Result<Vec<(&'static str, u32)>> {
        let end = |(name, flow): Flow<'_>| {
            let answers = flow.join().ok().context("a flow panicked")?;
            let answers = answers.with_context(|| name)?;
            ensure!(answers > 0, "{name} got no answer");
            Ok((name, answers))
        };
        self.0.into_iter().map(end).collect()
    }
}

/// Starts the flows from one client. One TCP connection is to a backend of `web`, which may stop being an
/// endpoint. Another TCP connection, and UDP flows of every kind, are to the one backend of `talk` that
/// always remains an endpoint.
pub(super) fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    from: &Sandbox,
    (web, talk): (IpAddr, IpAddr),
    stop: &'scope AtomicBool,
) -> Result<Flows<'scope>> {
    let streams = [
        (
            "a stream that loses its endpoint",
            from.connect((web, ECHO))?,
        ),
        ("a stream", from.connect((talk, ECHO))?),
    ];
    let mut sockets = Vec::new();
    let names = [
        ("a connected socket", "an unconnected socket"),
        (
            "a connected v4-mapped socket",
            "an unconnected v4-mapped socket",
        ),
    ];
    for ((connected, unconnected), address) in names.into_iter().zip(forms(talk)) {
        let dns = SocketAddr::new(address, DNS);
        sockets.push((connected, udp(from, dns, true)?, None));
        sockets.push((unconnected, udp(from, dns, false)?, Some(dns)));
    }
    // Nothing can fail from here on, so the caller can stop every thread.
    let streams = streams.map(|(name, stream)| (name, scope.spawn(|| stream_bytes(stream, stop))));
    let sockets = sockets.into_iter().map(|(name, socket, to)| {
        (
            name,
            scope.spawn(move || exchange_datagrams(&socket, to, stop)),
        )
    });
    Ok(Flows(streams.into_iter().chain(sockets).collect()))
}

/// Creates a UDP socket for sending to `to`, and connects it if `is_connected` is true.
fn udp(from: &Sandbox, to: SocketAddr, is_connected: bool) -> Result<UdpSocket> {
    let socket = from.socket(Domain::for_address(to), Type::DGRAM)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let socket = UdpSocket::from(socket);
    if is_connected {
        socket.connect(to)?;
    }
    Ok(socket)
}

/// Returns the address itself and, if it is an IPv4 address, its v4-mapped form.
fn forms(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let mapped = match address {
        IpAddr::V4(address) => Some(address.to_ipv6_mapped().into()),
        IpAddr::V6(_) => None,
    };
    [address].into_iter().chain(mapped)
}

/// Sends consecutive numbers until `stop` is set, and expects each one to be echoed. Returns how many it
/// sent.
fn stream_bytes(mut stream: TcpStream, stop: &AtomicBool) -> Result<u32> {
    stream.set_nodelay(true)?;
    let mut number = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(&number.to_be_bytes())?;
        let mut answer = [0; 4];
        stream
            .read_exact(&mut answer)
            .with_context(|| format!("answer {number}"))?;
        ensure!(
            answer == number.to_be_bytes(),
            "answer {number}: {answer:?}"
        );
        number += 1;
        clock::pause(PAUSE);
    }
    Ok(number)
}

/// Sends requests until `stop` is set, and expects the same server to answer all of them. Returns how many
/// requests it sent.
fn exchange_datagrams(
    socket: &UdpSocket,
    to: Option<SocketAddr>,
    stop: &AtomicBool,
) -> Result<u32> {
    let mut number = 0_u32;
    let mut servers = BTreeSet::new();
    while !stop.load(Ordering::Relaxed) {
        let question = format!("talk {number}");
        match to {
            Some(to) => socket.send_to(question.as_bytes(), to)?,
            None => socket.send(question.as_bytes())?,
        };
        let mut answer = [0; 64];
        let (length, sender) = socket
            .recv_from(&mut answer)
            .with_context(|| format!("answer {number}"))?;
        let answer = answer.get(..length).unwrap_or_default();
        ensure!(
            answer.ends_with(question.as_bytes()),
            "answer {number}: {answer:?}"
        );
        ensure!(
            to.is_none_or(|to| to == sender),
            "answer {number} from {sender}"
        );
        servers.insert(server(answer)?);
        ensure!(servers.len() == 1, "answer {number}: {servers:?}");
        number += 1;
        clock::pause(PAUSE);
    }
    Ok(number)
}
