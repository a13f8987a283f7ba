//! Measures how fast a Service without endpoints refuses a client outside.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, ensure};
use serde::Serialize;
use socket2::{Domain, Type};
use tunnel_tests::{
    clock::Instant,
    manifest::{Protocol, Service},
    node_network::{HOST_V4, HOST_V6},
    sandbox::{RESPONSE_TIMEOUT, Sandbox},
    table::microseconds,
};

use crate::report::{Verdict, median};

/// The number of refused clients of each kind.
const CLIENTS: usize = 51;

/// The time after which a client must be refused.
const LIMIT: Duration = Duration::from_millis(10);

/// The node ports of the Service, for TCP and UDP.
const NODE_PORTS: [u16; 2] = [32_000, 32_001];

/// Returns a Service without endpoints.
pub(super) fn service() -> Service {
    let addresses = ["10.98.0.1", "fd00:98::1"].into_iter();
    let addresses = addresses.filter_map(|address| address.parse::<IpAddr>().ok());
    let [tcp, udp] = NODE_PORTS;
    Service::new("without-endpoints", addresses)
        .port(Protocol::TCP, 80, 80)
        .node_port(tcp)
        .port(Protocol::UDP, 80, 80)
        .node_port(udp)
}

/// The times until clients of one kind are refused.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Refusals {
    protocol: &'static str,
    family: &'static str,
    median_ns: u64,
    longest_ns: u64,
}

/// Measures all kinds of clients.
pub(super) fn measure(client: &Sandbox) -> Result<Vec<Refusals>> {
    let addresses = [("IPv4", IpAddr::V4(HOST_V4)), ("IPv6", IpAddr::V6(HOST_V6))];
    let protocols = [("TCP", Type::STREAM), ("UDP", Type::DGRAM)].into_iter();
    let kinds = protocols
        .zip(NODE_PORTS)
        .flat_map(|it| addresses.map(|address| (it, address)));
    let measured = kinds.map(|(((protocol, kind), port), (family, ip))| {
        let times: Vec<u64> = (0..CLIENTS)
            .map(|_| time_until_refused(client, kind, SocketAddr::new(ip, port)))
            .collect::<Result<_>>()?;
        Ok(Refusals {
            protocol,
            family,
            longest_ns: times.iter().copied().max().unwrap_or_default(),
            median_ns: median(times),
        })
    });
    measured.collect()
}

fn time_until_refused(client: &Sandbox, kind: Type, to: SocketAddr) -> Result<u64> {
    let socket = client.socket(Domain::for_address(to), kind)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let start = Instant::now();
    let mut result = socket.connect_timeout(&to.into(), RESPONSE_TIMEOUT);
    if kind == Type::DGRAM {
        result = result
            .and_then(|()| socket.send(b"request"))
            .and_then(|_| std::net::UdpSocket::from(socket).recv(&mut [0; 16]))
            .map(drop);
    }
    let took = start.elapsed();
    let kind = result.as_ref().err().map(io::Error::kind);
    ensure!(
        kind == Some(io::ErrorKind::ConnectionRefused),
        "{to} is not refused: {result:?}"
    );
    Ok(u64::try_from(took.as_nanos())?)
}

impl Refusals {
    pub(super) fn verdict(&self) -> Verdict {
        let target = format!(
            "{} over {}: a Service without endpoints refuses within {} ms",
            self.protocol,
            self.family,
            LIMIT.as_millis()
        );
        let met = u128::from(self.longest_ns) <= LIMIT.as_nanos();
        Verdict::new(
            target,
            format!("at most {}", microseconds(self.longest_ns)),
            met,
        )
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  refused by a Service without endpoints, {} over {}: after {} (median of {CLIENTS})",
            self.protocol,
            self.family,
            microseconds(self.median_ns)
        )
    }
}
