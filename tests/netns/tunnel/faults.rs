//! Tests faults in the daemon, the agent and the link to the edge, and the recovery from them. Services must
//! not be affected.
#![expect(
    clippy::print_stdout,
    reason = "prints the times, which it also limits"
)]

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::Instant,
    pod::Server,
    sandbox::COMMAND_TIMEOUT,
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use super::{client, edge_addresses, expect_refused, expect_served, for_each_client};
use crate::{
    fixture::WEB,
    support::{Dialer, HTTP, addresses, serve, until_backends},
};

/// Starts a test bed whose cloud node also has a Service. Returns the test bed and the Service's server.
fn start() -> Result<(TunnelTestbed, Server)> {
    let testbed = TunnelTestbed::new()?;
    let backend = testbed.node().pod("backend")?;
    let server = serve(&backend)?;
    testbed
        .node()
        .apply(WEB.service("web").backends(addresses(&[&*backend])))?;
    until_backends(testbed.node(), "web", 1)?;
    Ok((testbed, server))
}

/// Asserts that the Service is reachable from the host and from a pod.
fn expect_service(testbed: &TunnelTestbed) -> Result<()> {
    for_each_client(testbed, |from| {
        let is_served = |dialer: Dialer| dialer.expect_served(from.sandbox, WEB, HTTP, "backend");
        Dialer::TCP.into_iter().try_for_each(is_served)
    })
}

/// Asserts that connections to every kubelet port are refused at once, while the Service remains reachable.
fn expect_all_refused(testbed: &TunnelTestbed) -> Result<()> {
    for_each_client(testbed, |from| {
        let mut ports = KUBELET_PORTS.into_iter().flat_map(edge_addresses);
        ports.try_for_each(|to| expect_refused(from.sandbox, to))
    })?;
    expect_service(testbed)
}

/// Asserts that a new kubelet client fails within [`COMMAND_TIMEOUT`].
fn expect_prompt_error(testbed: &TunnelTestbed) -> Result<()> {
    for_each_client(testbed, |from| {
        for to in edge_addresses(KUBELET_PORTS[0]) {
            let start = Instant::now();
            let result = client(testbed, from.sandbox, to).and_then(|mut it| it.healthz());
            ensure!(result.is_err(), "{to} is served");
            let after = start.elapsed();
            ensure!(after < COMMAND_TIMEOUT, "{to}: failed only after {after:?}");
        }
        Ok(())
    })
}

#[test]
fn a_killed_daemon_refuses_at_once_and_leaves_services_alone() -> Result<()> {
    let (testbed, _server) = start()?;
    let node = testbed.node();
    let mut old = client(
        &testbed,
        node.host(),
        TunnelTestbed::addr_v4(KUBELET_PORTS[0]),
    )?;
    old.upgrade()?;

    node.kill9()?;

    expect_all_refused(&testbed)?;
    old.exchange(b"anybody?")
        .expect_err("the kill ends the stream");

    let start = Instant::now();
    node.start()?;
    expect_served(&testbed)?;
    println!("served again {:?} after the start", start.elapsed());
    expect_service(&testbed)
}

#[test]
fn after_an_orderly_stop_connects_are_refused_until_the_next_start() -> Result<()> {
    let (testbed, _server) = start()?;
    let node = testbed.node();

    node.stop()?;
    expect_all_refused(&testbed)?;

    node.start()?;
    testbed.wait_for_kubelet()
}

#[test]
#[ignore = "independent of the kernel: timeouts of the tunnel's ends"]
fn a_cut_link_ends_streams_and_clients_are_served_once_it_is_back() -> Result<()> {
    let (testbed, _server) = start()?;
    let mut old = client(
        &testbed,
        testbed.node().host(),
        TunnelTestbed::addr_v4(KUBELET_PORTS[0]),
    )?;
    old.upgrade()?;

    let start = Instant::now();
    testbed.edge().cut_link()?;
    old.exchange(b"anybody?")
        .expect_err("the stream ends after the cut");
    println!("the stream ended {:?} after the cut", start.elapsed());
    expect_prompt_error(&testbed)?;
    expect_service(&testbed)?;

    testbed.edge().restore_link()?;
    let start = Instant::now();
    expect_served(&testbed)?;
    println!(
        "served again {:?} after the link came back",
        start.elapsed()
    );
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: timeouts of the tunnel's ends"]
fn a_frozen_or_killed_agent_ends_streams_and_clients_are_served_once_it_is_back() -> Result<()> {
    let (testbed, _server) = start()?;
    let mut old = client(
        &testbed,
        testbed.node().host(),
        TunnelTestbed::addr_v4(KUBELET_PORTS[0]),
    )?;
    old.upgrade()?;

    testbed.edge().agent().signal(Signal::SIGSTOP)?;
    // The kernel stops the agent's threads one by one, so the first exchanges may still succeed.
    wait::until(COMMAND_TIMEOUT, || old.exchange(b"anybody?").is_err())
        .context("the stream of the frozen agent has not ended")?;
    expect_prompt_error(&testbed)?;
    testbed.edge().agent().signal(Signal::SIGCONT)?;
    testbed.wait_for_kubelet()?;

    testbed.edge().agent().stop(Signal::SIGKILL)?;
    wait::until(COMMAND_TIMEOUT, || expect_prompt_error(&testbed).is_ok())
        .context("the kubelet is still served after the kill of the agent")?;
    expect_service(&testbed)?;
    testbed.edge().start_agent(KUBELET_PORTS)?;
    testbed.wait_for_kubelet()
}
