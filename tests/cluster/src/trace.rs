//! The packets between nodes to node ports, and their answers: captured by tcpdump on the router,
//! through which every packet from one node to another passes.

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
use tunnel_tests::{place::Process, wait};

use super::Site;

/// Kubernetes' default range of node ports.
const PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// The time that tcpdump has to start, and to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// The counts of packets to a node port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Fate {
    /// The number of SYNs and datagrams to the port.
    pub asked: u64,
    /// The number of answers of the port: SYN-ACKs and datagrams.
    pub answered: u64,
    /// The number of refusals by the node: resets and ICMP messages.
    pub refused: u64,
    /// The source ports of the requests.
    pub from: BTreeSet<u16>,
}

impl fmt::Display for Fate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} asked, {} refused, {} answered",
            self.asked, self.refused, self.answered
        )
    }
}

/// The fates of all node ports, by address and protocol.
pub type Fates = BTreeMap<(SocketAddr, &'static str), Fate>;

/// A running capture.
#[derive(Debug)]
pub struct Trace {
    capture: Process,
    path: PathBuf,
}

impl Trace {
    /// Starts a capture.
    pub(super) fn start(site: &Site) -> Result<Self> {
        let [first, last] = [PORTS.start(), PORTS.end()];
        let filter = format!("portrange {first}-{last} or icmp or icmp6");
        // Line-buffered, without names, and each packet once, on its arrival.
        let words = ["tcpdump", "-Z", "root", "-l", "-n", "-i", "any", "-Q", "in"];
        let command = site.kit.command(&[&words[..], &[&filter]].concat());
        let name = "node-ports";
        let log = site.logs.create(name)?;
        let path = site.logs.path(&format!("{name}.log"));
        let capture = site.network.router.command(&command).log(log).start()?;
        let is_begun = || fs::read_to_string(&path).is_ok_and(|text| text.contains("listening on"));
        wait::until(PATIENCE, is_begun).context("tcpdump doesn't begin")?;
        Ok(Self { capture, path })
    }

    /// Ends the capture; returns the fates of all requested node ports.
    pub fn end(self) -> Result<Fates> {
        self.capture.signal(Signal::SIGINT)?;
        self.capture.wait(PATIENCE)?;
        Ok(fates(&fs::read_to_string(&self.path)?))
    }
}

fn fates(log: &str) -> Fates {
    let mut fates = Fates::new();
    for (key, event) in log.lines().filter_map(event) {
        let fate = fates.entry(key).or_default();
        let count = match event {
            Event::Asked(from) => {
                fate.from.insert(from);
                &mut fate.asked
            }
            Event::Answered => &mut fate.answered,
            Event::Refused => &mut fate.refused,
        };
        *count += 1;
    }
    fates.retain(|_, fate| fate.asked > 0);
    fates
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    /// A request, with its source port.
    Asked(u16),
    Answered,
    Refused,
}

/// Parses a line about a node port, if it is one.
fn event(line: &str) -> Option<((SocketAddr, &'static str), Event)> {
    let packet = line.split_once(" IP ").or_else(|| line.split_once(" IP6 "));
    let (ends, what) = packet?.1.split_once(": ")?;
    let (from, to) = ends.split_once(" > ")?;
    let (_, port) = from.rsplit_once('.').unwrap_or_default();
    let asked = Event::Asked(port.parse().unwrap_or_default());
    let of = |end, protocol, event| Some(((node_port(end)?, protocol), event));
    if what.starts_with("ICMP") {
        // "... 192.0.2.1 udp port 31000 unreachable", "... unreachable port, 2001:db8::1 udp port 31000".
        let (before, after) = what.split_once(" udp port ")?;
        let ip = before.rsplit(' ').next()?;
        let port = after.split([' ', ',']).next()?;
        return Some(((place(ip, port)?, "UDP"), Event::Refused));
    }
    match what.strip_prefix("Flags [") {
        Some(flags) if flags.starts_with("S]") => of(to, "TCP", asked),
        Some(flags) if flags.starts_with("S.") => of(from, "TCP", Event::Answered),
        Some(flags) if flags.starts_with('R') => of(from, "TCP", Event::Refused),
        Some(_) => None,
        None => of(to, "UDP", asked).or_else(|| of(from, "UDP", Event::Answered)),
    }
}

/// Parses an address and a node port, as tcpdump joins them.
fn node_port(end: &str) -> Option<SocketAddr> {
    let (ip, port) = end.rsplit_once('.')?;
    place(ip, port)
}

fn place(ip: &str, port: &str) -> Option<SocketAddr> {
    let port = port.parse().ok().filter(|port| PORTS.contains(port))?;
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
    fn what_is_asked_of_a_node_port_is_told_with_what_came_of_it_and_who_asked() {
        let fates = fates(LOG);

        let told: Vec<_> = fates
            .iter()
            .map(|((at, protocol), fate)| format!("{at}/{protocol}: {fate} {:?}", fate.from))
            .collect();
        assert_eq!(
            told,
            [
                "172.30.1.1:31000/TCP: 2 asked, 1 refused, 0 answered {43210, 43211}",
                "172.30.1.1:32000/UDP: 1 asked, 1 refused, 0 answered {43213}",
                "[fd00:30:1::1]:31000/TCP: 1 asked, 0 refused, 1 answered {43212}",
                "[fd00:30:1::1]:32000/UDP: 1 asked, 1 refused, 0 answered {43214}",
            ]
        );
    }
}
