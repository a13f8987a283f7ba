//! Faults of the gateway and of agents, and the recovery.
#![expect(
    clippy::print_stdout,
    reason = "prints the times and sizes, which it also limits"
)]

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{clock::Instant, scale::Scale, usage, wait};

use crate::{
    support::{
        BACK, Plan, Tunnel, dial, echo, echoing, expect_live, expect_refused, expect_reset, stuff,
    },
    targets::{Act, Server, closed},
};

/// The number of failed dials before the first measurement of memory, and between the first and second.
const DIALS: [u32; 2] = [1000, 5000];

/// The limit for the growth of a process's memory during failed dials, in bytes: less than a kilobyte per
/// dial.
const GROWTH: u64 = 3 << 20;

/// Waits until a new client gets an echo; returns the elapsed time.
fn until_served(tunnel: &Tunnel, target: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    wait::until(BACK, || {
        let stream = tunnel.connect(target);
        stream.is_ok_and(|mut stream| echo(&mut stream, b"back").is_ok())
    })
    .with_context(|| tunnel.logs())?;
    Ok(start.elapsed())
}

#[test]
fn after_a_kill_of_the_gateway_its_agent_reconnects() -> Result<()> {
    let (server, mut tunnel, mut old) = echoing(&[])?;

    tunnel.kill_cloud()?;
    let error = dial(tunnel.way_to(server.at())?).expect_err("the ingress was killed");
    ensure!(
        error.kind() == std::io::ErrorKind::ConnectionRefused,
        "{error}"
    );
    echo(&mut old, b"hello").expect_err("the kill ends the stream");
    server.until_reset()?;

    tunnel.start_cloud()?;
    let took = until_served(&tunnel, server.at())?;
    println!(
        "served again {} ms after the start of the gateway",
        took.as_millis()
    );
    Ok(())
}

#[test]
fn a_frozen_agent_delays_no_other_agent_and_its_clients_get_a_reset() -> Result<()> {
    let (server, other) = (Server::start(Act::Echo)?, Server::start(Act::Echo)?);
    let nodes = vec![("a", vec![server.at()]), ("b", vec![other.at()])];
    let mut plan = Plan::nodes(nodes);
    // The echoes to the other agent take less time, even on a busy machine.
    for limits in [&mut plan.session, &mut plan.of_agents] {
        limits.ping_timeout = Duration::from_secs(5);
    }
    let mut tunnel = plan.start()?;
    let mut old = tunnel.connect(server.at())?;
    echo(&mut old, b"hello")?;
    // One stream on each session of the other agent.
    let mut live = [tunnel.connect(other.at())?, tunnel.connect(other.at())?];

    tunnel.agent("a")?.signal(Signal::SIGSTOP)?;
    let start = Instant::now();
    stuff(&mut old)?;
    for stream in &mut live {
        expect_live("on another agent, next to a frozen one", stream)?;
    }
    ensure!(
        tunnel.count("agent_connection_lost")? == 0,
        "the frozen agent was disconnected before the echoes were done"
    );
    expect_reset(&mut old)?;
    println!("the client got a reset {} ms after the freeze", start.elapsed().as_millis());
    tunnel.until_counted("agent_connection_lost", 1)?;
    tunnel.until_disconnected("a")?;
    let mut refused = tunnel.connect(server.at())?;
    expect_refused(&mut refused)?;
    ensure!(tunnel.count("agent_not_connected")? >= 1);

    tunnel.agent("a")?.signal(Signal::SIGCONT)?;
    let took = until_served(&tunnel, server.at())?;
    println!("served again {} ms after the agent resumed", took.as_millis());
    Ok(())
}

#[test]
fn clients_of_a_killed_agent_get_a_reset_at_once() -> Result<()> {
    let (server, mut tunnel, mut old) = echoing(&[])?;

    let start = Instant::now();
    tunnel.kill_agent("a")?;
    expect_reset(&mut old)?;

    ensure!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    server.until_reset()?;
    tunnel.until_counted("agent_connection_lost", 1)?;
    tunnel.until_disconnected("a")?;
    tunnel.start_agent("a")?;
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// Makes this many dials that fail, from several threads.
fn fail(tunnel: &Tunnel, target: SocketAddr, count: u32) -> Result<()> {
    const THREADS: usize = 8;
    let way = tunnel.way_to(target)?;
    let work = || -> Result<()> {
        for _ in 0..count / 8 {
            let mut stream = dial(way)?;
            expect_refused(&mut stream)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        for thread in [(); THREADS].map(|()| scope.spawn(work)) {
            thread.join().expect("no panic")?;
        }
        Ok(())
    })
}

#[test]
fn five_thousand_failed_dials_leave_memory_and_files_as_they_were() -> Result<()> {
    let (server, nobody) = (Server::start(Act::Echo)?, closed()?);
    let mut tunnel = Plan::of(&[server.at(), nobody]).start()?;
    let pids = [tunnel.cloud()?.pid(), tunnel.agent("a")?.pid()];
    let [first, then] = DIALS.map(|count| Scale::from_environment().count(count).max(8) / 8 * 8);

    fail(&tunnel, nobody, first)?;
    tunnel.until_counted("dial_refused", first.into())?;
    let looks = |pid| -> Result<_> { Ok((usage::resident(pid)?, usage::open_files(pid)?)) };
    let before = [looks(pids[0])?, looks(pids[1])?];
    fail(&tunnel, nobody, then)?;
    tunnel.until_counted("dial_refused", (first + then).into())?;

    for ((what, pid), before) in ["cloud", "agent"].iter().zip(pids).zip(before) {
        let after = looks(pid)?;
        let growth = after.0.saturating_sub(before.0);
        println!(
            "{what}: {} kB before, {} kB after",
            before.0 / 1024,
            after.0 / 1024
        );
        ensure!(growth < GROWTH, "the memory of {what} grew by {growth} bytes");
        ensure!(
            after.1 <= before.1 + 2,
            "{what}: {} open files before, {} after",
            before.1,
            after.1
        );
    }
    echo(&mut tunnel.connect(server.at())?, b"hello")
}
