//! A client that is refused is reset, and the same word tells why everywhere.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;
use tunnel_userspace::tunnel::Limits;

use crate::{
    support::{ANSWER, Plan, Tunnel, dial, echo, expect_refused},
    targets::{Act, Blackhole, Server, closed},
};

/// That a client of an address is reset, and why: as counted and as logged.
fn expect(tunnel: &Tunnel, to: SocketAddr, reason: &str) -> Result<()> {
    let before = tunnel.count(reason)?;
    let mut stream = dial(to)?;
    expect_refused(&mut stream).with_context(|| reason.to_owned())?;

    tunnel.until_counted(reason, before + 1)?;
    let logged = || tunnel.logs().lines().any(|line| line.contains(reason));
    wait::until(ANSWER, logged).with_context(|| format!("{reason} isn't logged\n{}", tunnel.logs()))
}

#[test]
fn what_is_not_on_the_allow_list_is_denied_by_the_agent() -> Result<()> {
    let (server, other) = (Server::start(Act::Echo)?, Server::start(Act::Echo)?);
    let mut plan = Plan::of(&[server.at(), other.at()]);
    plan.allow = Some(vec![other.at()]);
    let mut tunnel = plan.start()?;

    expect(&tunnel, tunnel.way_to(server.at())?, "target_denied")?;
    tunnel.until_agent_counted("a", "target_denied")?;
    let said = format!(
        "a ({}): refused by the agent: not on its allow-list",
        server.at()
    );
    ensure!(
        tunnel.last_error("a")? == said,
        "{}",
        tunnel.last_error("a")?
    );

    ensure!(server.accepted() == 0);
    echo(&mut tunnel.connect(other.at())?, b"hello")
}

#[test]
fn each_refusal_has_one_word() -> Result<()> {
    let (server, nobody, hole) = (Server::start(Act::Echo)?, closed()?, Blackhole::new()?);
    let elsewhere = Server::start(Act::Echo)?;
    let tunnel = Plan::nodes(vec![
        ("a", vec![server.at(), nobody, hole.at()]),
        ("b", vec![elsewhere.at()]),
    ]);
    let mut tunnel = tunnel.without_agents()?;
    tunnel.start_agent("a")?;

    expect(&tunnel, tunnel.way_to(nobody)?, "dial_refused")?;
    tunnel.until_agent_counted("a", "dial_refused")?;
    let said = format!("a ({nobody}): the target refused the agent's connect");
    ensure!(
        tunnel.last_error("a")? == said,
        "{}",
        tunnel.last_error("a")?
    );
    expect(&tunnel, tunnel.way_to(hole.at())?, "dial_timed_out")?;
    expect(
        &tunnel,
        tunnel.way_to(elsewhere.at())?,
        "agent_not_connected",
    )?;
    expect(&tunnel, tunnel.steering(999)?, "target_unknown")?;
    let beside = SocketAddr::from((Ipv4Addr::LOCALHOST, tunnel.ingress()));
    expect(&tunnel, beside, "arrived_outside")?;

    ensure!(elsewhere.accepted() == 0);
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// A session may have four streams; one more is refused, and not queued.
fn four_streams_at_most(plan: Plan, server: &Server) -> Result<()> {
    let tunnel = plan.start()?;
    let mut held = Vec::new();
    // Two sessions of four streams.
    for _ in 0..8 {
        let mut stream = tunnel.connect(server.at())?;
        echo(&mut stream, b"hello")?;
        held.push(stream);
    }

    expect(&tunnel, tunnel.way_to(server.at())?, "streams_full")?;

    for stream in &mut held {
        echo(stream, b"still there")?;
    }
    held.pop();
    let left = || tunnel.record().is_ok_and(|it| it.streams("a") == 7);
    wait::until(ANSWER, left).with_context(|| format!("{:?}", tunnel.record()))?;
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

#[test]
fn more_streams_than_a_gateway_allows_are_refused_and_the_others_live_on() -> Result<()> {
    let server = Server::start(Act::Echo)?;
    let mut plan = Plan::of(&[server.at()]);
    plan.of_agents = Some(plan.session.clone());
    plan.session.streams = 4;
    four_streams_at_most(plan, &server)
}

#[test]
fn more_streams_than_an_agent_allows_are_refused_and_the_others_live_on() -> Result<()> {
    let server = Server::start(Act::Echo)?;
    let mut plan = Plan::of(&[server.at()]);
    plan.of_agents = Some(Limits {
        streams: 4,
        ..plan.session.clone()
    });
    four_streams_at_most(plan, &server)
}
