//! How long it takes from a file to the kernel, observed through the kernel: by what `connect`
//! does, not by what the daemon says.
#![expect(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use socket2::{Domain, Type};

use super::{FIRST, Verdict, judge, many, median};
use crate::{
    clock::{self, Instant},
    demo::table::microseconds,
    instance::Settings,
    load::{nanoseconds, percentile, race::offset},
    manifest::{Manifest, Protocol, Service},
    node::Node,
    place::Place,
    wait,
};

const PORT: u16 = 53;

/// Endpoints of the Services; datagrams are never sent, so nobody needs to be there.
const ENDPOINTS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 101)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 102)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 103)),
];

/// The Service whose endpoint changes.
const PROBE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 99)), PORT);

/// Its two endpoints, and the source address that a socket connected to each gets.
const SIDES: [(Ipv4Addr, Ipv4Addr); 2] = [
    (Ipv4Addr::new(10, 1, 0, 111), Ipv4Addr::new(10, 1, 0, 211)),
    (Ipv4Addr::new(10, 1, 0, 112), Ipv4Addr::new(10, 1, 0, 212)),
];

const PROGRAMMED: Duration = Duration::from_millis(500);
const CHANGED: Duration = Duration::from_millis(50);

/// How long to look before giving up.
const LOOKING: Duration = Duration::from_secs(20);

/// How long between two looks at a connect.
const LOOK: Duration = Duration::from_micros(100);

/// How long between two changes: none meets the work of the one before.
const REST: Duration = Duration::from_millis(20);

/// How a measurement is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program.
    pub culvert: PathBuf,
    /// How many Services there are.
    pub services: u32,
    /// How often they are programmed from nothing.
    pub rounds: u32,
    /// How often an endpoint changes.
    pub changes: u32,
    /// Whether to print JSON instead of a table.
    pub json: bool,
    /// Whether a target that is missed is an error.
    pub check: bool,
}

/// Times in nanoseconds.
#[derive(Clone, Debug, Serialize)]
struct Times {
    what: String,
    count: usize,
    median_ns: u64,
    p99_ns: u64,
    max_ns: u64,
}

impl Times {
    fn of(what: String, times: &[Duration]) -> Self {
        let mut sorted: Vec<u64> = times.iter().map(|time| nanoseconds(*time)).collect();
        sorted.sort_unstable();
        Self {
            what,
            count: sorted.len(),
            median_ns: median(sorted.iter().copied()).unwrap_or(0),
            p99_ns: percentile(&sorted, 99),
            max_ns: sorted.last().copied().unwrap_or(0),
        }
    }

    fn verdict(&self, target: Duration) -> Verdict {
        Verdict {
            target: format!("{}: median under {} ms", self.what, target.as_millis()),
            measured: milliseconds(self.median_ns),
            met: self.median_ns < nanoseconds(target),
        }
    }
}

#[derive(Debug, Serialize)]
struct Outcome {
    times: Vec<Times>,
    verdicts: Vec<Verdict>,
}

/// Measures and prints.
///
/// # Errors
///
/// When something can't be set up or is never programmed; with `check`, when a target is missed.
pub fn run(options: &Options) -> Result<()> {
    let mut from_rename = Vec::new();
    let mut from_start = Vec::new();
    let mut changes = Vec::new();
    for round in 0..options.rounds.max(1) {
        let node = prepare(options)?;
        from_rename.push(appear(&node, options)?);
        if round == 0 {
            changes = change(&node, options)?;
        }
        node.stop()?;
        let cleanup = node.culvert(&["cleanup"])?;
        if !cleanup.exit.is_success() {
            bail!(
                "`culvert cleanup` failed: {}{}",
                cleanup.stdout,
                cleanup.stderr
            );
        }
        from_start.push(begin(&node, options)?);
    }
    let services = options.services;
    let rename = Times::of(
        format!("{services} services × 3 endpoints, from the rename of their file"),
        &from_rename,
    );
    let start = Times::of(
        format!("{services} services × 3 endpoints, from the start of the daemon"),
        &from_start,
    );
    let change = Times::of(
        "one endpoint, from the rename of its slice".to_owned(),
        &changes,
    );
    let verdicts = vec![
        rename.verdict(PROGRAMMED),
        start.verdict(PROGRAMMED),
        change.verdict(CHANGED),
    ];
    print(
        &Outcome {
            times: vec![rename, start, change],
            verdicts: verdicts.clone(),
        },
        options.json,
    )?;
    judge(&verdicts, options.check)
}

/// A node whose daemon is ready and knows nothing but the Service that changes later.
fn prepare(options: &Options) -> Result<Node> {
    let room = options.services.saturating_mul(2).max(1024);
    let settings = Settings {
        fronts: room,
        slots: room.saturating_mul(4),
        backends: room.saturating_mul(4),
        ..Settings::of(options.culvert.clone())
    };
    let node = Node::with(settings)?;
    let client = node.pod("client")?;
    let mut batch = String::new();
    // A socket's own address shows which endpoint the kernel chose for it.
    for (endpoint, source) in SIDES {
        batch.push_str(&format!(
            "addr add {source}/32 dev eth0\n\
             route add {endpoint}/32 via 169.254.1.1 dev eth0 src {source}\n"
        ));
    }
    client.ip(&batch)?;
    node.apply(("probe-service.yaml", probe(0).service_yaml().as_str()))?;
    node.apply(slice(0))?;
    node.start()?;
    Ok(node)
}

