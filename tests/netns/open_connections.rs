//! Tests that the kernel programs count the open connections to each backend exactly, for every kind of
//! socket, and even if the process that owns a socket is killed.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Protocol as Transport, Type};
use tunnel_tests::{
    feature::{self, Feature},
    load_scale::LoadScale,
    manifest::Protocol,
    node::Node,
    sandbox::{Process, RESPONSE_TIMEOUT, Sandbox, connect_within},
    shared_fixture::SharedFixture,
    test_name, wait,
};

use crate::{
    counters::until_released,
    fixture::{OTHER, Scene, WEB},
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HTTP, HTTP_TARGET, Vip, count_during, ensure_eq,
        http_server_name, ports, query, query_to, run, until_eq,
    },
};

/// A port of the Service `other` whose target port has no listener.
const CLOSED: u16 = 81;

static SCENE: SharedFixture<Scene> = SharedFixture::new(|| set_up()?.record_manifests());

/// Starts a node with the Service `web`, which has three backends, and `other`, which has one.
pub(crate) fn set_up() -> Result<Scene> {
    let scene = Scene::new(&["one", "two", "three", "other"])?;
    let web = WEB
        .service("web")
        .backends(scene.addresses_without("other"));
    let other = OTHER.service("other").port(Protocol::TCP, CLOSED, 9);
    scene.start([web, other.backends(scene.addresses(&["other"])?)])?;
    Ok(scene)
}

/// Waits until exactly `web` and `other` connections are counted for these two Services, and none for any
/// other.
fn until_counts(scene: &Scene, web: u64, other: u64) -> Result<()> {
    let sum = |name| -> Result<u64> { Ok(open_connections(&scene.node, name)?.values().sum()) };
    until_eq("at web, other, and all", (web, other, web + other), || {
        Ok((sum("web")?, sum("other")?, total_connections(&scene.node)?))
    })
}

/// Returns how many connections are open to all backends together.
pub(crate) fn total_connections(node: &Node) -> Result<u64> {
    let status = node.status()?;
    status["openConnections"]
        .as_u64()
        .context("the status has no field openConnections")
}

/// Returns how many connections are open to each of a Service's endpoints.
pub(crate) fn open_connections(node: &Node, name: &str) -> Result<BTreeMap<SocketAddr, u64>> {
    let mut open = BTreeMap::new();
    for port in ports(&node.services()?, name) {
        for endpoint in port["endpoints"].as_array().into_iter().flatten() {
            let at: SocketAddr = endpoint["endpoint"]
                .as_str()
                .context("an endpoint without an address")?
                .parse()?;
            if let Some(count) = endpoint["openConnections"].as_u64() {
                *open.entry(at).or_default() += count;
            }
        }
    }
    Ok(open)
}

/// Creates a UDP socket and sends a query to `web` on it. Returns the socket and the name of the server that
/// replies.
fn query_web(sandbox: &Sandbox, dialer: Dialer, is_connected: bool) -> Result<(UdpSocket, String)> {
    let socket = dialer.udp_socket(sandbox)?;
    let name = if is_connected {
        socket.connect(dialer.address(WEB, DNS))?;
        query(&socket)?
    } else {
        query_to(&socket, dialer.address(WEB, DNS))?;
        query_to(&socket, dialer.address(WEB, DNS))?.0
    };
    Ok((socket, name))
}

#[test]
fn a_socket_counts_at_its_backend_from_the_connect_or_first_datagram_to_the_close() -> Result<()> {
    const EACH: u64 = 12;
    let scene = SCENE.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        for is_connected in [true, false] {
            let asked = (0..EACH).map(|_| query_web(sandbox, dialer, is_connected));
            let asked = asked.collect::<Result<Vec<_>>>()?;
            let mut expected = BTreeMap::new();
            for (_, name) in &asked {
                let ip = scene.backend(name)?.address(dialer.family());
                let at = SocketAddr::new(ip, DNS_TARGET);
                *expected.entry(at).or_default() += 1;
            }
            let mut counts = open_connections(&scene.node, "web")?;
            counts.retain(|_, count| *count > 0);
            ensure_eq("counts", counts, expected)?;
            drop(asked);
            until_counts(&scene, 0, 0)?;
        }
        Ok(())
    })?;
    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let connect = |_| dialer.connect(sandbox, WEB, HTTP);
        let mut held = (0..EACH).map(connect).collect::<Result<Vec<_>, _>>()?;
        until_counts(&scene, EACH, 0)?;
        http_server_name(held.pop().context("no stream is open")?)?;
        until_counts(&scene, EACH - 1, 0)?;
        drop(held);
        until_counts(&scene, 0, 0)
    })?;
    scene.give_back()
}

