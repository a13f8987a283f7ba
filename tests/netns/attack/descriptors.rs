//! Clients of the ingress use up the file descriptors of a daemon that may open few files.

#![expect(
    clippy::print_stdout,
    reason = "prints how long a change of a Service took, and how many files the daemon has open"
)]

use std::{
    fs,
    io::{ErrorKind, Read as _},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::Instant,
    culvert_instance::InstanceSettings,
    load_scale::LoadScale,
    process_usage,
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::support::{
    CHANGE_TIMEOUT, Dialer, HOST, HTTP, Vip, addresses, ensure_eq, http_get, serve,
};

/// The daemon's limit on open files, of which half are reserved. Clients may have three quarters of the others.
const OPEN_FILES: usize = 512;
const SHARE: usize = 192;
const ATTEMPTS: usize = 600;
/// The time limit for a change of a Service, in a dev build.
const EFFECT_LIMIT: Duration = Duration::from_millis(500);
const HEALTH_PORT: u16 = 10_256;
const WEB: Vip = Vip::of(10);

#[test]
#[ignore = "independent of the kernel: the daemon reserves file descriptors"]
fn services_are_programmed_while_clients_use_up_the_file_descriptors() -> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    let node = testbed.node();
    let command = ["prlimit".to_owned(), format!("--nofile={OPEN_FILES}")];
    node.launch_with(&command)?;
    node.wait_ready()?;
    testbed.edge().start_agent(KUBELET_PORTS)?;
    testbed.wait_for_kubelet()?;
    let pods = [node.pod("one")?, node.pod("two")?];
    let servers = [serve(&pods[0])?, serve(&pods[1])?];
    node.apply(WEB.service("web").backends(addresses(&[&pods[0]])))?;
    let served_by = |name: &str| {
        let answer = Dialer::V4.dial(node.host(), WEB, HTTP);
        answer.is_ok_and(|server| server == name)
    };
    wait::until(CHANGE_TIMEOUT, || served_by("one")).context("the Service isn't served")?;
    let pid = node.daemon_pid().context("no daemon runs")?;
    println!("own files: {}", process_usage::open_files(pid)?);

    // Clients on the host itself have no other limit.
    let target = TunnelTestbed::addr_v4(KUBELET_PORTS[1]);
    let mut held = Vec::new();
    for _ in 0..ATTEMPTS {
        // The ingress may reset the connection before connect() returns.
        if let Ok(stream) = node.host().connect(target) {
            stream.set_nonblocking(true)?;
            held.push(stream);
        }
    }
    let open = || {
        let is_open = |mut stream: &std::net::TcpStream| matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        held.iter().filter(|stream| is_open(stream)).count()
    };
    wait::until(CHANGE_TIMEOUT, || open() == SHARE)
        .with_context(|| format!("{} connections are open", open()))?;
    println!("files beside clients: {}", process_usage::open_files(pid)?);

    let start = Instant::now();
    node.apply(WEB.service("web").backends(addresses(&[&pods[1]])))?;
    wait::until(CHANGE_TIMEOUT, || served_by("two")).context("the change isn't programmed")?;
    let took = start.elapsed();
    println!("a change of a Service took {took:?}");
    ensure!(took < LoadScale::from_environment().timeout(EFFECT_LIMIT));

    let health = SocketAddr::new(HOST.v4.into(), HEALTH_PORT);
    ensure_eq("code", http_get(node.host(), health, "/healthz")?.0, 200)?;
    let guard = fs::read_dir(node.bpffs().join("links"))?.flatten();
    let guard = guard.map(|entry| entry.path());
    let guard = guard
        .filter(|path| path.to_string_lossy().contains("guard-"))
        .collect::<Vec<_>>();
    ensure!(!guard.is_empty(), "no uplink is guarded");
    for pin in &guard {
        fs::remove_file(pin)?;
    }
    let is_back = || guard.iter().all(|pin| pin.exists());
    wait::until(CHANGE_TIMEOUT, is_back).context("the guard isn't put again")?;

    let status = node.culvert(&["status"])?.stdout;
    let warning = format!("the process may open {OPEN_FILES} files");
    ensure!(
        status.contains(&warning) && status.contains("tunnel.gateway.maxSessions"),
        "{status}"
    );
    ensure!(node.reason_count("descriptor_limit")? > 0);
    ensure_eq("clients", open(), SHARE)?;
    drop(servers);
    Ok(())
}
