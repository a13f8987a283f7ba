//! Tests that the gateway determines an agent's node from the agent's certificate, and that streams to a node
//! reach only that node's agent.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::{Instant, pause},
    pki::{Authority, Validity},
    wait,
};

use crate::{
    fixture::{
        ANSWER, Tunnel, TunnelSettings, echo, expect_refused, expect_reset, start_echo_tunnel,
    },
    targets::{Behaviour, Server},
};

#[test]
fn a_session_belongs_to_the_node_in_its_certificate() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut tunnel = TunnelSettings::of(&[server.at()]).without_agents()?;

    // This agent is allowed to dial node a's targets, but its certificate names node b.
    let pair = tunnel.authority().agent("b", Validity::Current)?;
    tunnel.launch_agent("a", &pair)?;
    tunnel.until_connected("b")?;

    let mut stream = tunnel.connect(server.at())?;
    expect_refused(&mut stream)?;
    tunnel.until_counted("agent_not_connected", 1)?;
    ensure!(server.accepted() == 0 && tunnel.record()?.sessions("a") == 0);
    Ok(())
}

#[test]
fn a_client_of_one_node_never_reaches_the_agent_of_another() -> Result<()> {
    let (one, two) = (
        Server::start(Behaviour::Echo)?,
        Server::start(Behaviour::Echo)?,
    );
    let mut settings = TunnelSettings::nodes(vec![("a", vec![one.at()]), ("b", vec![two.at()])]);
    settings.allow = Some(vec![one.at(), two.at()]);
    let mut tunnel = settings.start()?;
    let mut first = tunnel.connect(one.at())?;
    echo(&mut first, b"hello")?;
    echo(&mut tunnel.connect(two.at())?, b"hello")?;

    tunnel.kill_agent("a")?;
    tunnel.until_disconnected("a")?;

    for _ in 0..20 {
        let mut stream = tunnel.connect(one.at())?;
        expect_refused(&mut stream)?;
    }
    ensure!(one.accepted() == 1 && two.accepted() == 1);
    echo(&mut tunnel.connect(two.at())?, b"hello")
}

/// Returns the expiry times of the gateway's certificate and of the certificate in the agent's first session.
fn expiries(tunnel: &Tunnel) -> Result<[String; 2]> {
    let record = tunnel.record()?;
    let of_agent = &record.nodes[0]["sessions"][0]["certificateExpires"];
    Ok([&record.identity["expires"], of_agent].map(ToString::to_string))
}

#[test]
fn certificates_are_replaced_under_live_streams() -> Result<()> {
    let (server, mut tunnel, mut live) = start_echo_tunnel(&[])?;
    let before = expiries(&tunnel)?;

    let authority = tunnel.authority();
    let gateway = authority.gateway(Validity::Longer)?;
    let agent = authority.agent("a", Validity::Longer)?;
    for (stem, pair) in [("gateway", gateway), ("agent-a", agent)] {
        tunnel.files(stem).write(&authority.pem(), &pair)?;
    }
    let renewed = || expiries(&tunnel).is_ok_and(|now| now[0] != before[0]);
    wait::until(ANSWER, renewed).context("the gateway still has its old certificate")?;
    let agent_renewed = tunnel.agent("a")?.agent_state()?;
    ensure!(
        agent_renewed.identity["problem"].is_null(),
        "{agent_renewed:?}"
    );
    echo(&mut live, b"still there")?;
    echo(&mut tunnel.connect(server.at())?, b"hello")?;

    // New sessions use the new certificates, and both ends trust them.
    tunnel.kill_cloud()?;
    tunnel.start_cloud()?;
    tunnel.until_connected("a")?;
    let now = expiries(&tunnel)?;
    ensure!(
        now[1] != before[1],
        "the agent still has its old certificate: {now:?}"
    );
    echo(&mut tunnel.connect(server.at())?, b"hello")
}

/// The life of the certificates in the next test, in seconds.
const LIFE: u64 = 20;