#[test]
fn a_second_connect_moves_the_count() -> Result<()> {
    let scene = SCENE.lease()?;
    let other = scene.node.pod("other")?;

    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(&scene.client)?;
        for _ in 0..3 {
            socket.connect(dialer.address(WEB, DNS))?;
            until_counts(&scene, 1, 0)?;
            socket.connect(dialer.address(OTHER, DNS))?;
            until_counts(&scene, 0, 1)?;
            // A repeated connect() to the same VIP is not counted again.
            socket.connect(dialer.address(OTHER, DNS))?;
            until_counts(&scene, 0, 1)?;
        }
        // A connection made directly to the pod is not counted for any Service.
        socket.connect(dialer.address(Vip::of_pod(&other), DNS_TARGET))?;
        until_counts(&scene, 0, 0)?;
        drop(socket);
        until_counts(&scene, 0, 0)?;
    }
    for dialer in Dialer::TCP {
        let socket = dialer.tcp_socket(&scene.client)?;
        let refused = connect_within(&socket, dialer.address(OTHER, CLOSED), RESPONSE_TIMEOUT);
        ensure!(refused.is_err(), "something listens on port {CLOSED}");
        until_counts(&scene, 0, 1)?;
        connect_within(&socket, dialer.address(WEB, HTTP), RESPONSE_TIMEOUT)?;
        until_counts(&scene, 1, 0)?;
        drop(socket);
        until_counts(&scene, 0, 0)?;
    }
    scene.give_back()
}

#[test]
fn a_socket_that_sends_to_several_services_counts_at_the_last() -> Result<()> {
    let scene = SCENE.lease()?;

    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(&scene.client)?;
        for number in 0..20 {
            let (vip, web) = if number % 3 == 0 {
                (OTHER, 0)
            } else {
                (WEB, 1)
            };
            query_to(&socket, dialer.address(vip, DNS))?;
            until_counts(&scene, web, 1 - web)?;
        }
        drop(socket);
        until_counts(&scene, 0, 0)?;
    }
    scene.give_back()
}

#[test]
fn threads_that_send_on_one_socket_at_once_count_it_once() -> Result<()> {
    let scene = SCENE.lease()?;
    let times = LoadScale::from_environment().count(2000);

    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(&scene.client)?;
        // Two threads each send to both Services on the same socket, while this thread connects it to them in
        // turn.
        let [web, other] = [WEB, OTHER].map(|vip| dialer.address(vip, DNS));
        thread::scope(|scope| {
            let send = |order: [SocketAddr; 2]| {
                for to in order.into_iter().cycle().take(usize::try_from(times)?) {
                    socket.send_to(b"at once", to)?;
                }
                anyhow::Ok(())
            };
            let senders =
                [[web, other], [other, web]].map(|order| scope.spawn(move || send(order)));
            for number in 0..times / 10 {
                socket.connect(if number % 2 == 0 { web } else { other })?;
            }
            for sender in senders {
                sender.join().ok().context("a sender panicked")??;
            }
            anyhow::Ok(())
        })?;

        socket.connect(web)?;
        until_counts(&scene, 1, 0)?;
        drop(socket);
        until_counts(&scene, 0, 0)?;
    }
    scene.give_back()
}