fn probe(side: usize) -> Service {
    let (endpoint, _) = SIDES[side % SIDES.len()];
    Service::cluster_ip("probe", PROBE, Protocol::Udp).backend(endpoint.into())
}

fn slice(side: usize) -> Manifest {
    Manifest {
        file: "probe-slice.yaml".to_owned(),
        text: probe(side).slice_yaml(PROBE.ip()),
    }
}

/// The time from the rename of a file with all Services until the kernel translates each of them.
fn appear(node: &Node, options: &Options) -> Result<Duration> {
    let files = many(options.services, Protocol::Udp, PORT, PORT, &ENDPOINTS);
    let client = node.pod("client")?;
    let start = Instant::now();
    for file in files {
        node.apply(file)?;
    }
    until_all(&client, options.services)?;
    Ok(start.elapsed())
}

/// The time from the start of the daemon until the kernel translates each of the Services.
fn begin(node: &Node, options: &Options) -> Result<Duration> {
    let client = node.pod("client")?;
    let start = Instant::now();
    node.launch()?;
    until_all(&client, options.services)?;
    let took = start.elapsed();
    node.wait_ready()?;
    Ok(took)
}

/// Connects a UDP socket to each of the VIPs in turn, waiting at the first that isn't translated.
fn until_all(client: &Place, count: u32) -> Result<()> {
    let socket = UdpSocket::from(client.socket(Domain::IPV4, Type::DGRAM)?);
    let start = Instant::now();
    for number in 0..count {
        let vip = SocketAddr::new(offset(FIRST, number), PORT);
        while !is_translated(&socket, vip)? {
            if start.elapsed() > LOOKING {
                bail!(
                    "{vip} is still not translated after {} s",
                    LOOKING.as_secs()
                );
            }
            clock::pause(LOOK);
        }
    }
    Ok(())
}

fn is_translated(socket: &UdpSocket, vip: SocketAddr) -> Result<bool> {
    match socket.connect(vip) {
        // A Service that has no endpoints yet is refused by way of loopback.
        Ok(()) => Ok(!socket.local_addr()?.ip().is_loopback()),
        Err(error) if is_not_yet(&error) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("connect to {vip}")),
    }
}

fn is_not_yet(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::ConnectionRefused
    )
}

/// The times from the rename of a changed slice until a connect reaches the new endpoint.
fn change(node: &Node, options: &Options) -> Result<Vec<Duration>> {
    let client = node.pod("client")?;
    let mut times = Vec::new();
    for number in 1..=options.changes.max(1) {
        let side = usize::try_from(number)? % SIDES.len();
        let (_, source) = SIDES[side];
        clock::pause(REST);
        let start = Instant::now();
        node.apply(slice(side))?;
        let reached = || {
            shows(&client, source)
                .unwrap_or(false)
                .then(|| start.elapsed())
        };
        times.push(wait::some(LOOKING, reached).context("a changed endpoint never came")?);
    }
    Ok(times)
}

/// Whether a new socket that connects to the changing Service gets this source address.
fn shows(client: &Place, source: Ipv4Addr) -> Result<bool> {
    let socket = UdpSocket::from(client.socket(Domain::IPV4, Type::DGRAM)?);
    socket.connect(PROBE)?;
    Ok(socket.local_addr()?.ip() == IpAddr::V4(source))
}

fn print(outcome: &Outcome, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(outcome)?);
        return Ok(());
    }
    for Times {
        what,
        count,
        median_ns,
        p99_ns,
        max_ns,
    } in &outcome.times
    {
        println!(
            "{what}: median {}, p99 {}, longest {} of {count}",
            milliseconds(*median_ns),
            milliseconds(*p99_ns),
            milliseconds(*max_ns)
        );
    }
    for verdict in &outcome.verdicts {
        println!("  {verdict}");
    }
    Ok(())
}

/// Nanoseconds as milliseconds with one decimal.
fn milliseconds(nanoseconds: u64) -> String {
    microseconds(nanoseconds / 1000).replace("µs", "ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_at_the_target_misses_it() {
        let times = Times::of(
            "one".to_owned(),
            &[CHANGED, CHANGED - Duration::from_millis(1), CHANGED],
        );

        let verdict = times.verdict(CHANGED);

        assert!(!verdict.met);
        assert_eq!(verdict.measured, "50.0 ms");
    }

    #[test]
    fn a_change_swaps_the_only_endpoint() {
        assert!(slice(0).text.contains("10.1.0.111"));
        assert!(slice(1).text.contains("10.1.0.112"));
        assert_eq!(slice(2).text, slice(0).text);
    }
}
