//! An attacker outside the node floods the health port with connections, while the kubelet probes it.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};
use socket2::{Domain, Socket, Type};
use tunnel_tests::{
    clock::{Instant, pause},
    load_scale::LoadScale,
    node_network::OUTSIDE_V4,
    sandbox::Sandbox,
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    support::{CHANGE_TIMEOUT, HOST, ensure_eq, http_get},
};

const PORT: u16 = 10_256;
/// The number of threads that open connections.
const THREADS: usize = 2;
/// The number of connections that each thread opens per millisecond.
const PER_MILLISECOND: u64 = 30;
/// The number of connections that each thread keeps open.
const OPEN: usize = 400;
/// The time limit for a probe. This is the default of a kubelet's `timeoutSeconds`.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of probes from the node during the flood.
const PROBES: u32 = 3000;

/// Opens connections from a sandbox, and never sends a request over them, until `stop` is true. Each new
/// connection replaces the oldest one.
fn flood(sandbox: &Sandbox, to: SocketAddr, stop: &AtomicBool, opened: &AtomicU64) -> Result<()> {
    // Only this thread enters the network namespace.
    let namespace = File::open(format!("/proc/{}/ns/net", sandbox.pid()))?;
    setns(namespace, CloneFlags::CLONE_NEWNET)?;
    let mut open = VecDeque::with_capacity(OPEN);
    let (started, mut own) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        // A reset leaves no port in the state TIME_WAIT.
        socket.set_linger(Some(Duration::ZERO))?;
        match socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => {
                return Err(error).context("connect");
            }
            Ok(()) | Err(_) => {}
        }
        opened.fetch_add(1, Ordering::Relaxed);
        own += 1;
        while u128::from(own / PER_MILLISECOND) > started.elapsed().as_millis() {
            pause(Duration::from_micros(200));
        }
        open.push_back(socket);
        if open.len() > OPEN {
            open.pop_front();
        }
    }
    Ok(())
}

/// Probes the daemon from the node, as the kubelet does. Returns the duration of the slowest probe.
fn probe(scene: &Scene, ips: [IpAddr; 2]) -> Result<Duration> {
    let mut slowest = Duration::ZERO;
    for (number, ip) in (0..LoadScale::from_environment().count(PROBES)).zip(ips.iter().cycle()) {
        let before = Instant::now();
        let (status, body) = http_get(scene.node.host(), SocketAddr::new(*ip, PORT), "/livez")
            .with_context(|| format!("probe {number} at {ip} after {:?}", before.elapsed()))?;
        ensure_eq("status", status, 200).context(body)?;
        slowest = slowest.max(before.elapsed());
    }
    Ok(slowest)
}

#[test]
fn probes_from_the_node_succeed_during_a_flood_of_connections_from_outside() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let target = SocketAddr::new(HOST.v4.into(), PORT);
    let (stop, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let slowest = thread::scope(|threads| {
        let attackers: Vec<_> = (0..THREADS)
            .map(|_| threads.spawn(|| flood(scene.node.outside(), target, &stop, &opened)))
            .collect();
        let attacked = || -> Result<Duration> {
            wait::until(CHANGE_TIMEOUT, || opened.load(Ordering::Relaxed) > 10_000)?;
            probe(&scene, HOST.ips())
        };
        let result = attacked();
        stop.store(true, Ordering::Relaxed);
        for attacker in attackers {
            attacker
                .join()
                .map_err(|_panic| io::Error::other("a thread panicked"))??;
        }
        result
    })?;
    let limit = LoadScale::from_environment().timeout(PROBE_TIMEOUT);
    ensure!(slowest < limit, "the slowest probe took {slowest:?}");
    let logs = scene.node.logs();
    let attacker = format!("client={OUTSIDE_V4}");
    ensure!(
        logs.contains("opens too many connections") && logs.contains(&attacker),
        "the log doesn't name {attacker}:\n{logs}"
    );
    scene.expect_served(WEB, "backend")
}
