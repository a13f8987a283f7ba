//! Tests that a stalled stream never delays other streams.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;

use crate::{
    fixture::{
        Tunnel, echo, expect_fast_echoes, expect_reset, fill_buffers, start_echo_tunnel,
        until_unchanged,
    },
    targets::{Behaviour, Blackhole, SMALL_BUFFER, Server},
};

/// The number of readers that are stalled at the same time.
const STALLED: usize = 200;

/// Opens streams to a target that sends data endlessly, and reads nothing from them.
fn stall(tunnel: &Tunnel, flood: &Server, count: usize) -> Result<Vec<TcpStream>> {
    let readers = (0..count).map(|_| {
        let mut reader = tunnel.connect(flood.at())?;
        SockRef::from(&reader).set_recv_buffer_size(SMALL_BUFFER)?;
        let asked = reader.write_all(b"go");
        asked.with_context(|| format!("{:?}", tunnel.record()))?;
        Ok(reader)
    });
    let readers = readers.collect::<Result<Vec<_>>>()?;
    until_unchanged(|| flood.sent())?;
    Ok(readers)
}

#[test]
fn two_hundred_stalled_readers_do_not_delay_another_stream() -> Result<()> {
    let flood = Server::start(Behaviour::Flood)?;
    let (server, tunnel, mut live) = start_echo_tunnel(&[flood.at()])?;
    expect_fast_echoes("without stalled readers", &mut live)?;

    let readers = stall(&tunnel, &flood, STALLED)?;

    expect_fast_echoes("next to stalled readers", &mut live)?;
    let mut new = tunnel.connect(server.at())?;
    expect_fast_echoes("on a new stream next to stalled readers", &mut new)?;
    let counts = tunnel.record()?.counts;
    ensure!(flood.accepted() == u64::try_from(STALLED)?, "{counts:?}");
    // Readers that resume get more bytes than all buffers together can have held.
    let mut rest = vec![0; 2 << 20];
    for mut reader in readers {
        reader
            .read_exact(&mut rest)
            .context("a reader that resumes")?;
    }
    Ok(())
}

#[test]
fn stalled_writers_do_not_delay_another_stream() -> Result<()> {
    let silent = Server::start(Behaviour::Silence)?;
    let (_server, tunnel, mut live) = start_echo_tunnel(&[silent.at()])?;

    // There are more writers than sessions, so at least one writer shares the live stream's session.
    let mut writers = Vec::new();
    for _ in 0..4 {
        let mut writer = tunnel.connect(silent.at())?;
        fill_buffers(&mut writer)?;
        writers.push(writer);
    }

    // Each byte becomes a DATA frame. A large number of small frames must not close a session.
    let mut small = tunnel.connect(silent.at())?;
    small.set_nodelay(true)?;
    for _ in 0..5000 {
        small.write_all(b"x")?;
    }

    expect_fast_echoes("next to stalled writers", &mut live)?;
    ensure!(
        tunnel.count("agent_connection_lost")? == 0,
        "the many small frames closed a session"
    );
    Ok(())
}

#[test]
fn a_dial_that_nobody_answers_does_not_delay_another_stream() -> Result<()> {
    let hole = Blackhole::new()?;
    let (server, tunnel, mut live) = start_echo_tunnel(&[hole.at()])?;

    let mut lost = tunnel.connect(hole.at())?;
    lost.write_all(b"anybody?")?;

    expect_fast_echoes("next to a dial without an answer", &mut live)?;
    let mut new = tunnel.connect(server.at())?;
    echo(&mut new, b"hello")?;
    ensure!(
        tunnel.count("dial_timed_out")? == 0,
        "the dial has timed out before the echoes were done"
    );
    expect_reset(&mut lost)?;
    tunnel.until_counted("dial_timed_out", 1)
}
