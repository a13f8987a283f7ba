//! Tests that the tunnel withstands and recovers from faults in the gateway and in agents.
#![expect(
    clippy::print_stdout,
    reason = "prints the times and sizes, which it also limits"
)]

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::{Instant, pause},
    load_scale::LoadScale,
    process_usage, wait,
};

use crate::{
    fixture::{
        RECONNECT_LIMIT, Tunnel, TunnelSettings, dial, echo, expect_fast_echoes, expect_refused,
        expect_reset, fill_buffers, start_echo_tunnel,
    },
    targets::{Behaviour, Server, address_without_listener},
};

/// The numbers of failed dials before the first measurement of memory, and between the first and the second.
const DIALS: [u32; 2] = [1000, 5000];

/// The maximum growth of a process's memory after the failed dials, in bytes: less than a kilobyte per dial.
const MAX_GROWTH: u64 = 4 << 20;

/// The maximum time until a process has returned the memory that it has freed.
const RETURN_LIMIT: Duration = Duration::from_secs(15);

/// The gateway's drain timeout in the test of a restart.
const DRAIN: Duration = Duration::from_secs(3);

/// The maximum time for which connects may be refused while a gateway restarts.
const MAX_REFUSAL: Duration = Duration::from_secs(2);

/// Waits until a new client's echo succeeds, and returns the elapsed time.
fn until_served(tunnel: &Tunnel, target: SocketAddr) -> Result<Duration> {
    let start = Instant::now();
    wait::until(RECONNECT_LIMIT, || {
        let stream = tunnel.connect(target);
        stream.is_ok_and(|mut stream| echo(&mut stream, b"back").is_ok())
    })
    .with_context(|| tunnel.logs())?;
    Ok(start.elapsed())
}

#[test]
fn after_a_kill_of_the_gateway_its_agent_reconnects() -> Result<()> {
    let (server, mut tunnel, mut old) = start_echo_tunnel(&[])?;

    tunnel.kill_cloud()?;
    let error = dial(tunnel.steering_address_of(server.at())?).expect_err("the ingress was killed");
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
fn a_gateway_that_restarts_politely_refuses_connects_only_between_the_processes() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.gateway_limits.drain_timeout = DRAIN;
    let mut tunnel = settings.start()?;
    let steered = tunnel.steering_address_of(server.at())?;
    let mut old = tunnel.connect(server.at())?;
    echo(&mut old, b"hello")?;
    // An agent waits before it replaces a session that has lasted less than a second.
    pause(Duration::from_secs(1));
    let stop = AtomicBool::new(false);
    let (drained_after, times) = thread::scope(|scope| -> Result<_> {
        let clients = scope.spawn(|| {
            let mut times = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                let served = dial(steered).is_ok_and(|mut it| echo(&mut it, b"new").is_ok());
                times.push((start, served));
                pause(Duration::from_millis(50));
            }
            times
        });
        let restarted: Result<_> = (|| {
            let start = Instant::now();
            // The stream that is open from before keeps the drain from ending early.
            tunnel.terminate_cloud()?;
            let drained_after = start.elapsed();
            tunnel.start_cloud()?;
            tunnel.until_connected("a")?;
            Ok(drained_after)
        })();
        stop.store(true, Ordering::Relaxed);
        let times = clients.join().expect("no panic");
        Ok((restarted?, times))
    })?;
    expect_reset(&mut old)?;

    let failed: Vec<_> = times.iter().filter(|(_, served)| !served).collect();
    let first = failed.first().context("no connect met the restart")?.0;
    let last = failed.last().context("no connect met the restart")?.0;
    let refused = last.duration_since(first);
    let of = times.len();
    println!(
        "drained for {} ms; {} of {of} connects refused, within {} ms",
        drained_after.as_millis(),
        failed.len(),
        refused.as_millis()
    );
    ensure!(drained_after >= DRAIN, "{drained_after:?}");
    let limit = LoadScale::from_environment().timeout(MAX_REFUSAL);
    ensure!(refused <= limit, "{refused:?}");
    Ok(())
}

