//! Tests of the time limit for idle streams.

use std::{net::TcpStream, time::Duration};

use anyhow::Result;
use tunnel_tests::{clock::Instant, wait};

use crate::{
    fixture::{ANSWER, TunnelSettings, echo, expect_refused, expect_reset},
    targets::{Behaviour, Server},
};

/// The time limit.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// The gateway's limit on streams, all of which the idle clients take.
const STREAMS: u32 = 20;

/// Clients that send nothing take all streams of a node.
#[test]
fn idle_clients_give_back_all_streams_of_a_node_and_a_busy_one_keeps_its_stream() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.gateway_limits.max_streams = STREAMS / 2;
    settings.gateway_limits.idle_timeout = IDLE_TIMEOUT;
    let tunnel = settings.start()?;
    let mut busy = tunnel.connect(server.at())?;
    echo(&mut busy, b"hello")?;
    let mut idle = Vec::new();
    let full = wait::until_some(ANSWER, || {
        let client: TcpStream = tunnel.connect(server.at()).ok()?;
        idle.push(client);
        echo(&mut busy, b"busy").ok()?;
        let streams = tunnel.record().ok()?.streams("a");
        (streams >= u64::from(STREAMS)).then_some(())
    });
    full?;
    expect_refused(&mut tunnel.connect(server.at())?)?;

    let start = Instant::now();
    while start.elapsed() < 2 * IDLE_TIMEOUT {
        echo(&mut busy, b"busy")?;
    }
    for client in idle.iter_mut().take(5) {
        expect_reset(client)?;
    }
    let is_idle = || tunnel.record().is_ok_and(|it| it.count("stream_idle") > 0);
    wait::until(ANSWER, is_idle)?;
    let error = tunnel.last_error("a")?;
    let text = "reset: no byte moved for tunnel.session.idleTimeout";
    anyhow::ensure!(error.contains(text), "{error}");
    echo(&mut tunnel.connect(server.at())?, b"hello")?;
    echo(&mut busy, b"still there")
}
