//! Tests in which an end of the tunnel with a valid certificate sends hostile frames.
#![expect(clippy::print_stdout, reason = "prints the memory that it limits")]

use std::{
    net::{SocketAddr, TcpListener},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    hostile_peer::{HostilePeer, frame, frame_type, interim_response},
    pki::Validity,
    process_usage, wait,
};

use crate::{
    fixture::{ANSWER, Tunnel, TunnelSettings, echo, expect_fast_echoes, expect_reset},
    targets::{Behaviour, Server},
};

/// The node whose key was stolen.
const NODE: &str = "hostile";
/// A target on that node. Nothing listens there, because no agent dials it.
const TARGET: &str = "127.0.0.1:10250";
/// The memory that one hostile session may cost.
const MEMORY_LIMIT: u64 = 32 << 20;
/// The number of bytes after which a hostile end stops.
const FLOOD: usize = 64 << 20;

/// Starts a tunnel with an honest node `a` and without an agent for the hostile node. Returns the tunnel, a
/// connection to the echo server on the honest node, and that server.
fn start() -> Result<(Tunnel, std::net::TcpStream, Server)> {
    let server = Server::start(Behaviour::Echo)?;
    let target = TARGET.parse()?;
    let nodes = vec![("a", vec![server.at()]), (NODE, vec![target])];
    let mut tunnel = TunnelSettings::nodes(nodes).without_agents()?;
    tunnel.start_agent("a")?;
    let files = tunnel.files(NODE);
    let pair = tunnel.authority().agent(NODE, Validity::Current)?;
    files.write(&tunnel.authority().pem(), &pair)?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    Ok((tunnel, live, server))
}

/// Connects the hostile agent.
fn connect_agent(tunnel: &Tunnel) -> Result<HostilePeer> {
    let mut agent = HostilePeer::agent(tunnel.gateway(), &tunnel.files(NODE))?;
    agent.answer_hello()?;
    let connected = || tunnel.record().is_ok_and(|it| it.sessions(NODE) > 0);
    wait::until(ANSWER, connected).context("the hostile agent is not connected")?;
    Ok(agent)
}

/// Runs an attack on a process, and asserts that its memory stays within `limit`, and that echoes through
/// `live` are as fast as before.
fn attack(
    what: &str,
    pid: i32,
    limit: u64,
    live: &mut std::net::TcpStream,
    attack: impl FnOnce() + Send,
) -> Result<()> {
    let before = process_usage::peak_memory(pid)?;
    thread::scope(|scope| {
        let attacker = scope.spawn(attack);
        while !attacker.is_finished() {
            expect_fast_echoes(what, live)?;
        }
        anyhow::Ok(())
    })?;
    let used = process_usage::peak_memory(pid)?.saturating_sub(before);
    println!("{what}: {} KiB", used >> 10);
    ensure!(used <= limit, "{what}: the process took {used} bytes");
    Ok(())
}

#[test]
fn interim_responses_end_their_stream_and_take_no_memory() -> Result<()> {
    for fields in [30, 250] {
        let (tunnel, mut live, _server) = start()?;
        let mut agent = connect_agent(&tunnel)?;
        let mut client = tunnel.connect(TARGET.parse()?)?;
        let stream = agent.next_request()?;
        let response = interim_response(stream, fields);

        let pid = tunnel.cloud()?.pid();
        attack("interim responses", pid, MEMORY_LIMIT, &mut live, || {
            agent.flood(&response, FLOOD);
        })?;

        expect_reset(&mut client)?;
        ensure!(tunnel.count("protocol_error")? > 0);
    }
    Ok(())
}

#[test]
fn interim_responses_to_the_hello_end_the_handshake() -> Result<()> {
    const PEERS: u64 = 6;
    let (tunnel, mut live, _server) = start()?;
    let pid = tunnel.cloud()?.pid();

    let gateway = tunnel.gateway();
    let files = tunnel.files(NODE);
    let limit = MEMORY_LIMIT * PEERS;
    attack("interim responses to hellos", pid, limit, &mut live, || {
        thread::scope(|scope| {
            for _ in 0..PEERS {
                scope.spawn(|| {
                    let mut agent = HostilePeer::agent(gateway, &files)?;
                    let stream = agent.next_request()?;
                    agent.flood(&interim_response(stream, 30), FLOOD);
                    anyhow::Ok(())
                });
            }
        });
    })?;

    tunnel.until_counted("handshake_failed", PEERS)
}

