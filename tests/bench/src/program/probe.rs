//! The probe: a Service whose only endpoint changes, and a client that observes the translation through
//! connect() and getsockname() rather than the daemon's status. No datagrams are sent, so the endpoints need
//! not exist.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    clock::{self, Instant},
    culvert_instance::InstanceSettings,
    manifest::{Manifest, Protocol, Service},
    node::Node,
    process_usage,
    sandbox::Sandbox,
    wait,
};

/// The port of all Services.
pub(super) const PORT: u16 = 53;

/// The Service whose endpoint changes.
const PROBE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 99)), PORT);

/// The probe Service's two endpoints, each with the source address that a socket connected to it gets.
const PROBE_ENDPOINTS: [(Ipv4Addr, Ipv4Addr); 2] = [
    (Ipv4Addr::new(10, 1, 0, 111), Ipv4Addr::new(10, 1, 0, 211)),
    (Ipv4Addr::new(10, 1, 0, 112), Ipv4Addr::new(10, 1, 0, 212)),
];

/// The errors from connecting to an address that isn't translated.
const UNTRANSLATED_ERRORS: [ErrorKind; 3] = [
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::ConnectionRefused,
];

/// The time limit for repeated connection attempts.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The interval between repeated connection attempts.
const CHECK_INTERVAL: Duration = Duration::from_micros(100);

/// The pause between changes. It keeps the work for one change, which ends when the replaced map entries are
/// released, from overlapping with the next.
const PAUSE: Duration = Duration::from_millis(20);

/// The cost of one change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// The time from renaming the file until a connection reaches the new endpoint.
    pub(super) delay: Duration,
    /// The CPU time that the daemon used for the change, on all CPUs.
    pub(super) cpu_time: Duration,
}

/// Creates a node with only the probe Service in its manifest directory. The daemon isn't started yet.
pub(super) fn create_node(settings: InstanceSettings) -> Result<Node> {
    let node = Node::with_settings(settings)?;
    let client = node.pod("client")?;
    let mut batch = String::new();
    // The route to each endpoint sets its own source address, so a socket's address shows which endpoint it
    // is connected to.
    for (endpoint, source) in PROBE_ENDPOINTS {
        batch.push_str(&format!(
            "addr add {source}/32 dev eth0\n\
             route add {endpoint}/32 via 169.254.1.1 dev eth0 src {source}\n"
        ));
    }
    client.ip(&batch)?;
    node.apply((
        "probe-service.yaml",
        probe_service(0).service_yaml().as_str(),
    ))?;
    node.apply(probe_slice(0))?;
    Ok(node)
}

fn probe_service(index: usize) -> Service {
    let (endpoint, _) = PROBE_ENDPOINTS[index % PROBE_ENDPOINTS.len()];
    Service::cluster_ip("probe", PROBE, Protocol::UDP).backend(endpoint.into())
}

fn probe_slice(index: usize) -> Manifest {
    Manifest {
        file: "probe-slice.yaml".to_owned(),
        text: probe_service(index).slice_yaml(PROBE.ip()),
    }
}

/// Starts the daemon; returns the time until connections to all of the addresses are translated.
pub(super) fn start_daemon(node: &Node, vips: impl Iterator<Item = IpAddr>) -> Result<Duration> {
    let client = node.pod("client")?;
    let start = Instant::now();
    node.launch()?;
    wait_until_translated(&client, vips)?;
    let took = start.elapsed();
    node.wait_ready()?;
    Ok(took)
}

/// Connects a UDP socket to each of the addresses in turn, retrying until the address is translated.
pub(super) fn wait_until_translated(
    client: &Sandbox,
    vips: impl Iterator<Item = IpAddr>,
) -> Result<()> {
    let socket = UdpSocket::from(client.socket(Domain::IPV4, Type::DGRAM)?);
    let start = Instant::now();
    for vip in vips {
        let vip = SocketAddr::new(vip, PORT);
        while !is_translated(&socket, vip)? {
            let is_late = start.elapsed() > TIME_LIMIT;
            ensure!(!is_late, "{vip} isn't translated after {TIME_LIMIT:?}");
            clock::pause(CHECK_INTERVAL);
        }
    }
    Ok(())
}

fn is_translated(socket: &UdpSocket, vip: SocketAddr) -> Result<bool> {
    match socket.connect(vip) {
        // On kernels without `bpf_set_retval`, Culvert refuses a connection by redirecting it to loopback.
        Ok(()) => Ok(!socket.local_addr()?.ip().is_loopback()),
        Err(error) if UNTRANSLATED_ERRORS.contains(&error.kind()) => Ok(false),
        Err(error) => Err(error).with_context(|| format!("connect to {vip}")),
    }
}

/// Changes the probe's endpoint repeatedly; returns the cost of each change.
pub(super) fn measure_changes(node: &Node, changes: u32) -> Result<Vec<Change>> {
    let client = node.pod("client")?;
    let daemon = node.daemon_pid().context("the daemon doesn't run")?;
    let mut times = Vec::new();
    for number in 1..=changes.max(1) {
        let index = usize::try_from(number)? % PROBE_ENDPOINTS.len();
        let (_, source) = PROBE_ENDPOINTS[index];
        let before = process_usage::thread_cpu_time(daemon)?;
        let start = Instant::now();
        node.apply(probe_slice(index))?;
        wait::until(TIME_LIMIT, || has_source(&client, source).unwrap_or(false))
            .context("no connect reached the changed endpoint")?;
        let delay = start.elapsed();
        clock::pause(PAUSE);
        let cpu_time = process_usage::thread_cpu_time(daemon)?.saturating_sub(before);
        times.push(Change { delay, cpu_time });
    }
    Ok(times)
}

/// Returns true if a new socket connected to the probe Service has the given source address.
fn has_source(client: &Sandbox, source: Ipv4Addr) -> Result<bool> {
    let socket = UdpSocket::from(client.socket(Domain::IPV4, Type::DGRAM)?);
    socket.connect(PROBE)?;
    Ok(socket.local_addr()?.ip() == IpAddr::V4(source))
}

/// Stops the daemon and removes its pins and state.
pub(super) fn stop_and_clean_up(node: &Node) -> Result<()> {
    node.stop()?;
    let cleanup = node.culvert(&["cleanup"])?;
    let is_done = cleanup.exit.is_success();
    ensure!(is_done, "`culvert cleanup` failed: {cleanup:?}");
    Ok(())
}
