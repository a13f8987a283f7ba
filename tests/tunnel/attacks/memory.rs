//! Readers and writers that stall make the gateway and the agent buffer bytes.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use tunnel_tests::{
    clock::Instant,
    hostile_peer::{HostilePeer, frame, frame_type},
    pki::Validity,
    process_usage::{peak_memory, resident_memory},
    wait,
};

use crate::{
    fixture::{
        ANSWER, MEMORY_LIMIT, Tunnel, TunnelSettings, echo, expect_fast_echoes, start_echo_tunnel,
        until_unchanged,
    },
    targets::{Behaviour, SMALL_BUFFER, Server},
};

/// The flags `ACK` and `END_HEADERS` (RFC 9113 section 6).
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// The number of readers that stall, which is almost all streams of a node.
const READERS: usize = 480;
/// The time limit for memory to be returned after streams have ended.
const RETURN_LIMIT: Duration = Duration::from_secs(10);

/// Returns the resident memory of the gateway and of an agent.
fn memory(tunnel: &mut Tunnel) -> Result<[u64; 2]> {
    let pids = [tunnel.cloud()?.pid(), tunnel.agent("a")?.pid()];
    Ok([resident_memory(pids[0])?, resident_memory(pids[1])?])
}

fn mebibytes(memory: [u64; 2]) -> [u64; 2] {
    memory.map(|bytes| bytes >> 20)
}

/// Writes to all connections until none of them has accepted a byte for a while.
fn fill_all(writers: &[TcpStream]) -> Result<()> {
    let chunk = vec![0; 64 << 10];
    let mut written = 0;
    until_unchanged(|| {
        for mut writer in writers {
            written += writer.write(&chunk).unwrap_or(0);
        }
        u64::try_from(written).unwrap_or(u64::MAX)
    })?;
    println!("{} MiB written", written >> 20);
    Ok(())
}

/// Opens streams to a target that sends data endlessly, and reads nothing from them.
fn stall(tunnel: &Tunnel, flood: &Server, count: usize) -> Result<Vec<TcpStream>> {
    let readers = (0..count).map(|_| {
        let mut reader = tunnel.connect(flood.at())?;
        SockRef::from(&reader).set_recv_buffer_size(SMALL_BUFFER)?;
        reader.write_all(b"go")?;
        Ok(reader)
    });
    let readers = readers.collect::<Result<Vec<_>>>()?;
    until_unchanged(|| flood.sent())?;
    Ok(readers)
}

/// Waits until both processes have returned the memory that they no longer need. Meanwhile, echoes must be fast.
fn expect_returned(tunnel: &mut Tunnel, live: &mut TcpStream, idle: [u64; 2]) -> Result<()> {
    let start = Instant::now();
    loop {
        let now = memory(tunnel)?;
        if (0..2).all(|end| now[end] < 2 * idle[end]) {
            let after = start.elapsed().as_millis();
            println!("{:?} MiB after {after} ms", mebibytes(now));
            return Ok(());
        }
        let [idle, now] = [idle, now].map(mebibytes);
        ensure!(
            start.elapsed() < RETURN_LIMIT,
            "{idle:?} MiB at first, {now:?} MiB after the streams have ended"
        );
        expect_fast_echoes("while memory is returned", live)?;
    }
}

/// Asserts that neither process has needed more than [`MEMORY_LIMIT`] so far.
fn expect_limited(tunnel: &mut Tunnel) -> Result<()> {
    let pids = [tunnel.cloud()?.pid(), tunnel.agent("a")?.pid()];
    let peaks = [peak_memory(pids[0])?, peak_memory(pids[1])?];
    println!("peaks: {:?} MiB", mebibytes(peaks));
    ensure!(
        peaks.iter().all(|peak| *peak <= MEMORY_LIMIT),
        "{:?} MiB",
        mebibytes(peaks)
    );
    Ok(())
}

