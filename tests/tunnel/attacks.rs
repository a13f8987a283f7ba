//! Tests in which hostile or broken peers connect to the gateway while clients use an agent's streams.
#![expect(
    clippy::print_stdout,
    reason = "prints the times, which it also limits"
)]

mod descriptors;
mod frames;
mod handshakes;
mod idle_streams;
mod memory;
mod revoked_access;
mod shared_certificate;

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{clock::Instant, load_scale::LoadScale, pki::Validity, process_usage, wait};

use crate::fixture::{
    ANSWER, HANDSHAKE_TIMEOUT, HANDSHAKES, RECONNECT_LIMIT, dial, echo, expect_fast_echoes,
    start_echo_tunnel,
};

/// The number of handshakes that are started but never finished.
const UNFINISHED: u32 = 1000;

/// The first bytes of a TLS record that contains a ClientHello of 512 bytes. The test never sends the rest.
const CLIENT_HELLO_START: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 252];

#[test]
fn a_thousand_handshakes_that_never_end_do_not_keep_agents_out() -> Result<()> {
    let (server, mut tunnel, mut live) = start_echo_tunnel(&[])?;
    let pid = tunnel.cloud()?.pid();
    let files = process_usage::open_files(pid)?;

    let start_of_handshakes = Instant::now();
    let mut unfinished = Vec::new();
    for _ in 0..LoadScale::from_environment().count(UNFINISHED) {
        let mut stream = TcpStream::connect(tunnel.gateway())?;
        // An error is ignored, because the gateway may already have closed the connection.
        drop(stream.write_all(CLIENT_HELLO_START));
        unfinished.push(stream);
    }
    expect_fast_echoes("next to unfinished handshakes", &mut live)?;
    echo(&mut tunnel.connect(server.at())?, b"hello")?;

    // Another agent can connect once the earlier handshakes have timed out, even though the test keeps their
    // connections open.
    let start = Instant::now();
    let pair = tunnel.authority().agent("b", Validity::Current)?;
    tunnel.launch_agent("b", &pair)?;
    tunnel.until_connected("b")?;
    println!(
        "another agent is connected after {} ms",
        start.elapsed().as_millis()
    );
    let counts = || {
        let record = tunnel.record().ok()?;
        Some(["handshake_limit", "handshake_timed_out"].map(|reason| record.count(reason)))
    };
    let all = u64::try_from(unfinished.len())?;
    wait::until(RECONNECT_LIMIT, || {
        counts().is_some_and(|[full, late]| full + late == all)
    })
    .with_context(|| format!("[dropped, timed out] {:?} of {all} handshakes", counts()))?;
    // Only as many handshakes as the gateway's limit allows can time out. The gateway drops all others in
    // favour of newer ones.
    let [full, late] = counts().context("the gateway has no counts")?;
    let rounds = start_of_handshakes.elapsed().as_secs() / HANDSHAKE_TIMEOUT.as_secs() + 1;
    ensure!(
        late <= rounds * u64::try_from(HANDSHAKES)?,
        "{full} handshakes were dropped and {late} timed out, in {rounds} timeouts of {HANDSHAKES}"
    );
    wait::until(ANSWER, || {
        process_usage::open_files(pid).is_ok_and(|now| now <= files + 8)
    })
    .context("the gateway keeps their connections open")?;
    echo(&mut live, b"still there")
}

#[test]
fn garbage_ends_its_own_connection_only() -> Result<()> {
    let (_server, tunnel, mut live) = start_echo_tunnel(&[])?;

    let garbage: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        &[0xff; 4096],
        &[22, 3, 1, 0, 4, 1, 0, 0, 0],
    ];
    for bytes in garbage {
        let mut stream = dial(tunnel.gateway())?;
        stream.write_all(bytes)?;
        let mut rest = Vec::new();
        // The gateway closes or resets the connection, possibly after sending a TLS alert.
        drop(stream.read_to_end(&mut rest));
        ensure!(rest.len() < 32, "{rest:?}");
    }
    tunnel.until_counted("handshake_failed", 4)?;

    // This peer closes its connection without sending a single byte.
    dial(tunnel.gateway())?.shutdown(Shutdown::Write)?;
    tunnel.until_counted("handshake_failed", 5)?;
    echo(&mut live, b"still there")?;
    ensure!(tunnel.record()?.sessions("a") == 2);
    Ok(())
}
