//! An attacker outside the node, or a user of the node, floods the health port, while the kubelet probes it.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write as _},
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sched::{CloneFlags, setns},
    unistd::{Uid, setfsuid},
};
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
/// A user without privileges.
const USER: u32 = 1000;
/// The number of connections that each thread keeps open.
const OPEN: usize = 400;
/// The time limit for a probe. This is the default of a kubelet's `timeoutSeconds`.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of probes from the node during the flood.
const PROBES: u32 = 1500;

/// A flood of connections to the health port.
#[derive(Clone, Copy)]
struct Flood<'a> {
    sandbox: &'a Sandbox,
    to: SocketAddr,
    /// The user who opens the connections.
    user: u32,
    /// True if a request is sent over each connection.
    sends_requests: bool,
    /// The number of connections that each thread opens per millisecond.
    per_millisecond: u64,
}

impl Flood<'_> {
    /// Opens connections until `stop` is true. Each new connection replaces the oldest one.
    fn run(self, stop: &AtomicBool, opened: &AtomicU64) -> Result<()> {
        // Only this thread enters the network namespace, and takes the user's id for its sockets.
        let namespace = File::open(format!("/proc/{}/ns/net", self.sandbox.pid()))?;
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        setfsuid(Uid::from_raw(self.user));
        let mut open = VecDeque::with_capacity(OPEN);
        let (started, mut own) = (Instant::now(), 0);
        while !stop.load(Ordering::Relaxed) {
            open.push_back(self.open()?);
            opened.fetch_add(1, Ordering::Relaxed);
            own += 1;
            while u128::from(own / self.per_millisecond) > started.elapsed().as_millis() {
                pause(Duration::from_micros(200));
            }
            if open.len() > OPEN {
                open.pop_front();
            }
        }
        Ok(())
    }

    fn open(self) -> Result<Socket> {
        let socket = Socket::new(Domain::for_address(self.to), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        // A reset leaves no port in the state TIME_WAIT.
        socket.set_linger(Some(Duration::ZERO))?;
        match socket.connect(&self.to.into()) {
            Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => {
                return Err(error).context("connect");
            }
            Ok(()) | Err(_) => {}
        }
        if self.sends_requests {
            // On loopback, the connection is open, unless the listener's queue is full.
            drop((&socket).write(b"GET /livez HTTP/1.1\r\nHost: lab\r\n\r\n"));
        }
        Ok(socket)
    }
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

/// Probes the daemon from the node during a flood. The log must name the attacker.
fn expect_probes_during(scene: &Scene, flood: Flood<'_>, attacker: &str) -> Result<()> {
    let (stop, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let slowest = thread::scope(|threads| {
        let attackers: Vec<_> = (0..THREADS)
            .map(|_| threads.spawn(|| flood.run(&stop, &opened)))
            .collect();
        let attacked = || -> Result<Duration> {
            wait::until(CHANGE_TIMEOUT, || opened.load(Ordering::Relaxed) > 10_000)?;
            probe(scene, HOST.ips())
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
    ensure!(
        logs.contains("opens too many connections") && logs.contains(attacker),
        "the log doesn't name {attacker}:\n{logs}"
    );
    scene.expect_served(WEB, "backend")
}

#[test]
#[ignore = "independent of the kernel: the daemon counts connections, and every kernel runs the filter"]
fn probes_from_the_node_succeed_during_a_flood_of_connections_from_outside() -> Result<()> {
    for (ip, attacker) in [
        (HOST.v4.into(), format!("client={OUTSIDE_V4}")),
        (HOST.v6.into(), "client=2001:db8::".to_owned()),
    ] {
        let scene = Scene::web(&["backend"])?;
        let flood = Flood {
            sandbox: scene.node.outside(),
            to: SocketAddr::new(ip, PORT),
            user: 0,
            sends_requests: false,
            per_millisecond: 30,
        };
        expect_probes_during(&scene, flood, &attacker)?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon counts and closes connections"]
fn probes_from_the_node_succeed_during_a_flood_of_requests_from_a_user_of_the_node() -> Result<()> {
    for ip in HOST.ips() {
        let scene = Scene::web(&["backend"])?;
        let flood = Flood {
            sandbox: scene.node.host(),
            to: SocketAddr::new(ip, PORT),
            user: USER,
            sends_requests: true,
            per_millisecond: 4,
        };
        expect_probes_during(&scene, flood, &format!("client=user {USER} of this node"))?;
    }
    Ok(())
}
