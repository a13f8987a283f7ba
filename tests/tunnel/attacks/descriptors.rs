//! Clients and outsiders use up the file descriptors of a gateway or an agent.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{hostile_peer, pki::Validity, process_usage, wait};

use crate::{
    fixture::{ANSWER, Tunnel, TunnelSettings, dial, echo, expect_fast_echoes},
    targets::{Behaviour, Server},
};

/// The limit on open files: half of them are reserved, and clients may have three quarters of the others.
const OPEN_FILES: u64 = 512;
const RESERVED: usize = 256;
const SHARE: usize = 192;
/// The number of connections that an attacker tries to open.
const ATTEMPTS: usize = 800;

/// Starts a tunnel whose gateway or agent has few file descriptors.
fn start(server: &Server, open_files: [Option<u64>; 2]) -> Result<(Tunnel, TcpStream)> {
    let mut settings = TunnelSettings::of(&[server.at()]);
    // The limit on handshakes is not to be reached first.
    settings.handshakes = 4096;
    settings.open_files = open_files;
    let tunnel = settings.start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    Ok((tunnel, live))
}

/// Opens connections, and returns those that connect() did not fail for.
fn open_many(to: SocketAddr, first_bytes: &[u8]) -> Result<Vec<TcpStream>> {
    let mut held = Vec::new();
    for _ in 0..ATTEMPTS {
        if let Ok(mut stream) = dial(to) {
            // The other end may have closed the connection already.
            drop(stream.write_all(first_bytes));
            stream.set_nonblocking(true)?;
            held.push(stream);
        }
    }
    Ok(held)
}

/// Returns how many of the connections are open and have received nothing.
fn count_open(held: &[TcpStream]) -> usize {
    let is_open = |mut stream: &TcpStream| matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
    held.iter().filter(|stream| is_open(stream)).count()
}

#[test]
fn idle_clients_leave_descriptors_to_agents_and_to_the_gateway_itself() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let (mut tunnel, mut live) = start(&server, [Some(OPEN_FILES), None])?;
    let pid = tunnel.cloud()?.pid();

    let held = open_many(tunnel.steering_address_of(server.at())?, b"")?;
    // The live connection is one of the clients'.
    wait::until(ANSWER, || count_open(&held) == SHARE - 1)
        .with_context(|| format!("{} connections are open", count_open(&held)))?;

    expect_fast_echoes("next to idle clients", &mut live)?;
    let pair = tunnel.authority().agent("b", Validity::Current)?;
    tunnel.launch_agent("b", &pair)?;
    tunnel.until_connected("b")?;
    let open = process_usage::open_files(pid)?;
    ensure!(
        open < RESERVED,
        "{open} files are open, so own ones may fail"
    );
    let refused = u64::try_from(held.len() - (SHARE - 1))?;
    ensure!(tunnel.count("descriptor_limit")? >= refused);
    ensure!(tunnel.logs().contains("RLIMIT_NOFILE"), "{}", tunnel.logs());
    let lines = tunnel.logs();
    let lines = lines
        .lines()
        .filter(|line| line.contains("WARN") && line.contains("descriptor_limit"));
    ensure!(lines.count() <= 10, "{}", tunnel.logs());

    drop(held);
    wait::until(ANSWER, || {
        let connected = tunnel.connect(server.at());
        connected.is_ok_and(|mut stream| echo(&mut stream, b"again").is_ok())
    })
    .context("no connection is accepted after the clients have left")
}

#[test]
fn outsiders_leave_descriptors_to_agents_and_clients() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let (mut tunnel, mut live) = start(&server, [Some(OPEN_FILES), None])?;
    let pid = tunnel.cloud()?.pid();

    let held = open_many(tunnel.gateway(), &hostile_peer::client_hello()?[..64])?;

    ensure!(tunnel.count("descriptor_limit")? > 0);
    expect_fast_echoes("next to outsiders", &mut live)?;
    echo(&mut tunnel.connect(server.at())?, b"a new client")?;
    let pair = tunnel.authority().agent("b", Validity::Current)?;
    tunnel.launch_agent("b", &pair)?;
    tunnel.until_connected("b")?;
    let open = process_usage::open_files(pid)?;
    ensure!(
        open < RESERVED + 128,
        "{open} files are open, so own ones may fail"
    );
    let sessions = tunnel.record()?.sessions("a");
    ensure!(
        sessions == 2,
        "node a has {sessions} sessions, beside {}",
        held.len()
    );
    Ok(())
}

#[test]
fn an_agent_without_descriptors_refuses_streams_and_keeps_its_sessions() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let (mut tunnel, mut live) = start(&server, [None, Some(256)])?;
    let pid = tunnel.agent("a")?.pid();

    let held = open_many(tunnel.steering_address_of(server.at())?, b"x")?;
    tunnel.until_agent_counted("a", "descriptor_limit")?;

    expect_fast_echoes("next to streams of an agent at its limit", &mut live)?;
    let open = process_usage::open_files(pid)?;
    ensure!(open <= 176 + 4, "the agent has {open} open files");
    let error = tunnel.last_error("a")?;
    ensure!(
        error.contains("RLIMIT_NOFILE"),
        "the node's error is: {error}"
    );
    ensure!(tunnel.count("target_denied")? == 0, "the cause is wrong");
    ensure!(tunnel.record()?.sessions("a") == 2);
    let lines = tunnel.agent("a")?.log();
    let lines = lines
        .lines()
        .filter(|line| line.contains("WARN") && line.contains("descriptor_limit"));
    ensure!((1..=10).contains(&lines.count()));

    drop(held);
    wait::until(ANSWER, || {
        let connected = tunnel.connect(server.at());
        connected.is_ok_and(|mut stream| echo(&mut stream, b"again").is_ok())
    })
    .context("no stream is accepted after the clients have left")
}
