//! One stream that gets nowhere never delays another.
#![expect(clippy::print_stdout, reason = "the delays are told, not only bounded")]

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tunnel_tests::{load, scale::Scale};

use crate::{
    support::{Plan, Tunnel, delays, echo, expect_reset, in_words, until_still},
    targets::{Act, Blackhole, LITTLE, Server},
};

/// How many echoes are timed.
const ECHOES: usize = 300;

/// What a live echo may take in a dev build on a busy machine: less than a retransmission takes. The
/// bench asks for less.
const LIVE: Duration = Duration::from_millis(100);

/// That a live echo is quick, and how quick.
fn expect_live(what: &str, stream: &mut TcpStream) -> Result<()> {
    let delays = delays(stream, ECHOES)?;
    println!("{}", in_words(what, &delays));
    let most = Scale::from_environment().patience(LIVE).as_micros();
    ensure!(
        u128::from(load::percentile(&delays, 99)) <= most,
        "{}",
        in_words(what, &delays)
    );
    Ok(())
}

/// Readers that ask for a flood and read nothing of it.
fn stall(tunnel: &Tunnel, flood: &Server, count: usize) -> Result<Vec<TcpStream>> {
    let readers = (0..count).map(|_| {
        let mut reader = tunnel.connect(flood.at())?;
        SockRef::from(&reader).set_recv_buffer_size(LITTLE)?;
        let asked = reader.write_all(b"go");
        asked.with_context(|| format!("{:?}", tunnel.record()))?;
        Ok(reader)
    });
    let readers = readers.collect::<Result<Vec<_>>>()?;
    until_still(|| flood.sent())?;
    Ok(readers)
}

fn live_beside(count: usize) -> Result<()> {
    let (server, flood) = (Server::start(Act::Echo)?, Server::start(Act::Flood)?);
    let tunnel = Plan::of(&[server.at(), flood.at()]).start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    expect_live("beside no stalled reader", &mut live)?;

    let readers = stall(&tunnel, &flood, count)?;

    expect_live(&format!("beside {count} stalled readers"), &mut live)?;
    let mut new = tunnel.connect(server.at())?;
    expect_live("on a stream opened beside them", &mut new)?;
    let counts = tunnel.record()?.counts;
    ensure!(flood.accepted() == u64::try_from(count)?, "{counts:?}");
    // Those that read again get the rest: more than was on the way.
    let mut rest = vec![0; 2 << 20];
    for mut reader in readers {
        reader.read_exact(&mut rest).context("a reader again")?;
    }
    Ok(())
}

#[test]
fn a_stalled_reader_does_not_delay_another_stream() -> Result<()> {
    live_beside(1)
}

#[test]
fn two_hundred_stalled_readers_do_not_delay_another_stream() -> Result<()> {
    live_beside(200)
}

#[test]
fn stalled_writers_do_not_delay_another_stream() -> Result<()> {
    let (server, silent) = (Server::start(Act::Echo)?, Server::start(Act::Silence)?);
    let tunnel = Plan::of(&[server.at(), silent.at()]).start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;

    // More than there are sessions, so that there is one beside the live stream.
    let mut writers = Vec::new();
    let chunk = vec![0; 1 << 20];
    for _ in 0..4 {
        let mut writer = tunnel.connect(silent.at())?;
        writer.set_write_timeout(Some(Duration::from_millis(300)))?;
        // Until nothing fits any more, between here and the target that reads nothing.
        while writer.write(&chunk).is_ok() {}
        writers.push(writer);
    }

    // A frame for each byte: many small ones are no reason to close a session.
    let mut small = tunnel.connect(silent.at())?;
    small.set_nodelay(true)?;
    for _ in 0..5000 {
        small.write_all(b"x")?;
    }

    expect_live("beside stalled writers", &mut live)?;
    ensure!(tunnel.count("agent_lost")? == 0, "a session was closed");
    Ok(())
}

#[test]
fn a_dial_that_nobody_answers_does_not_delay_another_stream() -> Result<()> {
    let (server, hole) = (Server::start(Act::Echo)?, Blackhole::new()?);
    let tunnel = Plan::of(&[server.at(), hole.at()]).start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;

    let mut lost = tunnel.connect(hole.at())?;
    lost.write_all(b"anybody?")?;

    expect_live("beside a dial that nobody answers", &mut live)?;
    let mut new = tunnel.connect(server.at())?;
    echo(&mut new, b"hello")?;
    ensure!(
        tunnel.count("dial_timed_out")? == 0,
        "the dial was still under way"
    );
    expect_reset(&mut lost)?;
    tunnel.until_counted("dial_timed_out", 1)
}
