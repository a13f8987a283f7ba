//! A refused client gets a reset; counters and logs have the same reason for it.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;
use tunnel_userspace::tunnel::Limits;

use crate::{
    support::{ANSWER, Plan, Tunnel, dial, echo, expect_refused},
    targets::{Act, Blackhole, Server, closed},
};

/// Asserts that a client of an address gets a reset, and that the reason is counted and logged.
fn expect(tunnel: &Tunnel, to: SocketAddr, reason: &str) -> Result<()> {
    let before = tunnel.count(reason)?;
    let mut stream = dial(to)?;
    expect_refused(&mut stream).with_context(|| reason.to_owned())?;

    tunnel.until_counted(reason, before + 1)?;
    let logged = || tunnel.logs().lines().any(|line| line.contains(reason));
    wait::until(ANSWER, logged).with_context(|| format!("no log line has {reason}:\n{}", tunnel.logs()))
}

#[test]
fn each_refusal_has_one_reason() -> Result<()> {
    let (server, nobody, hole) = (Server::start(Act::Echo)?, closed()?, Blackhole::new()?);
    let [denied, elsewhere] = [Server::start(Act::Echo)?, Server::start(Act::Echo)?];
    let mut plan = Plan::nodes(vec![
        ("a", vec![server.at(), nobody, hole.at(), denied.at()]),
        ("b", vec![elsewhere.at()]),
    ]);
    plan.allow = Some(vec![server.at(), nobody, hole.at()]);
    let mut tunnel = plan.without_agents()?;
    tunnel.start_agent("a")?;

    for (target, reason, said) in [
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
        expect(&tunnel, tunnel.way_to(target)?, reason)?;
        tunnel.until_agent_counted("a", reason)?;
        let error = tunnel.last_error("a")?;
        ensure!(error == format!("a ({target}): {said}"), "{error}");
    }
    let beside = SocketAddr::from((Ipv4Addr::LOCALHOST, tunnel.ingress()));
    for (to, reason) in [
        (tunnel.way_to(hole.at())?, "dial_timed_out"),
        (tunnel.way_to(elsewhere.at())?, "agent_not_connected"),
        (tunnel.steering(999)?, "target_unknown"),
        (beside, "arrived_unsteered"),
    ] {
        expect(&tunnel, to, reason)?;
    }

    ensure!(denied.accepted() == 0 && elsewhere.accepted() == 0);
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// Asserts that each session takes four streams, and that one more stream is refused instead of queued.
fn four_streams_at_most(plan: Plan, server: &Server) -> Result<()> {
    let tunnel = plan.start()?;
    let mut held = Vec::new();
    // The agent has two sessions, of four streams each.
    for _ in 0..8 {
        let mut stream = tunnel.connect(server.at())?;
        echo(&mut stream, b"hello")?;
        held.push(stream);
    }

    expect(&tunnel, tunnel.way_to(server.at())?, "stream_limit")?;

    for stream in &mut held {
        echo(stream, b"still there")?;
    }
    held.pop();
    let left = || tunnel.record().is_ok_and(|it| it.streams("a") == 7);
    wait::until(ANSWER, left).with_context(|| format!("{:?}", tunnel.record()))?;
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// Returns the limits of the gateway, or those of agents, for modification.
type Bounds = fn(&mut Plan) -> &mut Limits;

#[test]
fn streams_beyond_the_limit_of_an_end_are_refused_and_the_others_continue() -> Result<()> {
    let ends: [(_, Bounds); 2] = [
        ("gateway", |plan| &mut plan.session),
        ("agent", |plan| &mut plan.of_agents),
    ];
    for (end, limits) in ends {
        let server = Server::start(Act::Echo)?;
        let mut plan = Plan::of(&[server.at()]);
        limits(&mut plan).max_streams = 4;
        four_streams_at_most(plan, &server).with_context(|| format!("limits of the {end}"))?;
    }
    Ok(())
}
