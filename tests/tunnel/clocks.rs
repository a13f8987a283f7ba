//! Tests of machines whose clocks are wrong.

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tunnel_tests::{pki::Validity, tunnel_process::AgentState, wait};

use crate::{
    fixture::{ANSWER, Tunnel, TunnelSettings, echo},
    targets::{Behaviour, Server},
};

/// The life of a certificate that a clock that is a day ahead takes for expired, in seconds.
const HOUR: u64 = 3600;
const DAY: i64 = 86_400;

#[test]
fn a_machine_that_wakes_in_1970_connects_as_of_the_last_time_that_it_wrote_down() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.agents_ahead = -Timestamp::now().as_second();
    let mut tunnel = settings.without_agents()?;
    tunnel.remember_time(Timestamp::now() - SignedDuration::from_mins(10))?;

    tunnel.start_agent("a")?;

    echo(&mut tunnel.connect(server.at())?, b"hello")?;
    let state = tunnel.agent("a")?.agent_state()?;
    let problem = state.identity["clockProblem"].to_string();
    ensure!(problem.contains("says 1970-01-01T"), "{state:?}");
    let skew = tunnel.record()?.nodes[0]["sessions"][0]["clockSkewSeconds"].clone();
    ensure!(skew.as_f64() < Some(-1e9), "{skew}");
    Ok(())
}

#[test]
fn a_machine_that_wakes_in_1970_learns_from_a_gateways_certificate_that_it_is_later_already()
-> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.agents_ahead = -Timestamp::now().as_second();
    let mut tunnel = settings.without_agents()?;
    let expires = |tunnel: &Tunnel| Ok(tunnel.record()?.identity["expires"].clone());
    let earlier: Value = expires(&tunnel)?;
    let gateway = tunnel.authority().gateway(Validity::SinceAnHour)?;
    let ca = tunnel.authority().pem();
    tunnel.files("gateway").write(&ca, &gateway)?;
    let is_other = |now: Result<Value>| now.is_ok_and(|now| now != earlier);
    wait::until(ANSWER, || is_other(expires(&tunnel)))?;
    tunnel.remember_time(Timestamp::now() - SignedDuration::from_hours(2))?;

    tunnel.start_agent("a")?;

    echo(&mut tunnel.connect(server.at())?, b"hello")?;
    let agent = tunnel.agent("a")?;
    let learnt = "a certificate is valid from a later time on";
    ensure!(agent.log().contains(learnt), "{}", agent.log());
    Ok(())
}

#[test]
fn a_machine_that_is_a_day_ahead_names_both_times_of_its_own_and_the_gateways_certificate()
-> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.agents_ahead = DAY;
    let mut tunnel = settings.without_agents()?;
    let tomorrow = (Timestamp::now() + SignedDuration::from_secs(DAY)).to_string();
    let (date, _) = tomorrow.split_once('T').context("no date")?;
    let clock = format!("this machine's clock says {date}");

    let short = tunnel.authority().agent("a", Validity::Seconds(HOUR))?;
    tunnel.launch_agent("a", &short)?;
    let own = "agent-a.pem: expired on ";
    until_both_times(
        &mut tunnel,
        |state| state.identity["problem"].to_string(),
        own,
        &clock,
    )?;

    let authority = tunnel.authority();
    let gateway = authority.gateway(Validity::Seconds(HOUR))?;
    let long = authority.agent("a", Validity::Longer)?;
    for (stem, pair) in [("gateway", gateway), ("agent-a", long)] {
        tunnel.files(stem).write(&authority.pem(), &pair)?;
    }
    let error = |state: &AgentState| state.view["connections"][0]["lastError"].to_string();
    until_both_times(
        &mut tunnel,
        error,
        "the peer's certificate expired on ",
        &clock,
    )
}

/// Waits until a text in the agent's state, and the agent's log, have both the date of the certificate and the time of the clock.
fn until_both_times(
    tunnel: &mut Tunnel,
    text: impl Fn(&AgentState) -> String,
    date: &str,
    clock: &str,
) -> Result<()> {
    let has_both = |text: &str| text.contains(date) && text.contains(clock);
    let agent = tunnel.agent("a")?;
    let found = || {
        agent
            .agent_state()
            .is_ok_and(|state| has_both(&text(&state)))
    };
    wait::until(ANSWER, || found() && agent.log().lines().any(has_both))
        .with_context(|| format!("{:?}\n{}", agent.agent_state(), agent.log()))
}
