//! Captures packets that nodes send to each other's node ports, and the replies. tcpdump runs on the router,
//! which every packet from one node to another passes through.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tunnel_tests::{sandbox::Process, wait};

use super::SharedParts;

/// The default range of node ports in Kubernetes.
const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// The time limit for tcpdump to start, and for it to exit.
const TCPDUMP_TIMEOUT: Duration = Duration::from_secs(10);

/// The numbers of packets to and from a node port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PacketCounts {
    /// The number of SYNs and datagrams sent to the port.
    pub requests: u64,
    /// The number of SYN-ACKs and datagrams sent from the port.
    pub answered: u64,
    /// The number of resets from the port, and of ICMP messages that report it as unreachable.
    pub refused: u64,
    /// The source ports of the requests.
    pub source_ports: BTreeSet<u16>,
}

impl fmt::Display for PacketCounts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} requests, {} refused, {} answered",
            self.requests, self.refused, self.answered
        )
    }
}

/// The packet counts for each node port, keyed by address, port and protocol.
pub type CountsByNodePort = BTreeMap<(SocketAddr, &'static str), PacketCounts>;

/// A running packet capture.
#[derive(Debug)]
pub struct PacketCapture {
    capture: Process,
    path: PathBuf,
}

impl PacketCapture {
    /// Starts a capture, and waits until tcpdump is listening.
    pub(super) fn start(shared: &SharedParts) -> Result<Self> {
        let [first, last] = [NODE_PORTS.start(), NODE_PORTS.end()];
        let filter = format!("portrange {first}-{last} or icmp or icmp6");
        // The options make tcpdump print each line at once, without resolving names, and capture a packet
        // only when it arrives at the router, not also when it leaves.
        let tcpdump = ["tcpdump", "-Z", "root", "-l", "-n", "-i", "any", "-Q", "in"];
        let command = shared
            .components
            .command(&[&tcpdump[..], &[&filter]].concat());
        let name = "node-ports";
        let log = shared.logs.create(name)?;
        let path = shared.logs.path(&format!("{name}.log"));
        let capture = shared.network.router.command(&command).log(log).start()?;
        let is_listening =
            || fs::read_to_string(&path).is_ok_and(|text| text.contains("listening on"));
        wait::until(TCPDUMP_TIMEOUT, is_listening).context("tcpdump did not start to capture")?;
        Ok(Self { capture, path })
    }

    /// Stops the capture, and returns the packet counts for all node ports that received a request.
    pub fn end(self) -> Result<CountsByNodePort> {
        self.capture.signal(Signal::SIGINT)?;
        self.capture.wait(TCPDUMP_TIMEOUT)?;
        Ok(count_packets(&fs::read_to_string(&self.path)?))
    }
}

fn count_packets(log: &str) -> CountsByNodePort {
    let mut counts = CountsByNodePort::new();
    for (key, packet) in log.lines().filter_map(parse_packet) {
        let of_port = counts.entry(key).or_default();
        let count = match packet {
            Packet::Request { source_port } => {
                of_port.source_ports.insert(source_port);
                &mut of_port.requests
            }
            Packet::Answer => &mut of_port.answered,
            Packet::Refusal => &mut of_port.refused,
        };
        *count += 1;
    }
    counts.retain(|_, of_port| of_port.requests > 0);
    counts
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Packet {
    Request { source_port: u16 },
    Answer,
    Refusal,
}

/// Parses a line of tcpdump's output; returns the packet's node port, protocol and kind.
fn parse_packet(line: &str) -> Option<((SocketAddr, &'static str), Packet)> {
    let packet = line.split_once(" IP ").or_else(|| line.split_once(" IP6 "));
    let (addresses, content) = packet?.1.split_once(": ")?;
    let (from, to) = addresses.split_once(" > ")?;
    let (_, port) = from.rsplit_once('.').unwrap_or_default();
    let source_port = port.parse().unwrap_or_default();
    let request = Packet::Request { source_port };
    let at = |address, protocol, packet| Some(((node_port(address)?, protocol), packet));
    if content.starts_with("ICMP") {
        // The content is either "... 192.0.2.1 udp port 31000 unreachable" or "... unreachable port,
        // 2001:db8::1 udp port 31000".
        let (before, after) = content.split_once(" udp port ")?;
        let ip = before.rsplit(' ').next()?;
        let port = after.split([' ', ',']).next()?;
        return Some(((parse_node_port(ip, port)?, "UDP"), Packet::Refusal));
    }
    match content.strip_prefix("Flags [") {
        Some(flags) if flags.starts_with("S]") => at(to, "TCP", request),
        Some(flags) if flags.starts_with("S.") => at(from, "TCP", Packet::Answer),
        Some(flags) if flags.starts_with('R') => at(from, "TCP", Packet::Refusal),
        Some(_) => None,
        None => at(to, "UDP", request).or_else(|| at(from, "UDP", Packet::Answer)),
    }
}

/// Parses an address and a node port in tcpdump's notation, such as `192.0.2.1.31000`.
fn node_port(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.rsplit_once('.')?;
    parse_node_port(ip, port)
}

/// Parses an address and a port; returns `None` if the port is not a node port.
fn parse_node_port(ip: &str, port: &str) -> Option<SocketAddr> {
    let port = port.parse().ok().filter(|port| NODE_PORTS.contains(port))?;
    Some(SocketAddr::new(ip.parse::<IpAddr>().ok()?, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
tcpdump: data link type LINUX_SLL2
listening on any, link-type LINUX_SLL2 (Linux cooked v2), snapshot length 262144 bytes
14:00:00.000001 to0   In  IP 10.244.0.5.43210 > 172.30.1.1.31000: Flags [S], seq 1, win 64240, length 0
14:00:00.000002 to1   In  IP 172.30.1.1.31000 > 10.244.0.5.43210: Flags [R.], seq 0, ack 2, win 0, length 0
14:00:00.000003 to0   In  IP 10.244.0.5.43211 > 172.30.1.1.31000: Flags [S], seq 1, win 64240, length 0
14:00:00.000004 to0   In  IP6 fd00:244::5.43212 > fd00:30:1::1.31000: Flags [S], seq 1, length 0
14:00:00.000005 to1   In  IP6 fd00:30:1::1.31000 > fd00:244::5.43212: Flags [S.], seq 1, ack 2, length 0
14:00:00.000006 to0   In  IP6 fd00:244::5.43212 > fd00:30:1::1.31000: Flags [.], ack 1, length 0
14:00:00.000007 to0   In  IP 10.244.0.5.43213 > 172.30.1.1.32000: UDP, length 8
14:00:00.000008 to1   In  IP 172.30.1.1 > 10.244.0.5: ICMP 172.30.1.1 udp port 32000 unreachable, length 44
14:00:00.000009 to0   In  IP6 fd00:244::5.43214 > fd00:30:1::1.32000: UDP, length 8
14:00:00.000010 to1   In  IP6 fd00:30:1::1 > fd00:244::5: ICMP6, destination unreachable, unreachable port, fd00:30:1::1 udp port 32000, length 56
14:00:00.000011 to0   In  IP 10.244.0.5.31999 > 10.244.1.7.8080: Flags [S], seq 1, length 0
14:00:00.000012 to1   In  IP 10.244.1.7.8080 > 10.244.0.5.31999: Flags [R.], seq 0, length 0
14:00:00.000013 to1   In  IP6 fe80::1 > ff02::1: ICMP6, neighbor solicitation, who has fd00:30:1::1, length 32
";

    #[test]
    fn requests_to_a_node_port_are_counted_with_their_answers_refusals_and_source_ports() {
        let counts = count_packets(LOG);

        let lines: Vec<_> = counts
            .iter()
            .map(|((at, protocol), counts)| {
                format!("{at}/{protocol}: {counts} {:?}", counts.source_ports)
            })
            .collect();
        assert_eq!(
            lines,
            [
                "172.30.1.1:31000/TCP: 2 requests, 1 refused, 0 answered {43210, 43211}",
                "172.30.1.1:32000/UDP: 1 requests, 1 refused, 0 answered {43213}",
                "[fd00:30:1::1]:31000/TCP: 1 requests, 0 refused, 1 answered {43212}",
                "[fd00:30:1::1]:32000/UDP: 1 requests, 1 refused, 0 answered {43214}",
            ]
        );
    }
}