#[test]
fn a_frozen_agent_delays_no_other_agent_and_its_clients_get_a_reset() -> Result<()> {
    let (server, other) = (
        Server::start(Behaviour::Echo)?,
        Server::start(Behaviour::Echo)?,
    );
    let nodes = vec![("a", vec![server.at()]), ("b", vec![other.at()])];
    // The timeout for pings leaves enough time to finish the echoes through the other agent, even on a busy machine.
    let mut tunnel = TunnelSettings::nodes(nodes).start()?;
    let mut old = tunnel.connect(server.at())?;
    echo(&mut old, b"hello")?;
    // There are two connections, so that each of the other agent's sessions has one stream.
    let mut live = [tunnel.connect(other.at())?, tunnel.connect(other.at())?];

    tunnel.agent("a")?.signal(Signal::SIGSTOP)?;
    let start = Instant::now();
    fill_buffers(&mut old)?;
    for stream in &mut live {
        expect_fast_echoes("on another agent, next to a frozen one", stream)?;
    }
    ensure!(
        tunnel.count("agent_connection_lost")? == 0,
        "the frozen agent was disconnected before the echoes were done"
    );
    expect_reset(&mut old)?;
    println!(
        "the client got a reset {} ms after the freeze",
        start.elapsed().as_millis()
    );
    tunnel.until_counted("agent_connection_lost", 1)?;
    tunnel.until_disconnected("a")?;
    let mut refused = tunnel.connect(server.at())?;
    expect_refused(&mut refused)?;
    ensure!(tunnel.count("agent_not_connected")? >= 1);

    tunnel.agent("a")?.signal(Signal::SIGCONT)?;
    let took = until_served(&tunnel, server.at())?;
    println!(
        "served again {} ms after the agent resumed",
        took.as_millis()
    );
    Ok(())
}

#[test]
fn clients_of_a_killed_agent_get_a_reset_at_once() -> Result<()> {
    let (server, mut tunnel, mut old) = start_echo_tunnel(&[])?;

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

/// Makes `count` dials that must all be refused, spread over several threads.
fn make_failing_dials(tunnel: &Tunnel, target: SocketAddr, count: u32) -> Result<()> {
    const THREADS: usize = 8;
    let address = tunnel.steering_address_of(target)?;
    let work = || -> Result<()> {
        for _ in 0..count / 8 {
            let mut stream = dial(address)?;
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
    let (server, nobody) = (Server::start(Behaviour::Echo)?, address_without_listener()?);
    let mut tunnel = TunnelSettings::of(&[server.at(), nobody]).start()?;
    let pids = [tunnel.cloud()?.pid(), tunnel.agent("a")?.pid()];
    let [first, second] =
        DIALS.map(|count| LoadScale::from_environment().count(count).max(8) / 8 * 8);

    make_failing_dials(&tunnel, nobody, first)?;
    tunnel.until_counted("dial_refused", first.into())?;
    let usage_of = |pid| -> Result<_> {
        Ok((
            process_usage::resident_memory(pid)?,
            process_usage::open_files(pid)?,
        ))
    };
    let before = [usage_of(pids[0])?, usage_of(pids[1])?];
    make_failing_dials(&tunnel, nobody, second)?;
    tunnel.until_counted("dial_refused", (first + second).into())?;

    for ((what, pid), before) in ["cloud", "agent"].iter().zip(pids).zip(before) {
        let mut after = usage_of(pid)?;
        let settled = wait::until(RETURN_LIMIT, || {
            after = usage_of(pid).unwrap_or(after);
            after.0 < before.0 + MAX_GROWTH && after.1 <= before.1 + 2
        });
        settled.with_context(|| {
            format!("{what}: (bytes of memory, open files) were {before:?}, are {after:?}")
        })?;
    }
    echo(&mut tunnel.connect(server.at())?, b"hello")
}