#[test]
fn sessions_change_over_five_times_while_streams_stay_open_and_end_with_their_certificate()
-> Result<()> {
    let life = Validity::Seconds(LIFE);
    let server = Server::start(Behaviour::Echo)?;
    let mut tunnel = TunnelSettings::of(&[server.at()]).without_agents()?;
    let expires = |tunnel: &Tunnel| {
        tunnel
            .record()
            .map(|record| record.identity["expires"].clone())
    };
    let first = expires(&tunnel)?;
    let authority = tunnel.authority();
    let gateway = authority.gateway(life)?;
    tunnel.files("gateway").write(&authority.pem(), &gateway)?;
    wait::until(ANSWER, || expires(&tunnel).is_ok_and(|now| now != first))?;
    let agent = authority.agent("a", life)?;
    tunnel.launch_agent("a", &agent)?;
    tunnel.until_connected("a")?;
    // One stream more for each change: there are too many for a session of their own each.
    let mut live = vec![tunnel.connect(server.at())?];
    let mut seen = session_names(&tunnel)?;
    let mut changes = 0;
    let start = Instant::now();
    // The certificates with which the stream's session began have expired long before the end, and so has the time in which
    // an end may still trust them.
    while changes < 5 || start.elapsed() < Duration::from_secs(LIFE + 15) {
        let authority = tunnel.authority();
        for (stem, pair) in [
            ("gateway", authority.gateway(life)?),
            ("agent-a", authority.agent("a", life)?),
        ] {
            tunnel.files(stem).write(&authority.pem(), &pair)?;
        }
        let expired = expiries_of(&tunnel)?;
        let renewed = Instant::now();
        let has_changed = || {
            let names = session_names(&tunnel).unwrap_or_default();
            // A session that is renewed in place keeps its name.
            let is_new = names.difference(&seen).count() >= 2;
            is_new || expiries_of(&tunnel).is_ok_and(|now| now.is_disjoint(&expired))
        };
        while !has_changed() {
            ensure!(
                renewed.elapsed() < ANSWER,
                "change {changes}: {}",
                tunnel.logs()
            );
            for stream in &mut live {
                echo(stream, b"still there")?;
            }
            pause(Duration::from_millis(50));
        }
        changes += 1;
        let names = session_names(&tunnel)?;
        ensure!(names.len() <= 8, "{names:?}");
        seen.extend(names);
        let mut stream = tunnel.connect(server.at())?;
        echo(&mut stream, b"hello")?;
        live.push(stream);
        let all_shown = || streams_of_agent(&mut tunnel).is_ok_and(|shown| shown == live.len());
        wait::until(ANSWER, all_shown).context("the agent's status lacks streams")?;
    }
    ensure!(server.accepted() == 1 + changes);
    // A session without streams has no reason to stay beside the agent's two for new streams.
    let mut last = live.split_off(live.len() - 1);
    drop(live);
    let few = || session_names(&tunnel).is_ok_and(|names| names.len() <= 3);
    wait::until(ANSWER, few).context("sessions without streams do not end")?;

    // Nobody renews the certificates any more.
    pause(Duration::from_secs(LIFE));
    tunnel.until_disconnected("a")?;
    expect_reset(&mut last[0])
}

/// Returns the times when the certificates of the sessions with the node's agent expire.
fn expiries_of(tunnel: &Tunnel) -> Result<BTreeSet<String>> {
    let record = tunnel.record()?;
    let sessions = record.nodes[0]["sessions"].as_array().into_iter().flatten();
    let expiries = sessions.map(|it| it["certificateExpires"].to_string());
    Ok(expiries.collect())
}

/// Returns how many streams the status of the node's agent shows.
fn streams_of_agent(tunnel: &mut Tunnel) -> Result<usize> {
    let view = tunnel.agent("a")?.agent_state()?.view;
    let connections = view["connections"].as_array().into_iter().flatten();
    let streams = connections.filter_map(|it| it["streams"].as_u64());
    Ok(usize::try_from(streams.sum::<u64>())?)
}

/// Returns the names of the sessions with the node's agent.
fn session_names(tunnel: &Tunnel) -> Result<BTreeSet<String>> {
    let record = tunnel.record()?;
    let sessions = record.nodes[0]["sessions"].as_array().into_iter().flatten();
    Ok(sessions.map(|it| it["name"].to_string()).collect())
}

#[test]
fn a_session_ends_when_the_ca_of_its_certificate_is_no_longer_trusted() -> Result<()> {
    let (server, mut tunnel, mut live) = start_echo_tunnel(&[])?;
    let other = Authority::new("other")?;
    let trust = |tunnel: &Tunnel, cas: &str| {
        let pair = tunnel.authority().gateway(Validity::Longer)?;
        tunnel.files("gateway").write(cas, &pair)
    };
    let both = tunnel.authority().pem() + &other.pem();
    trust(&tunnel, &both)?;
    let pair = other.agent("b", Validity::Current)?;
    tunnel.launch_agent("b", &pair)?;
    // The agent accepts only a certificate whose CA it trusts.
    tunnel.files("agent-b").write(&both, &pair)?;
    tunnel.until_connected("b")?;

    let own = tunnel.authority().pem();
    trust(&tunnel, &own)?;

    tunnel.until_disconnected("b")?;
    tunnel.until_counted("identity_rejected", 2)?;
    let error = tunnel.last_error("b")?;
    let text =
        "the agent's certificate is no longer valid: invalid peer certificate: UnknownIssuer";
    ensure!(error.contains(text), "{error}");
    ensure!(tunnel.record()?.sessions("a") == 2);
    echo(&mut live, b"still there")?;
    echo(&mut tunnel.connect(server.at())?, b"hello")
}
