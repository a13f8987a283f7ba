//! Clients that race against the writer of the service maps. They connect UDP sockets to many VIPs in turn,
//! as fast as possible, and send datagrams that name the intended Service, so that servers can count the
//! misrouted ones. If the routes to each Service's backends set a different source address, a client also
//! detects misrouted connections itself, without the cost of a datagram.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use clap::Args;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{error_name, parse_millis};
use crate::{address::nth_address, clock::Instant};

/// The number of connect() calls between two readings of the clock.
const BURST: u32 = 256;

/// The VIPs to connect to: `count` addresses, starting at `first`, that belong to the Services `<stem>-0`,
/// `<stem>-1` and so on.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    /// The first VIP, and the port for all VIPs.
    #[arg(long)]
    pub first: SocketAddr,
    /// The number of VIPs. Their addresses are consecutive.
    #[arg(long)]
    pub count: u32,
    /// The common part of the Services' names: VIP number k belongs to the Service STEM-k.
    #[arg(long)]
    pub stem: String,
    /// The duration of the load, in milliseconds.
    #[arg(long = "millis", value_parser = parse_millis)]
    pub duration: Duration,
    /// Reconnect a single socket repeatedly, instead of opening a new one for each connection.
    #[arg(long)]
    pub reconnect: bool,
    /// The source address that is set on the route to the first Service's backends. The source addresses for
    /// the other Services must follow it consecutively. A new socket's source address then shows which
    /// Service it was connected to. This does not work with --reconnect, since a reconnected socket keeps its
    /// source address.
    #[arg(long)]
    pub source: Option<IpAddr>,
    /// Send a datagram after every Nth connection, and after each misrouted one.
    #[arg(long, default_value_t = 1)]
    pub send_each: u64,
}

/// A client's report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    pub connects: u64,
    pub sent: u64,
    /// The number of connections that were misrouted, according to the socket's source address.
    pub astray: u64,
    /// The number of ICMP "port unreachable" errors received in response to datagrams.
    pub refused: u64,
    /// The number of failures for each error and step.
    pub failures: BTreeMap<String, u64>,
}

impl Report {
    fn record_failure(&mut self, error: &io::Error, step: &str) {
        *self
            .failures
            .entry(format!("{} at {step}", error_name(error)))
            .or_default() += 1;
    }

    /// Adds another client's report to this one.
    pub fn merge(&mut self, other: &Self) {
        self.connects += other.connects;
        self.sent += other.sent;
        self.astray += other.astray;
        self.refused += other.refused;
        for (failure, count) in &other.failures {
            *self.failures.entry(failure.clone()).or_default() += count;
        }
    }
}

/// A VIP, with the name of its Service and the source address for it.
struct Target {
    vip: SocketAddr,
    name: Vec<u8>,
    source: Option<IpAddr>,
}

/// Connects sockets until the planned duration is over.
pub fn run(plan: &Plan) -> io::Result<Report> {
    let targets: Vec<Target> = (0..plan.count)
        .map(|number| Target {
            vip: SocketAddr::new(nth_address(plan.first.ip(), number), plan.first.port()),
            name: format!("{}-{number}", plan.stem).into_bytes(),
            source: plan.source.map(|first| nth_address(first, number)),
        })
        .collect();
    let domain = Domain::for_address(plan.first);
    let open = || Socket::new(domain, Type::DGRAM, None).map(UdpSocket::from);

    let mut report = Report::default();
    let mut socket = open()?;
    let mut targets = targets.iter().cycle();
    let start = Instant::now();
    while start.elapsed() < plan.duration {
        for target in targets.by_ref().take(usize::try_from(BURST).unwrap_or(1)) {
            if !plan.reconnect {
                socket = open()?;
            }
            connect_and_check(&socket, target, plan.send_each, &mut report);
        }
    }
    Ok(report)
}

fn connect_and_check(socket: &UdpSocket, target: &Target, send_each: u64, report: &mut Report) {
    if let Err(error) = socket.connect(target.vip) {
        report.record_failure(&error, "connect");
        return;
    }
    report.connects += 1;
    let is_astray = match (target.source, socket.local_addr()) {
        (Some(expected), Ok(actual)) => actual.ip() != expected,
        (Some(_), Err(error)) => {
            report.record_failure(&error, "getsockname");
            return;
        }
        (None, _) => false,
    };
    // A socket loses its source address when it is terminated, so there is no way to know which Service it
    // reached.
    if is_astray && is_terminated(socket) {
        return;
    }
    report.astray += u64::from(is_astray);
    if !is_astray && !report.connects.is_multiple_of(send_each.max(1)) {
        return;
    }
    match socket.send(&target.name) {
        Ok(_) => report.sent += 1,
        Err(_) if is_terminated(socket) => {}
        // An earlier datagram caused the ICMP error.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => report.refused += 1,
        Err(error) => report.record_failure(&error, "send"),
    }
}

/// Returns true if a connected socket has been terminated, as Culvert does when it removes the socket's
/// backend.
fn is_terminated(socket: &UdpSocket) -> bool {
    let peer = socket.peer_addr();
    peer.is_err_and(|error| error.kind() == io::ErrorKind::NotConnected)
}