#[test]
fn frames_that_carry_nothing_end_their_session() -> Result<()> {
    let floods = [
        ("PRIORITY", frame(frame_type::PRIORITY, 0, 1, &[0; 5])),
        ("PING", frame(frame_type::PING, 0, 0, &[0; 8])),
        (
            "SETTINGS",
            frame(frame_type::SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]),
        ),
        (
            "WINDOW_UPDATE",
            frame(frame_type::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]),
        ),
        ("unknown", frame(frame_type::UNKNOWN, 0, 0, &[])),
    ];
    let (tunnel, mut live, _server) = start()?;
    let pid = tunnel.cloud()?.pid();
    for (count, (what, bytes)) in (1..).zip(floods) {
        let mut agent = connect_agent(&tunnel)?;
        let mut sent = 0;
        attack(what, pid, MEMORY_LIMIT, &mut live, || {
            sent = agent.flood(&bytes, FLOOD);
        })?;

        ensure!(sent < FLOOD, "{what}: the session was not ended");
        tunnel.until_disconnected(NODE)?;
        tunnel.until_counted("protocol_error", count)?;
        let error = tunnel.last_error(NODE)?;
        ensure!(error.contains("too many HTTP/2 frames"), "{what}: {error}");
    }
    Ok(())
}

/// Starts an agent whose gateway is hostile. Returns the agent's tunnel and the gateway's listener.
fn start_hostile_gateway() -> Result<(Tunnel, TcpListener)> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let mut settings = TunnelSettings::of(&[]);
    // A hostile gateway would answer the agent's pings.
    settings.agent_limits.ping_interval = 10 * ANSWER;
    let mut tunnel = settings.without_agents()?;
    tunnel.set_gateway(listener.local_addr()?);
    let pair = tunnel.authority().agent("a", Validity::Current)?;
    tunnel.launch_agent("a", &pair)?;
    Ok((tunnel, listener))
}

#[test]
fn data_for_streams_that_were_never_opened_ends_the_session() -> Result<()> {
    let (mut tunnel, listener) = start_hostile_gateway()?;
    let files = tunnel.files("gateway");
    let mut gateway = HostilePeer::gateway(&listener, &files)?;
    gateway.send_hello(false)?;
    let pid = tunnel.agent("a")?.pid();
    let before = process_usage::peak_memory(pid)?;

    // The refused request on the stream with the highest number makes all lower numbers look like closed
    // streams. The data's receiver resets each of them.
    let highest = 0x00ff_ffff;
    gateway.send(&frame(frame_type::HEADERS, 4, highest, &[0x83]))?;
    let mut sent = 0;
    let mut error = None;
    for stream in (3..highest).step_by(2) {
        sent += 10;
        error = gateway
            .send(&frame(frame_type::DATA, 0, stream, &[0]))
            .err();
        if sent >= FLOOD || error.is_some() {
            break;
        }
    }

    let used = process_usage::peak_memory(pid)?.saturating_sub(before);
    println!(
        "data for closed streams: {} KiB for {sent} bytes",
        used >> 10
    );
    ensure!(used <= MEMORY_LIMIT, "the agent took {used} bytes");
    error.context("the session was not ended")?;
    Ok(())
}

#[test]
fn a_gateway_that_keeps_draining_gets_four_sessions() -> Result<()> {
    let (mut tunnel, listener) = start_hostile_gateway()?;
    let files = tunnel.files("gateway");
    // The agent opens two connections. Each may have four sessions.
    let mut gateways = Vec::new();
    for _ in 0..8 {
        let mut gateway = HostilePeer::gateway(&listener, &files)?;
        gateway.send_hello(true)?;
        gateways.push(gateway);
    }

    let agent = tunnel.agent("a")?;
    let waits = || {
        let view = agent.agent_state().ok()?.view;
        let connections = view["connections"].as_array()?.clone();
        let errors = connections
            .iter()
            .map(|it| it["lastError"].as_str().unwrap_or_default());
        Some(
            errors
                .filter(|error| error.contains("waiting for one of 4"))
                .count()
                == 2,
        )
    };
    wait::until(ANSWER, || waits().unwrap_or_default())
        .with_context(|| format!("the agent does not wait: {:?}", agent.agent_state()))?;
    listener.set_nonblocking(true)?;
    ensure!(listener.accept().is_err(), "there is a ninth session");

    // Once a session has ended, the agent connects again.
    gateways.truncate(6);
    listener.set_nonblocking(false)?;
    let _new = HostilePeer::gateway(&listener, &files)?;
    Ok(())
}