#[test]
fn a_socket_without_memory_for_its_storage_is_not_counted() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::OwnOptmem])? {
        return Ok(());
    }
    let scene = SCENE.lease()?;
    let room = "net.core.optmem_max";
    let before = run(&scene.client, "cat /proc/sys/net/core/optmem_max")?;

    for dialer in Dialer::UDP {
        let socket = dialer.connect_udp(&scene.client, WEB, DNS)?;
        until_counts(&scene, 1, 0)?;
        scene.client.sysctl(room, "1")?;
        // The old socket storage is deleted, but no new storage can be allocated.
        let moved = socket.connect(dialer.address(OTHER, DNS));
        ensure!(moved.is_err(), "the kernel had memory for socket storage");
        until_counts(&scene, 0, 0)?;
        let tcp = Dialer::V6.connect(&scene.client, WEB, HTTP)?;
        until_counts(&scene, 0, 0)?;
        scene.client.sysctl(room, before.trim())?;
        drop(tcp);
        socket.connect(dialer.address(OTHER, DNS))?;
        until_counts(&scene, 0, 1)?;
        drop(socket);
        until_counts(&scene, 0, 0)?;
    }
    scene.give_back()
}

/// Starts a process that opens and closes `before` sockets, then opens `each` sockets of every kind to `web`
/// and keeps these open.
fn hold_open(sandbox: &Sandbox, each: u32, before: u32, log: Option<File>) -> Result<Process> {
    let mut command = sandbox.lab_command(&["load", "hold"])?;
    command = command.option("--each", each).option("--before", before);
    for dialer in [Dialer::V4, Dialer::V6, Dialer::Mapped] {
        command = command.option("--tcp", dialer.address(WEB, HTTP));
        command = command.option("--udp", dialer.address(WEB, DNS));
    }
    if let Some(log) = log {
        command = command.log(log);
    }
    command.start()
}

/// The number of different sockets in [`hold_open`]: for each of three dialers, a TCP socket, a connected UDP
/// socket and an unconnected UDP socket.
const KINDS: u32 = 9;

#[test]
fn sockets_of_killed_processes_are_no_longer_counted_even_without_a_daemon() -> Result<()> {
    let scene = SCENE.lease()?;
    let node = &scene.node;
    let each = LoadScale::from_environment().count(120);
    let held = u64::from(each * KINDS);
    let before = until_released(node)?;

    let holders = [
        hold_open(&scene.client, each, 0, None)?,
        hold_open(node.host(), each, 0, None)?,
        hold_open(&scene.client, each, 0, None)?,
    ];
    until_counts(&scene, 3 * held, 0)?;
    let [first, second, third] = holders;
    drop(first);
    until_counts(&scene, 2 * held, 0)?;
    node.kill9()?;
    drop(second);
    let fourth = hold_open(node.host(), each, 0, None)?;
    node.start()?;
    until_counts(&scene, 2 * held, 0)?;
    node.kill9()?;
    drop((third, fourth));
    node.start()?;
    until_counts(&scene, 0, 0)?;
    // Each of these sockets was released exactly once, and so was the probe socket that the daemon opened at
    // each of its two starts.
    let tracked = until_released(node)? - before - 4 * held;
    ensure_eq("probe sockets", tracked, 2)?;
    scene.give_back()
}

/// Returns how many sockets in a sandbox's `/proc/net` tables have each peer. The peer of an unconnected
/// socket is the unspecified address with port 0.
fn sockets_by_peer(sandbox: &Sandbox) -> Result<BTreeMap<SocketAddr, u64>> {
    let mut listed = BTreeMap::new();
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let text = sandbox.run(&["cat", &format!("/proc/net/{table}")])?;
        for line in text.lines().skip(1) {
            let mut words = line.split_whitespace().skip(2);
            let (peer, state) = words
                .next()
                .zip(words.next())
                .with_context(|| format!("no peer and state in {line:?}"))?;
            let peer = peer_of(peer).with_context(|| format!("no address in {line}"))?;
            // Skip sockets in the states LISTEN and TIME_WAIT.
            if !["0A", "06"].contains(&state) {
                *listed.entry(peer).or_default() += 1;
            }
        }
    }
    Ok(listed)
}

