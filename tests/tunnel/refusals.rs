//! Tests that a refused client gets a reset, and that the counters and the logs give the same reason for it.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;
use tunnel_userspace::tunnel::SessionLimits;

use crate::{
    fixture::{ANSWER, Tunnel, TunnelSettings, dial, echo, expect_refused},
    targets::{Behaviour, Blackhole, Server, address_without_listener},
};

/// Asserts that a client that connects to an address gets a reset, and that the reason is counted and logged.
fn expect_reset_and_reason(tunnel: &Tunnel, to: SocketAddr, reason: &str) -> Result<()> {
    let before = tunnel.count(reason)?;
    let mut stream = dial(to)?;
    expect_refused(&mut stream).with_context(|| reason.to_owned())?;

    tunnel.until_counted(reason, before + 1)?;
    let logged = || tunnel.logs().lines().any(|line| line.contains(reason));
    wait::until(ANSWER, logged)
        .with_context(|| format!("no log line has {reason}:\n{}", tunnel.logs()))
}

#[test]
fn each_refusal_has_one_reason() -> Result<()> {
    let (server, nobody, hole) = (
        Server::start(Behaviour::Echo)?,
        address_without_listener()?,
        Blackhole::new()?,
    );
    let [denied, elsewhere] = [
        Server::start(Behaviour::Echo)?,
        Server::start(Behaviour::Echo)?,
    ];
    let mut settings = TunnelSettings::nodes(vec![
        ("a", vec![server.at(), nobody, hole.at(), denied.at()]),
        ("b", vec![elsewhere.at()]),
    ]);
    settings.allow = Some(vec![server.at(), nobody, hole.at()]);
    let mut tunnel = settings.without_agents()?;
    tunnel.start_agent("a")?;

    for (target, reason, message) in [
        (
            denied.at(),
            "target_denied",
            "refused by the agent: not on its allow-list",
        ),
        (
            nobody,
            "dial_refused",
            "the target refused the agent's connect",
        ),
    ] {
        expect_reset_and_reason(&tunnel, tunnel.steering_address_of(target)?, reason)?;
        tunnel.until_agent_counted("a", reason)?;
        let error = tunnel.last_error("a")?;
        ensure!(error == format!("a ({target}): {message}"), "{error}");
    }
    let unsteered = SocketAddr::from((Ipv4Addr::LOCALHOST, tunnel.ingress()));
    for (to, reason) in [
        (tunnel.steering_address_of(hole.at())?, "dial_timed_out"),
        (
            tunnel.steering_address_of(elsewhere.at())?,
            "agent_not_connected",
        ),
        (tunnel.steering_address(999)?, "target_unknown"),
        (unsteered, "arrived_unsteered"),
    ] {
        expect_reset_and_reason(&tunnel, to, reason)?;
    }

    ensure!(denied.accepted() == 0 && elsewhere.accepted() == 0);
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// Asserts that each session accepts four streams, and that one more stream is refused instead of queued.
fn expect_four_streams_per_session(settings: TunnelSettings, server: &Server) -> Result<()> {
    let tunnel = settings.start()?;
    let mut held = Vec::new();
    // The agent has two sessions, with four streams each.
    for _ in 0..8 {
        let mut stream = tunnel.connect(server.at())?;
        echo(&mut stream, b"hello")?;
        held.push(stream);
    }

    expect_reset_and_reason(
        &tunnel,
        tunnel.steering_address_of(server.at())?,
        "stream_limit",
    )?;

    for stream in &mut held {
        echo(stream, b"still there")?;
    }
    held.pop();
    let left = || tunnel.record().is_ok_and(|it| it.streams("a") == 7);
    wait::until(ANSWER, left).with_context(|| format!("{:?}", tunnel.record()))?;
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// A function that returns either the gateway's or the agents' limits, so that a test can change them.
type SelectLimits = fn(&mut TunnelSettings) -> &mut SessionLimits;

#[test]
fn streams_beyond_the_limit_of_an_end_are_refused_and_the_others_continue() -> Result<()> {
    let ends: [(_, SelectLimits); 2] = [
        ("gateway", |settings| &mut settings.gateway_limits),
        ("agent", |settings| &mut settings.agent_limits),
    ];
    for (end, limits) in ends {
        let server = Server::start(Behaviour::Echo)?;
        let mut settings = TunnelSettings::of(&[server.at()]);
        limits(&mut settings).max_streams = 4;
        expect_four_streams_per_session(settings, &server)
            .with_context(|| format!("limits of the {end}"))?;
    }
    Ok(())
}
