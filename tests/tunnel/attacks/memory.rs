//! Readers and writers that stall make the gateway and the agent buffer bytes.

use std::{io::Write as _, net::TcpStream, time::Duration};

use anyhow::{Result, ensure};
use socket2::SockRef;
use tunnel_tests::{clock::Instant, process_usage::resident_memory};

use crate::{
    fixture::{Tunnel, expect_fast_echoes, start_echo_tunnel, until_unchanged},
    targets::{Behaviour, SMALL_BUFFER, Server},
};

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

#[test]
fn memory_is_returned_after_stalled_readers_have_ended() -> Result<()> {
    let flood = Server::start(Behaviour::Flood)?;
    let (_server, mut tunnel, mut live) = start_echo_tunnel(&[flood.at()])?;
    expect_fast_echoes("without stalled readers", &mut live)?;
    let idle = memory(&mut tunnel)?;

    let readers = stall(&tunnel, &flood, READERS)?;
    let stalled = memory(&mut tunnel)?;
    drop(readers);
    let start = Instant::now();
    let mut last = stalled;
    while (0..2).any(|end| last[end] >= 2 * idle[end]) {
        ensure!(
            start.elapsed() < RETURN_LIMIT,
            "{:?} MiB idle, {:?} with stalled readers, {:?} after they ended",
            mebibytes(idle),
            mebibytes(stalled),
            mebibytes(last)
        );
        // Echoes show that returning the memory does not stop the threads of sessions.
        expect_fast_echoes("while memory is returned", &mut live)?;
        last = memory(&mut tunnel)?;
    }
    println!(
        "{:?} MiB idle, {:?} with stalled readers, {:?} {} ms after they ended",
        mebibytes(idle),
        mebibytes(stalled),
        mebibytes(last),
        start.elapsed().as_millis()
    );
    println!(
        "{}",
        tunnel
            .logs()
            .lines()
            .filter(|line| line.contains("returned freed"))
            .collect::<Vec<_>>()
            .join("\n")
    );
    Ok(())
}
