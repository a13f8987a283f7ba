//! Faults of the daemon, the agent and the link to the edge, and the recovery. Services are not affected.
#![expect(clippy::print_stdout, reason = "prints the times, which it also limits")]

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::Instant,
    place::COMMAND,
    pod::Server,
    site::{KUBELET, Site},
    wait,
};

use super::{both, client, each_place, expect_refused, expect_served};
use crate::{
    scene::WEB,
    support::{HTTP, Way, addresses, serve, until_backends},
};

/// Starts a site whose cloud node also has a Service.
fn start() -> Result<(Site, Server)> {
    let site = Site::new()?;
    let backend = site.node().pod("backend")?;
    let server = serve(&backend)?;
    site.node()
        .apply(WEB.service("web").backends(addresses(&[&*backend])))?;
    until_backends(site.node(), "web", 1)?;
    Ok((site, server))
}

/// Asserts that the Service is served on the host and in a pod.
fn expect_service(site: &Site) -> Result<()> {
    each_place(site, |from| {
        let is_served = |way: Way| way.is_served(from.place, WEB, HTTP, "backend");
        Way::TCP.into_iter().try_for_each(is_served)
    })
}

/// Asserts that connects to every kubelet port are refused at once, while the Service is served.
fn expect_all_refused(site: &Site) -> Result<()> {
    each_place(site, |from| {
        let mut ports = KUBELET.into_iter().flat_map(both);
        ports.try_for_each(|to| expect_refused(from.place, to))
    })?;
    expect_service(site)
}

/// Asserts that a new client of the kubelet gets an error within [`COMMAND`], instead of a timeout.
fn expect_told(site: &Site) -> Result<()> {
    each_place(site, |from| {
        for to in both(KUBELET[0]) {
            let start = Instant::now();
            let outcome = client(site, from.place, to).and_then(|mut it| it.healthz());
            ensure!(outcome.is_err(), "{to} is served");
            let after = start.elapsed();
            ensure!(after < COMMAND, "{to}: failed only after {after:?}");
        }
        Ok(())
    })
}

#[test]
fn a_killed_daemon_refuses_at_once_and_leaves_services_alone() -> Result<()> {
    let (site, _server) = start()?;
    let node = site.node();
    let mut old = client(&site, node.host(), Site::at4(KUBELET[0]))?;
    old.upgrade()?;

    node.kill9()?;

    expect_all_refused(&site)?;
    old.exchange(b"anybody?").expect_err("the kill ends the stream");

    let start = Instant::now();
    node.start()?;
    expect_served(&site)?;
    println!("served again {:?} after the start", start.elapsed());
    expect_service(&site)
}

#[test]
fn a_daemon_that_stops_politely_refuses_and_serves_again() -> Result<()> {
    let (site, _server) = start()?;
    let node = site.node();

    node.stop()?;
    expect_all_refused(&site)?;

    node.start()?;
    site.until_served()
}

#[test]
#[ignore = "no kernel decides it: the ends of the tunnel miss each other by their own clocks"]
fn a_link_that_is_cut_is_told_and_clients_are_served_once_it_is_back() -> Result<()> {
    let (site, _server) = start()?;
    let mut old = client(&site, site.node().host(), Site::at4(KUBELET[0]))?;
    old.upgrade()?;

    let start = Instant::now();
    site.edge().cut()?;
    old.exchange(b"anybody?").expect_err("the stream ends after the cut");
    println!("the stream ended {:?} after the cut", start.elapsed());
    expect_told(&site)?;
    expect_service(&site)?;

    site.edge().mend()?;
    let start = Instant::now();
    expect_served(&site)?;
    println!(
        "served again {:?} after the link came back",
        start.elapsed()
    );
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: the ends of the tunnel miss each other by their own clocks"]
fn an_agent_that_is_frozen_or_killed_is_told_and_clients_are_served_once_it_is_back() -> Result<()>
{
    let (site, _server) = start()?;
    let mut old = client(&site, site.node().host(), Site::at4(KUBELET[0]))?;
    old.upgrade()?;

    site.edge().agent().signal(Signal::SIGSTOP)?;
    // The kernel stops the agent's threads one after another, so the first exchange may still succeed.
    wait::until(COMMAND, || old.exchange(b"anybody?").is_err()).context("the stream of the frozen agent has not ended")?;
    expect_told(&site)?;
    site.edge().agent().signal(Signal::SIGCONT)?;
    site.until_served()?;

    site.edge().agent().end(Signal::SIGKILL)?;
    wait::until(COMMAND, || expect_told(&site).is_ok()).context("the kubelet is still served after the kill of the agent")?;
    expect_service(&site)?;
    site.edge().start_agent(KUBELET)?;
    site.until_served()
}
