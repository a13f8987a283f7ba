//! Floods of packets against a map of flows with little room: they break no connection, and new ones come through after
//! them.

use std::{
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};
use socket2::{Domain, Socket, Type};
use tunnel_tests::{load_scale::LoadScale, sandbox::Sandbox, wait};

use super::{
    ENABLED, connect_to_node_port, exchange_stream,
    forged::{SYN, Segment, raw_socket},
    start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    migration::imitate_older_layout,
    service_addresses::{NODE_DNS, NODE_HTTP},
    support::{Dialer, HOST, ensure_eq},
};

/// The time limit for a new connection after a flood. Connections that are half-open give way at once.
const NEW_CONNECTION: Duration = Duration::from_secs(20);

#[test]
fn a_flood_of_datagrams_breaks_no_connection_and_new_ones_come_through() -> Result<()> {
    const FLOWS: u32 = 64;
    let scene = Scene::with(&["backend"], |settings| {
        ENABLED.clone_into(&mut settings.node_ports);
        settings.maps.flows = FLOWS;
    })?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    let connect = || connect_to_node_port(client, &backend);
    let open: Vec<_> = (0..FLOWS / 2).map(|_| connect()).collect::<Result<_>>()?;

    // The daemon sweeps nothing: the programs make room by themselves.
    scene.node.kill9()?;
    send_datagrams(client, 1_000)?;

    for (one, other) in &open {
        exchange_stream(one, other).context("an open connection")?;
    }
    let (one, other) = connect().context("a new connection")?;
    exchange_stream(&one, &other)?;
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `under_load` changes the map while flows begin, too"]
fn connections_begin_at_once_after_a_full_map_was_replaced_or_taken_over() -> Result<()> {
    const FLOWS: u32 = 256;
    let scene = Scene::with(&["backend"], |settings| {
        ENABLED.clone_into(&mut settings.node_ports);
        settings.maps.flows = FLOWS;
    })?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let (node, client) = (&scene.node, scene.node.outside());
    let resize = |flows| {
        node.resize(|settings| settings.maps.flows = flows)?;
        node.restart()
    };
    let upgrade = || {
        node.kill9()?;
        imitate_older_layout(node)?;
        node.start()
    };
    let changes: [(&str, &dyn Fn() -> Result<()>); 3] = [
        ("a smaller map", &|| resize(FLOWS / 8)),
        ("an older layout", &upgrade),
        ("a map that is smaller still", &|| resize(FLOWS / 16)),
    ];

    for (what, change) in changes {
        send_datagrams(client, 2 * FLOWS)?;
        change().context(what)?;
        for number in 0..8 {
            let connected = connect_to_node_port(client, &backend);
            let (one, other) = connected.with_context(|| format!("{what}, connection {number}"))?;
            exchange_stream(&one, &other)?;
        }
    }
    Ok(())
}

#[test]
fn more_connections_than_fit_and_a_flood_of_syns_break_no_open_connection() -> Result<()> {
    expect_no_broken_connection(ENABLED)
}

#[test]
#[ignore = "independent of the kernel: the test above has the same floods"]
fn floods_break_no_connection_with_links_of_pods_and_past_the_stack() -> Result<()> {
    for settings in ["packets: { links: all }", "packets: { delivery: redirect }"] {
        expect_no_broken_connection(settings).context(settings)?;
    }
    Ok(())
}

/// Floods a node with these settings, while the daemon runs and after it was killed.
fn expect_no_broken_connection(settings: &str) -> Result<()> {
    const FLOWS: u32 = 1024;
    const FURTHER: u32 = 5_000;
    const SYNS: u32 = 50_000;
    let scale = LoadScale::from_environment();
    let flows = scale.count(FLOWS);
    let scene = Scene::with(&[], |instance| {
        settings.clone_into(&mut instance.node_ports);
        instance.maps.flows = flows;
    })?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    // The answers to forged senders lead nowhere.
    client.ip("route add unreachable 198.18.0.0/15\n")?;
    let connect = || connect_to_node_port(client, &backend);
    let open: Vec<_> = (0..flows / 2).map(|_| connect()).collect::<Result<_>>()?;
    let expect_open = |when: &str| -> Result<()> {
        for (number, (one, other)) in open.iter().enumerate() {
            exchange(one, other).with_context(|| format!("connection {number}, {when}"))?;
        }
        Ok(())
    };

    for is_dead in [false, true] {
        if is_dead {
            scene.node.kill9()?;
        }
        let mut further = Vec::new();
        for _ in 0..scale.count(FURTHER) {
            further.push(begin_connect(client.socket(Domain::IPV4, Type::STREAM)?)?);
        }
        expect_open("with more connections than fit")?;
        drop(further);
        // Those that were accepted must not be taken for the new connections below.
        backend.tcp[0].set_nonblocking(true)?;
        while backend.tcp[0].accept().is_ok() {}
        backend.tcp[0].set_nonblocking(false)?;
        let raw = raw_socket(client)?;
        for number in 0..scale.count(SYNS) {
            send_syn(&raw, number)?;
        }
        expect_open("with a flood of SYNs")?;
        wait::until(NEW_CONNECTION, || connect().is_ok())
            .with_context(|| format!("no new connection, daemon dead: {is_dead}"))?;
        expect_open("in the end")?;
    }
    ensure_eq("left", open.len(), usize::try_from(flows / 2)?)
}

/// Sends datagrams to the node port, each from a socket of its own.
fn send_datagrams(client: &Sandbox, number: u32) -> Result<()> {
    let dialers = [Dialer::V4, Dialer::V6].into_iter().cycle();
    for (_, dialer) in (0..number).zip(dialers) {
        let socket = dialer.udp_socket(client)?;
        socket.send_to(b"flood", dialer.address(HOST, NODE_DNS))?;
    }
    Ok(())
}

/// Exchanges a byte in each direction.
fn exchange(one: &TcpStream, other: &TcpStream) -> Result<()> {
    use std::io::{Read as _, Write as _};
    for (mut from, mut to) in [(one, other), (other, one)] {
        from.write_all(&[1])?;
        to.read_exact(&mut [0])?;
    }
    Ok(())
}

/// Begins to connect to the node port, and does not wait for the outcome.
fn begin_connect(socket: Socket) -> Result<Socket> {
    socket.set_nonblocking(true)?;
    // Closing it sends a reset, so that its port is free at once.
    socket.set_linger(Some(Duration::ZERO))?;
    // It is in progress, or was refused already.
    drop(socket.connect(&Dialer::V4.address(HOST, NODE_HTTP).into()));
    Ok(socket)
}

/// Sends a SYN to the node port from one of many forged addresses.
fn send_syn(raw: &Socket, number: u32) -> Result<()> {
    let [_, upper, middle, lower] = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
    let from = Ipv4Addr::new(198, 18 + (upper & 1), middle, lower);
    let port = 1024 + u16::try_from(number % 60_000)?;
    let segment = Segment {
        from: SocketAddrV4::new(from, port),
        to: SocketAddrV4::new(HOST.v4, NODE_HTTP),
        flags: SYN,
        sequence: number,
        acknowledged: 0,
        is_damaged: false,
    };
    segment.send(raw);
    Ok(())
}
