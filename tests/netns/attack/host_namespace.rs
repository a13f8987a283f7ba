//! A pod whose sockets have the daemon's mark tries to be taken for the host while the daemon starts.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use nix::errno::Errno;
use socket2::{Domain, Type};
use tunnel_tests::{
    load_scale::LoadScale,
    manifest::Protocol,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    service_addresses::LOOPBACK,
    support::{CHANGE_TIMEOUT, Dialer, HTTP, HTTP_TARGET, ensure_eq, errno, maps_directory},
};

/// The daemon's mark, as in the default config.
const MARK: u32 = 0x1_0000;

/// The address and port that the daemon dials so that the programs learn the host's network namespace.
const PROBE: ([u8; 4], u16) = ([192, 0, 0, 8], 9);

const NODE_PORT: u16 = 30_080;

/// The number of times the daemon is restarted.
const RESTARTS: u32 = 8;

/// Dials the daemon's probe from a sandbox as fast as possible until `stop` is set, from a socket that has the
/// daemon's mark.
fn imitate_daemon(sandbox: &Sandbox, stop: &AtomicBool, attempts: &AtomicU64) -> Result<()> {
    let socket = sandbox.socket(Domain::IPV4, Type::STREAM)?;
    socket.set_mark(MARK)?;
    // From a loopback address, the probe's address has no route. The connect() therefore fails at once, and can be
    // repeated on the same socket.
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    let probe = SocketAddr::from(PROBE).into();
    while !stop.load(Ordering::Relaxed) {
        let connected = socket.connect(&probe);
        ensure!(connected.is_err(), "connected to the probe");
        attempts.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Starts a node with a Service that has a node port.
fn start() -> Result<Scene> {
    let scene = Scene::with(&["backend"], |settings| {
        settings.test_connections = Some("2500ms");
    })?;
    let service = WEB.service("web").of_type("NodePort");
    let service = service.port(Protocol::TCP, HTTP + 1, HTTP_TARGET);
    let service = service.node_port(NODE_PORT);
    scene.configure_bpf("checkInterval: 500ms")?;
    scene.start([service.backends(scene.all_addresses())])?;
    expect_only_host_has_node_port(&scene)?;
    Ok(scene)
}

/// Asserts that the host has the Service's node port on loopback, and that the client pod doesn't.
fn expect_only_host_has_node_port(scene: &Scene) -> Result<()> {
    for dialer in [Dialer::V4, Dialer::V6] {
        dialer
            .dial(scene.node.host(), LOOPBACK, NODE_PORT)
            .with_context(|| format!("{dialer:?} from the host"))?;
        let socket = dialer.tcp_socket(&scene.client)?;
        let to = dialer.address(LOOPBACK, NODE_PORT);
        let refused = errno(connect_within(&socket, to, RESPONSE_TIMEOUT));
        ensure_eq("error in the pod", refused, Errno::ECONNREFUSED)?;
    }
    Ok(())
}

#[test]
fn a_wrong_cookie_of_the_hosts_namespace_is_repaired() -> Result<()> {
    let scene = start()?;
    let pin = scene.node.bpffs().join(maps_directory("/host"));
    let map = Map::Array(MapData::from_pin(pin)?);
    let mut host: Array<MapData, u64> = map.try_into()?;
    let right = host.get(&0, 0)?;

    host.set(0, right + 1, 0)?;

    wait::until(CHANGE_TIMEOUT, || {
        host.get(&0, 0).is_ok_and(|cookie| cookie == right)
    })?;
    expect_only_host_has_node_port(&scene)?;
    let logs = scene.node.logs();
    ensure!(
        logs.contains("cookie of another network namespace"),
        "{logs}"
    );
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the order in which the daemon writes and attaches"]
fn a_pod_with_the_daemons_mark_does_not_become_the_host_while_the_daemon_starts() -> Result<()> {
    let scene = start()?;
    let (stop, attempts) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let attackers: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| imitate_daemon(&scene.client, &stop, &attempts)))
            .collect();
        let restarts = || {
            for restart in 0..LoadScale::from_environment().count(RESTARTS).max(3) {
                scene.node.restart()?;
                expect_only_host_has_node_port(&scene)
                    .with_context(|| format!("after restart {restart}"))?;
            }
            Ok(())
        };
        let result: Result<()> = restarts();
        stop.store(true, Ordering::Relaxed);
        for attacker in attackers {
            attacker.join().ok().context("an attacker panicked")??;
        }
        result
    })?;

    ensure!(
        attempts.into_inner() > 100_000,
        "the attackers made too few attempts"
    );
    Ok(())
}
