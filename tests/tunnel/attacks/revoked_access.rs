//! Tests that a stolen certificate, or a node that has left the cluster, is cut off while others go on.

use std::{net::TcpStream, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tunnel_tests::{
    environment,
    hostile_peer::HostilePeer,
    pki::{PemFiles, Validity},
    wait,
};

use crate::{
    fixture::{ANSWER, Tunnel, TunnelSettings, echo, expect_refused, expect_reset},
    targets::{Behaviour, Server},
};

/// The time for which a Node object may be missing.
const MISSING_NODE_TIMEOUT: Duration = Duration::from_secs(1);

/// A tunnel to the nodes `a` and `b`, with a stream to each.
struct Streams {
    tunnel: Tunnel,
    servers: [Server; 2],
    live: [TcpStream; 2],
}

impl Streams {
    fn start(missing_node_timeout: Option<Duration>) -> Result<Self> {
        let servers = [
            Server::start(Behaviour::Echo)?,
            Server::start(Behaviour::Echo)?,
        ];
        let [one, two] = servers.each_ref().map(Server::at);
        let settings = TunnelSettings {
            missing_node_timeout,
            ..TunnelSettings::nodes(vec![("a", vec![one]), ("b", vec![two])])
        };
        let tunnel = settings.start()?;
        let mut live = [tunnel.connect(one)?, tunnel.connect(two)?];
        for stream in &mut live {
            echo(stream, b"hello")?;
        }
        Ok(Self {
            tunnel,
            servers,
            live,
        })
    }

    /// Asserts that the stream to a node goes on, and that clients can connect to it.
    fn expect_served(&mut self, index: usize) -> Result<()> {
        echo(&mut self.live[index], b"still there")?;
        echo(
            &mut self.tunnel.connect(self.servers[index].at())?,
            b"hello",
        )
    }

    /// Waits until the node `a` can be reached again.
    fn expect_restored(&self) -> Result<()> {
        self.tunnel.until_connected("a")?;
        echo(&mut self.tunnel.connect(self.servers[0].at())?, b"hello")
    }

    /// Waits until the last error of the node `a` contains a text.
    fn until_last_error(&self, text: &str) -> Result<()> {
        let is_named = || {
            self.tunnel
                .last_error("a")
                .is_ok_and(|error| error.contains(text))
        };
        let named = wait::until(ANSWER, is_named);
        named.with_context(|| format!("{text}: {:?}", self.tunnel.last_error("a")))
    }

    /// Waits until the log of the agent of the node `a` contains a text.
    fn until_agent_logs(&mut self, text: &str) -> Result<()> {
        let agent = self.tunnel.agent("a")?;
        let logged = wait::until(2 * ANSWER, || agent.log().contains(text));
        logged.with_context(|| format!("{text}\n{}", agent.log()))
    }
}

/// Returns the serial number that `culvert ca show` prints for a certificate.
fn serial(files: &PemFiles) -> Result<String> {
    let mut command = Command::new(environment::culvert()?);
    let command = command.args(["ca", "show", "--output", "json"]);
    let output = command.arg(&files.cert).output()?;
    let shown: Value = serde_json::from_slice(&output.stdout)?;
    let serial = shown[0]["serial"].as_str().map(str::to_owned);
    serial.with_context(|| format!("no serial number: {output:?}"))
}

#[test]
fn a_stolen_certificate_on_the_deny_list_is_cut_off_and_the_true_agent_is_not() -> Result<()> {
    let mut streams = Streams::start(None)?;
    let tunnel = &streams.tunnel;
    let files = tunnel.files("stolen");
    let pair = tunnel.authority().agent("a", Validity::Current)?;
    files.write(&tunnel.authority().pem(), &pair)?;
    let mut thief = HostilePeer::agent(tunnel.gateway(), &files)?;
    thief.answer_hello()?;
    let sessions = |count| {
        wait::until(ANSWER, || {
            tunnel
                .record()
                .is_ok_and(|record| record.sessions("a") == count)
        })
    };
    sessions(3).context("the thief is not connected")?;

    let serial = serial(&files)?;
    tunnel.deny(&format!("# stolen\nserial {}\n", serial.to_uppercase()))?;

    sessions(2).context("the thief still has a session")?;
    while thief.next_request().is_ok() {}
    tunnel.until_counted("session_revoked", 1)?;
    let cause = format!(
        "the deny list (tunnel.gateway.denyFile) has the certificate of node a with the serial number {serial}"
    );
    let error = tunnel.last_error("a")?;
    ensure!(error == cause, "{error}");
    for attempt in 2..12 {
        let refused = HostilePeer::agent(tunnel.gateway(), &files).err();
        let error = format!("{:#}", refused.context("the thief is connected")?);
        ensure!(error.contains("CertificateRevoked"), "{error}");
        tunnel.until_counted("session_revoked", attempt)?;
    }
    ensure!(tunnel.logs().contains(&cause), "{}", tunnel.logs());

    // A list that can't be read lets nobody in.
    tunnel.deny("serial\n")?;
    let problem = || {
        tunnel
            .record()
            .map(|record| record.deny_list["problem"].clone())
    };
    let text = "line 1: `serial` is neither `node NAME` nor `serial DIGITS`";
    let is_named = || problem().is_ok_and(|problem| problem.to_string().contains(text));
    wait::until(ANSWER, is_named).with_context(|| format!("{:?}", problem()))?;
    ensure!(HostilePeer::agent(tunnel.gateway(), &files).is_err());

    streams.expect_served(0)?;
    streams.expect_served(1)
}

#[test]
fn a_node_on_the_deny_list_is_cut_off_until_it_is_removed_from_the_list() -> Result<()> {
    let mut streams = Streams::start(None)?;

    streams.tunnel.deny("node a\n")?;

    expect_reset(&mut streams.live[0])?;
    streams.tunnel.until_disconnected("a")?;
    streams.tunnel.until_agent_counted("a", "session_revoked")?;
    streams.until_agent_logs("the gateway's deny list has this node (TLS alert AccessDenied)")?;
    expect_refused(&mut streams.tunnel.connect(streams.servers[0].at())?)?;
    streams.until_last_error("the deny list (tunnel.gateway.denyFile) has node a")?;
    streams.expect_served(1)?;

    streams.tunnel.deny("# node a\n")?;
    streams.expect_restored()
}

#[test]
fn a_gateway_with_a_damaged_deny_list_lets_nobody_in_after_a_restart() -> Result<()> {
    let mut streams = Streams::start(None)?;
    streams.tunnel.deny("node a\n")?;
    expect_reset(&mut streams.live[0])?;
    streams.tunnel.deny("node a\n<<<<<<< HEAD\n")?;
    streams.tunnel.kill_cloud()?;
    streams.tunnel.start_cloud()?;

    let refused = "the deny list has never been valid";
    let logged = || streams.tunnel.logs().contains(refused);
    wait::until(2 * ANSWER, logged).with_context(|| streams.tunnel.logs())?;
    let record = streams.tunnel.record()?;
    ensure!(
        record.sessions("a") + record.sessions("b") == 0,
        "{record:?}"
    );

    streams.tunnel.deny("node a\n")?;
    streams.tunnel.until_connected("b")?;
    echo(
        &mut streams.tunnel.connect(streams.servers[1].at())?,
        b"hello",
    )?;
    ensure!(streams.tunnel.record()?.sessions("a") == 0);
    Ok(())
}

#[test]
fn a_deleted_node_is_cut_off_until_its_node_object_is_back() -> Result<()> {
    let mut streams = Streams::start(Some(MISSING_NODE_TIMEOUT))?;

    streams.tunnel.delete_node("a")?;

    expect_reset(&mut streams.live[0])?;
    streams.tunnel.until_disconnected("a")?;
    let cause = "the node has no Node object (tunnel.gateway.missingNodeTimeout)";
    streams.until_agent_logs(&format!("the gateway refused the session: {cause}"))?;
    expect_refused(&mut streams.tunnel.connect(streams.servers[0].at())?)?;
    streams.until_last_error(cause)?;
    streams.expect_served(1)?;

    streams.tunnel.create_node("a")?;
    streams.expect_restored()
}

#[test]
fn an_agent_that_starts_before_its_node_object_exists_connects_once_it_does() -> Result<()> {
    let mut streams = Streams::start(Some(MISSING_NODE_TIMEOUT))?;
    let tunnel = &mut streams.tunnel;
    let pair = tunnel.authority().agent("new", Validity::Current)?;
    tunnel.launch_agent("new", &pair)?;
    let refused = "the node has no Node object";
    let agent = tunnel.agent("new")?;
    wait::until(ANSWER, || agent.log().contains(refused)).with_context(|| agent.log())?;

    tunnel.create_node("new")?;
    tunnel.until_connected("new")?;
    streams.expect_served(0)
}