#[test]
fn stalled_readers_take_little_memory_lose_no_bytes_and_leave_none_in_use() -> Result<()> {
    let flood = Server::start(Behaviour::Flood)?;
    let (server, mut tunnel, mut live) = start_echo_tunnel(&[flood.at()])?;
    expect_fast_echoes("without stalled readers", &mut live)?;
    let idle = memory(&mut tunnel)?;
    println!("{:?} MiB at first", mebibytes(idle));

    let readers = stall(&tunnel, &flood, READERS)?;
    expect_limited(&mut tunnel)?;
    expect_fast_echoes("next to stalled readers", &mut live)?;
    let mut new = tunnel.connect(server.at())?;
    expect_fast_echoes("on a new stream", &mut new)?;

    // Readers that resume get more bytes than all buffers together can have held.
    let mut rest = vec![0; 2 << 20];
    for (index, mut reader) in readers.into_iter().enumerate() {
        reader.read_exact(&mut rest).with_context(|| {
            let counts = tunnel.record().map(|record| record.counts);
            format!("reader {index} that resumes: {counts:?}\n{}", tunnel.logs())
        })?;
    }
    ensure!(tunnel.count("memory_limit")? == 0, "streams were reset");
    expect_limited(&mut tunnel)?;
    drop((rest, new));
    expect_returned(&mut tunnel, &mut live, idle)
}

#[test]
fn stalled_writers_take_little_memory_and_leave_none_in_use() -> Result<()> {
    let silent = Server::start(Behaviour::Silence)?;
    let (_server, mut tunnel, mut live) = start_echo_tunnel(&[silent.at()])?;
    expect_fast_echoes("without stalled writers", &mut live)?;
    let idle = memory(&mut tunnel)?;
    println!("{:?} MiB at first", mebibytes(idle));

    let mut writers = Vec::new();
    for _ in 0..READERS {
        let writer = tunnel.connect(silent.at())?;
        writer.set_nonblocking(true)?;
        // The target would otherwise wait for the bytes that are still queued.
        SockRef::from(&writer).set_linger(Some(Duration::ZERO))?;
        writers.push(writer);
    }
    fill_all(&writers)?;
    expect_limited(&mut tunnel)?;
    expect_fast_echoes("next to stalled writers", &mut live)?;
    ensure!(tunnel.count("memory_limit")? == 0, "streams were reset");
    drop(writers);
    expect_returned(&mut tunnel, &mut live, idle)
}

#[test]
fn streams_of_an_agent_that_ignores_reduced_windows_are_reset() -> Result<()> {
    const NODE: &str = "hostile";
    let (server, target) = (Server::start(Behaviour::Echo)?, "127.0.0.1:10250".parse()?);
    let nodes = vec![("a", vec![server.at()]), (NODE, vec![target])];
    let mut settings = TunnelSettings::nodes(nodes);
    settings.gateway_limits.max_buffered_bytes = 4 << 20;
    let mut tunnel = settings.without_agents()?;
    tunnel.start_agent("a")?;
    let files = tunnel.files(NODE);
    let pair = tunnel.authority().agent(NODE, Validity::Current)?;
    files.write(&tunnel.authority().pem(), &pair)?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    let before = peak_memory(tunnel.cloud()?.pid())?;
    let mut agent = HostilePeer::agent(tunnel.gateway(), &files)?;
    agent.answer_hello()?;
    // It acknowledges the windows of 1 MiB, and nothing later.
    agent.send(&frame(frame_type::SETTINGS, ACK, 0, &[]))?;
    let connected = || tunnel.record().is_ok_and(|it| it.sessions(NODE) > 0);
    wait::until(ANSWER, connected).context("the hostile agent is not connected")?;

    let mut readers = Vec::new();
    let data = vec![0; 16 << 10];
    for _ in 0..40 {
        let reader = tunnel.connect(target)?;
        SockRef::from(&reader).set_recv_buffer_size(SMALL_BUFFER)?;
        readers.push(reader);
        let stream = agent.next_request()?;
        // `:status 200` (RFC 7541 appendix A, entry 8).
        agent.send(&frame(frame_type::HEADERS, END_HEADERS, stream, &[0x88]))?;
        for _ in 0..63 {
            agent.send(&frame(frame_type::DATA, 0, stream, &data))?;
        }
    }

    let count = || tunnel.count("memory_limit").unwrap_or(0);
    wait::until(ANSWER, || count() > 0).context("no stream is reset")?;
    expect_fast_echoes("next to a disobedient agent", &mut live)?;
    echo(&mut tunnel.connect(server.at())?, b"a new client")?;
    let used = peak_memory(tunnel.cloud()?.pid())? - before;
    println!("{} streams reset, {} MiB used", count(), used >> 20);
    ensure!(used < 24 << 20, "{used} bytes used");
    let error = tunnel.last_error(NODE)?;
    ensure!(error.contains("tunnel.session.maxBufferedBytes"), "{error}");
    Ok(())
}