/// Parses an address in the format of `/proc/net`: 32-bit words in memory order, written in hexadecimal.
fn peer_of(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(address.get(at..at + 8)?, 16).ok();
    let mut octets = Vec::new();
    for at in (0..address.len()).step_by(8) {
        octets.extend(word(at)?.to_ne_bytes());
    }
    let ip = match <[u8; 4]>::try_from(octets.as_slice()) {
        Ok(octets) => IpAddr::from(octets),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(octets).ok()?).to_canonical(),
    };
    Some((ip, u16::from_str_radix(port, 16).ok()?).into())
}

/// Compares the numbers of open connections with the sockets that the kernel lists.
fn compare_with_listed(node: &Node, sandboxes: &[&Sandbox]) -> Result<()> {
    let mut all = BTreeMap::new();
    for sandbox in sandboxes {
        for (peer, count) in sockets_by_peer(sandbox)? {
            *all.entry(peer).or_default() += count;
        }
    }
    let counts = open_connections(node, "web")?;
    let mut unconnected = 0;
    for (at, count) in &counts {
        let connected = all.get(at).copied().unwrap_or(0);
        // In the kernel's tables, unconnected sockets have no peer.
        let rest = count.checked_sub(connected);
        unconnected += rest.with_context(|| format!("{at}: {count} of {connected}"))?;
        ensure!(
            at.port() != HTTP_TARGET || rest == Some(0),
            "{at}: {count} of {connected}"
        );
    }
    ensure_eq("unconnected", unconnected, 2 * 20 * 3)
}

#[test]
fn after_a_hundred_thousand_sockets_the_counts_equal_those_of_the_sockets_that_the_kernel_lists()
-> Result<()> {
    const SOCKETS: u32 = 100_000;
    let scene = SCENE.lease()?;
    let before = LoadScale::from_environment().count(SOCKETS / 2);
    let sandboxes = [&**scene.client, scene.node.host()];

    let directory = scene.node.network().lab().directory();
    let logs = ["pod.log", "host.log"].map(|name| directory.join(name));
    let mut holders = Vec::new();
    for (sandbox, log) in sandboxes.into_iter().zip(&logs) {
        holders.push(hold_open(sandbox, 20, before, Some(File::create(log)?))?);
    }
    // Each process logs a line once it has opened all the sockets that it keeps open.
    let is_done = |log| fs::read_to_string(log).is_ok_and(|text| text.contains("sockets"));
    wait::until(6 * CHANGE_TIMEOUT, || logs.iter().all(is_done))
        .context("the processes are still opening sockets")?;

    // Sockets that were closed last may still be counted, or listed.
    let mut difference = Ok(());
    wait::until(CHANGE_TIMEOUT, || {
        difference = compare_with_listed(&scene.node, &sandboxes);
        difference.is_ok()
    })
    .or(difference)?;
    until_counts(&scene, 2 * 20 * u64::from(KINDS), 0)?;

    drop(holders);
    until_counts(&scene, 0, 0)?;
    scene.give_back()
}

#[test]
fn multipath_tcp_is_translated_and_its_inner_sockets_are_not_counted() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Mptcp])? {
        return Ok(());
    }
    let scene = SCENE.lease()?;
    let reasons = ["translated_kernel", "translated", "socket_tracked"];

    for (from, sandbox) in scene.sandboxes() {
        for (domain, dialer) in [(Domain::IPV4, Dialer::V4), (Domain::IPV6, Dialer::V6)] {
            let socket = sandbox.socket_with_protocol(domain, Type::STREAM, Transport::MPTCP)?;
            socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
            let connect = || {
                Ok(connect_within(
                    &socket,
                    dialer.address(WEB, HTTP),
                    RESPONSE_TIMEOUT,
                )?)
            };
            let ((), increases) = count_during(&scene.node, &reasons, connect)?;
            ensure_eq(&format!("{from}, {dialer:?}"), increases, vec![1, 0, 0])?;
            until_counts(&scene, 0, 0)?;
            let server = http_server_name(socket.into())?;
            ensure!(["one", "two", "three"].contains(&&*server), "{server}");
            until_counts(&scene, 0, 0)?;
        }
    }
    scene.give_back()
}
